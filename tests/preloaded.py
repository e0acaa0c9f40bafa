"""The modules that take long to import, imported once for the ranks of all tests.

The fork server of `tests/ranks.py` imports this file, and every rank is a fork of that server. What
is imported here must start no thread, join no process group and not touch a GPU.
"""

from __future__ import annotations

import os

import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import mrlhf.roles.actor  # noqa: F401  torch and megatron-core come with it

IMPORTED_BY = os.getpid()
