"""GLM-5 and DeepSeek-V3.2: latent attention to the tokens that an indexer chooses.

This file knows only what their `config.json` may say.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mrlhf.errors import ConfigError
from mrlhf.models.families.base import Family
from mrlhf.models.families.deepseek_v3 import REQUIRED, latent_spec
from mrlhf.models.families.dense import refuse_scalar, require_values
from mrlhf.models.families.glm4_moe_lite import listed_experts
from mrlhf.models.families.mixture import count, grouped_family, with_experts
from mrlhf.models.spec import Head, Indexer, ModelSpec

_MOST_CHOSEN = 10**7


def _read_config(
    config: dict[str, Any], head: Head, class_stem: str, interleaved: bool
) -> ModelSpec:
    refuse_scalar(config, head, class_stem)
    require_values(config, {"indexer_rope_interleave": interleaved})
    # Both rotate neighbours, whatever a file says.
    spec = latent_spec({**config, "rope_interleave": True}, head)
    assert spec.latent is not None
    indexer = Indexer(
        heads=count(config, "index_n_heads"),
        head_dim=count(config, "index_head_dim"),
        interleaved=interleaved,
        layers=_own_indexers(config),
        most=count(config, "index_topk", most=_MOST_CHOSEN),
    )
    if indexer.head_dim < spec.rotary_dim:
        raise ConfigError(
            f"config.json has index_head_dim={indexer.head_dim}; it must be at least the "
            f"{spec.rotary_dim} of qk_rope_head_dim, which are rotated"
        )
    spec = replace(spec, latent=replace(spec.latent, indexer=indexer))
    return with_experts(spec, listed_experts(config))


def _own_indexers(config: dict[str, Any]) -> tuple[bool, ...]:
    layers = config["num_hidden_layers"]
    kinds = config.get("indexer_types") or ["full"] * layers
    if len(kinds) != layers or set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise ConfigError(
            f"config.json has indexer_types={kinds!r}; it must say full or shared of each of "
            f"{layers} layers, and full of the first"
        )
    return tuple(kind == "full" for kind in kinds)


def _family(model_type: str, class_stem: str, interleaved: bool) -> Family:
    """Return a family; `interleaved` is how its indexers rotate."""
    keys = (*REQUIRED, "index_n_heads", "index_head_dim", "index_topk")
    read = partial(_read_config, class_stem=class_stem, interleaved=interleaved)
    return grouped_family(model_type, class_stem, read, keys)


DEEPSEEK_V32 = _family("deepseek_v32", "DeepseekV32", interleaved=False)
GLM_MOE_DSA = _family("glm_moe_dsa", "GlmMoeDsa", interleaved=True)
