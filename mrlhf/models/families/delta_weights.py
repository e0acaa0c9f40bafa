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
    yield prefix + "in_proj_qkvz.weight", (2 * (net.key_size + net.value_size), hidden)
    yield prefix + "in_proj_ba.weight", (2 * net.value_heads, hidden)
    yield prefix + "norm.weight", (net.value_dim,)
    yield prefix + "out_proj.weight", (hidden, net.value_size)


def delta_parameters() -> list[str]:
    """The parameters of a net in the model's order."""
    matrices = [f"linear_{name}.weight" for name in ("qkvz", "ba", "proj")]
    return ["A_log", "dt_bias", "conv1d", "norm", *matrices]


def delta_rules(net: DeltaNet, prefix: str) -> dict[str, Rule]:
    """The rules of the parameters; files already have the rows of a key head together."""
    q, k = net.key_size, 2 * net.key_size
    rows = ((0, q), (q, k), (k, net.channels))

    def of_heads(name: str) -> Rule:
        return Rule((prefix + name,), dim=0, periods=net.key_heads)

    return {
        "self_attention.A_log": of_heads("A_log"),
        "self_attention.dt_bias": of_heads("dt_bias"),
        "self_attention.linear_qkvz.weight": of_heads("in_proj_qkvz.weight"),
        "self_attention.linear_ba.weight": of_heads("in_proj_ba.weight"),
        "self_attention.conv1d": Rule((prefix + "conv1d.weight",) * 3, dim=0, intervals=rows),
        "self_attention.norm": Rule((prefix + "norm.weight",), dim=None),
        "self_attention.linear_proj.weight": Rule((prefix + "out_proj.weight",), dim=1),
    }
