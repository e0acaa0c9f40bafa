"""OLMo-2: norms on what attention and MLP give, and on all heads of q and of k together.

This file knows only what its `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.dense import dense_family, dense_spec
from mrlhf.models.spec import Head, ModelSpec


def read_config(config: dict[str, Any], head: Head) -> ModelSpec:
    """The spec of an OLMo-2 `config.json`."""
    if config["attention_bias"]:
        raise ConfigError(
            "config.json sets attention_bias: biases in an OLMo model are not supported; no "
            "published model has them"
        )
    return replace(dense_spec(config, head), qk_norm="projection", norms="after")


OLMO2 = dense_family("olmo2", "Olmo2", read_config)
