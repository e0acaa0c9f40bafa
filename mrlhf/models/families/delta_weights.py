"""The weight map of a gated delta net: named tensors, parameters, and how they correspond.

This file knows no family by name and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrlhf.models.spec import DeltaNet
from mrlhf.weights.shard import Rule, Shape


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


def delta_parameters() -> list[str]:
    """The parameters of a net in the model's order."""
    matrices = [f"linear_{name}.weight" for name in ("qkvz", "ba", "proj")]
    return ["A_log", "dt_bias", "conv1d", "norm", *matrices]


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
        "self_attention.linear_qkvz.weight": qkvz,
        "self_attention.linear_ba.weight": ba,
        "self_attention.conv1d": Rule((prefix + "conv1d.weight",) * 3, dim=0, intervals=rows),
        "self_attention.norm": Rule((prefix + "norm.weight",), dim=None),
        "self_attention.linear_proj.weight": Rule((prefix + "out_proj.weight",), dim=1),
    }
