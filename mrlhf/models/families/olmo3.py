"""OLMo-3: as OLMo-2, with a window on some layers, which may rotate otherwise than the rest.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from typing import Any

from mrlhf.models.families.dense import dense_family, read_by_layer_type
from mrlhf.models.families.olmo2 import read_config as read_olmo2
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of an OLMo-3 `config.json`."""
    return read_by_layer_type(config, head, read_olmo2)


OLMO3 = dense_family("olmo3", "Olmo3", read_config)
