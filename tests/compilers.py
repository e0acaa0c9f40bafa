"""Compiled functions, and machines that cannot compile them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from mrlhf.host import kernels


def without_compiler() -> AbstractContextManager[Any]:
    """A context, to be entered any number of times, in which all runs on torch's operators."""
    return patch.object(kernels, "find", lambda dtype: None)


def both_ways(dtype: torch.dtype = torch.float32) -> tuple[AbstractContextManager[Any], ...]:
    """With compiled functions, and without."""
    assert kernels.find(dtype) is not None, "this machine has no C++ compiler"
    return nullcontext(), without_compiler()
