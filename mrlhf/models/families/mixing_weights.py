"""The weight maps of what layers have in place of plain attention: latent attention and delta nets.

Named tensors, parameters, and how they correspond.

The down-projections of latent attention, whose outputs all heads share, and the norms after them
are whole on every tensor-parallel rank. This file knows no family by name and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrlhf.models.spec import DeltaNet, Indexer, Latent, ModelSpec
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
    rules = {
        f"self_attention.{parameter}.weight": Rule((f"{prefix}{tensor}.weight",), dim)
        for parameter, tensor, dim in _parts(latent)
    }
    for name in INDEXER:
        rules[f"self_attention.indexer.{name}"] = Rule((f"{prefix}indexer.{name}",), dim=None)
    # TransformerEngine fuses each norm into the linear layer that follows it.
    for letter in ("kv",) if latent.q_rank is None else ("q", "kv"):
        fused = f"self_attention.linear_{letter}_up_proj.layer_norm_weight"
        rules[fused] = rules[f"self_attention.{letter}_layernorm.weight"]
    return rules


def indexer_shapes(
    spec: ModelSpec, latent: Latent, indexer: Indexer, prefix: str
) -> Iterator[tuple[str, Shape]]:
    """Name and full shape of every tensor of the indexer with this prefix."""
    assert latent.q_rank is not None, "its queries come from latents"
    yield prefix + "wq_b.weight", (indexer.heads * indexer.head_dim, latent.q_rank)
    yield prefix + "wk.weight", (indexer.head_dim, spec.hidden_size)
    for kind in ("weight", "bias"):
        yield f"{prefix}k_norm.{kind}", (indexer.head_dim,)
    yield prefix + "weights_proj.weight", (indexer.heads, spec.hidden_size)


INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
"""The tensors of an indexer, and its parameters, in their order; every rank has them whole."""


def delta_shapes(hidden: int, net: DeltaNet, prefix: str) -> Iterator[tuple[str, Shape]]:
    """Name and full shape of every tensor of the net with this prefix."""
    yield prefix + "dt_bias", (net.value_heads,)
    yield prefix + "A_log", (net.value_heads,)
    yield prefix + "conv1d.weight", (net.channels, 1, net.taps)
    rows = {"qkv": net.channels, "z": net.value_size, "b": net.value_heads, "a": net.value_heads}
    if net.fused_tensors:
        rows = {"qkvz": net.channels + net.value_size, "ba": 2 * net.value_heads}
    for name, count in rows.items():
        yield f"{prefix}in_proj_{name}.weight", (count, hidden)
    yield prefix + "norm.weight", (net.value_dim,)
    yield prefix + "out_proj.weight", (hidden, net.value_size)


def delta_rules(net: DeltaNet, prefix: str) -> dict[str, Rule]:
    """The rules of the parameters, in which the rows of a key head are together."""
    q, k = net.key_size, 2 * net.key_size
    rows = ((0, q), (q, k), (k, net.channels))

    def of_heads(*names: str) -> Rule:
        return Rule(tuple(prefix + name for name in names), dim=0, periods=net.key_heads)

    qkvz = of_heads("in_proj_qkvz.weight")
    ba = of_heads("in_proj_ba.weight")
    if not net.fused_tensors:
        qkvz = of_heads(*["in_proj_qkv.weight"] * 3, "in_proj_z.weight")
        qkvz = qkvz._replace(intervals=(*rows, (0, net.value_size)))
        ba = of_heads("in_proj_b.weight", "in_proj_a.weight")
    return {
        "self_attention.A_log": of_heads("A_log"),
        "self_attention.dt_bias": of_heads("dt_bias"),
        "self_attention.conv1d": Rule((prefix + "conv1d.weight",) * 3, dim=0, intervals=rows),
        "self_attention.norm": Rule((prefix + "norm.weight",), dim=None),
        "self_attention.linear_qkvz.weight": qkvz,
        "self_attention.linear_ba.weight": ba,
        "self_attention.linear_proj.weight": Rule((prefix + "out_proj.weight",), dim=1),
    }
