"""The MLP of a layer: a dense one, or a mixture of experts.

Each gives this rank's share of the output; the sum over the ranks of the replica is the whole. That
holds for a mixture too, whether a rank has columns of every expert or whole experts: all ranks of a
replica have all tokens, so nothing else is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mrlhf.inference.native.experts import Experts, LocalExperts, make_experts
from mrlhf.inference.native.linear import Linear, linear
from mrlhf.inference.native.operators import Operators, add_and_normalise
from mrlhf.inference.native.parameters import Parameters
from mrlhf.inference.native.router import Router, sigmoid
from mrlhf.models.ops import gated
from mrlhf.models.parameters import experts_of
from mrlhf.models.spec import ModelSpec

Mlp = Callable[[Tensor, Tensor | None, list[Tensor]], Tensor]
"""The function (hidden, delta, choices) -> this rank's share of the MLP, all [tokens, hidden].

It adds `delta` to `hidden` in place, and takes the norm of the sum. A mixture appends the experts
that it chooses to `choices`, int64 [tokens, per_token].
"""


class DenseMlp:
    """fc2(silu(gate) * up) of the norm, if there is one; `fc1` gives gate and up."""

    def __init__(self, operators: Operators, norm: Tensor | None, fc1: Linear, fc2: Linear) -> None:
        self._operators = operators
        self._norm = norm
        self._fc1 = fc1
        self._fc2 = fc2

    def __call__(self, hidden: Tensor, delta: Tensor | None, choices: list[Tensor]) -> Tensor:
        """See `Mlp`."""
        x = add_and_normalise(self._operators, hidden, delta, self._norm)
        return self._fc2(gated(self._fc1(x)))


class Mixture:
    """A router with this rank's experts, and optionally an expert that all tokens go to."""

    def __init__(
        self,
        operators: Operators,
        norm: Tensor | None,
        router: Router,
        experts: Experts,
        shared: Mlp | None,
        shared_gate: Linear | None,
    ) -> None:
        """Keep the parts.

        Args:
            norm: the weight of the norm before the MLP, if there is one.
            shared: this rank's columns of the expert that all tokens go to.
            shared_gate: x -> [tokens, 1]; its sigmoid is multiplied with the output of `shared`.
        """
        self._operators = operators
        self._norm = norm
        self._router = router
        self._experts = experts
        self._shared = shared
        self._shared_gate = shared_gate

    def __call__(self, hidden: Tensor, delta: Tensor | None, choices: list[Tensor]) -> Tensor:
        """See `Mlp`."""
        x = add_and_normalise(self._operators, hidden, delta, self._norm)
        chosen, shares = self._router(x)
        choices.append(chosen)
        out = self._experts(x, chosen, shares)
        if self._shared is None:
            return out

        shared = self._shared(x, None, choices)
        if self._shared_gate is not None:
            shared = shared * sigmoid(self._shared_gate(x))
        return out + shared


def mlp_of_layer(
    spec: ModelSpec, number: int, parameters: Parameters, operators: Operators, dtype: torch.dtype
) -> Mlp:
    """Return the MLP of layer `number` with the norm before it, computed in `dtype`."""
    layer = f"decoder.layers.{number}."
    prefix = layer + "mlp."
    norm = None
    if not spec.norms_after:
        norm = parameters[layer + "pre_mlp_layernorm.weight"].to(dtype)

    def dense(prefix: str, norm: Tensor | None, biased: bool) -> DenseMlp:
        bias = parameters[prefix + "linear_fc1.bias"].to(dtype) if biased else None
        fc1 = linear(parameters[prefix + "linear_fc1.weight"].to(dtype), bias)
        fc2 = linear(parameters[prefix + "linear_fc2.weight"].to(dtype))
        return DenseMlp(operators, norm, fc1, fc2)

    experts = spec.experts
    if experts is None or not experts.layers[number]:
        return dense(prefix, norm, spec.mlp_bias)

    place = parameters.place
    here = experts_of(spec, place.ep, place.ep_rank)
    local = LocalExperts(
        first=here.start,
        fc1=[parameters[f"{prefix}experts.{expert}.linear_fc1.weight"] for expert in here],
        fc2=[parameters[f"{prefix}experts.{expert}.linear_fc2.weight"] for expert in here],
    )

    correction = parameters[prefix + "router.correction"] if experts.has_correction else None
    router = Router(experts, parameters[prefix + "router.weight"], correction)

    shared = None
    shared_gate = None
    if experts.shared_ffn_size:
        shared = dense(prefix + "shared.", None, biased=False)
    if experts.shared_gate:
        shared_gate = linear(parameters[prefix + "shared_gate.weight"].to(dtype))
    return Mixture(operators, norm, router, make_experts(local, dtype), shared, shared_gate)
