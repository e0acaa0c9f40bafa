"""The weight map of latent attention: named tensors, parameters, how they correspond.

The down-projections, whose outputs all heads share, and the norms after them are whole on every
tensor-parallel rank. This file knows no family by name and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrlhf.models.spec import Latent, ModelSpec
from mrlhf.weights.shard import Rule, Shape

# Parameter, tensor, and the dimension that ranks split.
_OF_QUERIES = (
    ("linear_q_down_proj", "q_a_proj", None),
    ("q_layernorm", "q_a_layernorm", None),
    ("linear_q_up_proj", "q_b_proj", 0),
)
_OF_WHOLE_QUERIES = (("linear_q_proj", "q_proj", 0),)
_OF_KEYS = (
    ("linear_kv_down_proj", "kv_a_proj_with_mqa", None),
    ("kv_layernorm", "kv_a_layernorm", None),
    ("linear_kv_up_proj", "kv_b_proj", 0),
    ("linear_proj", "o_proj", 1),
)


def _parts(latent: Latent) -> tuple[tuple[str, str, int | None], ...]:
    return (*(_OF_WHOLE_QUERIES if latent.q_rank is None else _OF_QUERIES), *_OF_KEYS)


def latent_shapes(spec: ModelSpec, latent: Latent, prefix: str) -> Iterator[tuple[str, Shape]]:
    """Name and full shape of every tensor of the attention with this prefix."""
    hidden = spec.hidden_size
    heads = spec.num_heads
    q_rank = latent.q_rank or 0
    shapes: dict[str, Shape] = {
        "q_proj": (heads * spec.head_dim, hidden),
        "q_a_proj": (q_rank, hidden),
        "q_a_layernorm": (q_rank,),
        "q_b_proj": (heads * spec.head_dim, q_rank),
        "kv_a_proj_with_mqa": (latent.kv_rank + spec.rotary_dim, hidden),
        "kv_a_layernorm": (latent.kv_rank,),
        "kv_b_proj": (heads * (latent.plain_dim + latent.value_dim), latent.kv_rank),
        "o_proj": (hidden, heads * latent.value_dim),
    }
    for _, tensor, _ in _parts(latent):
        yield f"{prefix}{tensor}.weight", shapes[tensor]


def latent_parameters(latent: Latent) -> list[str]:
    """The parameters of the attention of a layer, in the module's order."""
    return [f"{parameter}.weight" for parameter, _, _ in _parts(latent)]


def latent_rules(latent: Latent, prefix: str) -> dict[str, Rule]:
    """The rules of the parameters of the attention whose tensors have this prefix."""
    return {
        f"self_attention.{parameter}.weight": Rule((f"{prefix}{tensor}.weight",), dim)
        for parameter, tensor, dim in _parts(latent)
    }
