"""The MLP of a layer: a dense one, or a mixture of experts with its router.

Each gives this rank's share of the output; the sum over the ranks of the replica is the whole. That
holds for a mixture too, whether a rank has columns of every expert or whole experts: all ranks of a
replica have all tokens, so nothing else is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.host.products import gpu_gives_float32
from mrlhf.inference.native.adapters import adapted, factors_of
from mrlhf.inference.native.experts import Experts, LocalExperts, Matrices, make_experts
from mrlhf.inference.native.layer_weights import LayerWeights
from mrlhf.inference.native.linear import Linear, linear, linear_in_float32
from mrlhf.inference.native.operators import add_norm
from mrlhf.models import spec as specs
from mrlhf.models.expert_choice import SMALLEST_SUM, chosen_experts
from mrlhf.models.ops import gated
from mrlhf.models.parameters import experts_of

Mlp = Callable[[Tensor, Tensor | None, list[Tensor]], Tensor]
"""The function (hidden, delta, choices) -> this rank's share of the MLP, all [tokens, hidden].

It adds `delta` to `hidden` in place, and takes the norm of the sum. A mixture appends the experts
that it chooses to `choices`, int64 [tokens, per_token]. One with own norms gives two shares side by
side, [2, tokens, hidden]: of the chosen experts, and of the one that all tokens go to.
"""


@dataclass(frozen=True)
class DenseMlp:
    """fc2(activation(gate) * up) of the norm, if there is one; `fc1` gives gate and up."""

    norm: Tensor | None
    eps: float
    fc1: Linear
    fc2: Linear
    activation: specs.Activation

    def __call__(self, hidden: Tensor, delta: Tensor | None, choices: list[Tensor]) -> Tensor:
        """See `Mlp`."""
        gate_up = self.fc1(add_norm(hidden, delta, self.norm, self.eps))
        return self.fc2(gated(gate_up, self.activation))


class ExpertChoice:
    """The router of one layer; `logits` are its scores before softmax or sigmoid, in float32.

    What a token gets does not depend on the other tokens. `scale`, float32 [experts], is multiplied
    with the factors of outputs, if it is there.
    """

    def __init__(
        self,
        experts: specs.Experts,
        logits: Linear,
        correction: Tensor | None,
        scale: Tensor | None = None,
    ) -> None:
        self._experts = experts
        self._scale = scale
        self._logits = logits
        self._correction = None if correction is None else correction.float()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each of x [tokens, hidden], and the factors of their outputs.

        Returns:
            Numbers of experts, int64 [tokens, per_token], and float32 [tokens, per_token].
        """
        experts = self._experts
        logits = self._logits(x)
        scores = logits.softmax(dim=-1) if experts.scoring == "softmax" else sigmoid(logits)
        chosen = chosen_experts(scores, self._correction, experts)

        shares = scores.gather(-1, chosen)
        if experts.normalised:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
        if self._scale is not None:
            shares = shares * self._scale[chosen]
        return chosen, shares if experts.scale == 1.0 else shares * experts.scale


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), with a rounding that does not depend on how many numbers there are."""
    # torch.sigmoid computes the last few numbers of a tensor by another function than the others.
    return 1 / (1 + (-x).exp())


@dataclass(frozen=True)
class MixtureMlp:
    """A router with this rank's experts, and optionally an expert that all tokens go to."""

    norm: Tensor | None  # weight of the norm before the MLP
    eps: float
    router: ExpertChoice
    experts: Experts
    shared: Mlp | None  # this rank's columns of the expert that all tokens go to
    # x -> [tokens, 1]; its sigmoid is multiplied with the output of `shared`
    shared_gate: Linear | None
    input_norm: Tensor | None  # of the norm before `experts`, if these have own norms

    def __call__(self, hidden: Tensor, delta: Tensor | None, choices: list[Tensor]) -> Tensor:
        """See `Mlp`."""
        x = add_norm(hidden, delta, self.norm, self.eps)
        chosen, shares = self.router(x if self.input_norm is None else hidden)
        choices.append(chosen)
        if self.input_norm is not None and self.shared is not None:
            own = add_norm(hidden, None, self.input_norm, self.eps)
            own = self.experts(own, chosen, shares)
            return torch.stack([own, self.shared(x, None, choices)])

        out = self.experts(x, chosen, shares)
        if self.shared is None:
            return out

        shared = self.shared(x, None, choices)
        if self.shared_gate is not None:
            shared = shared * sigmoid(self.shared_gate(x))
        return out + shared


def mlp_of_layer(weights: LayerWeights) -> Mlp:
    """Return the MLP of a layer with the norm before it."""
    spec = weights.spec
    parameters = weights.parameters
    dtype = weights.dtype
    prefix = weights.named("mlp.")
    norm = weights.norm("pre_mlp_layernorm.weight") if spec.norms_before else None

    def dense(own: str, norm: Tensor | None, biased: bool) -> DenseMlp:
        bias = weights.tensor(own + "linear_fc1.bias") if biased else None
        fc1 = weights.linear(own + "linear_fc1.weight", bias)
        fc2 = weights.linear(own + "linear_fc2.weight")
        return DenseMlp(norm, spec.norm_eps, fc1, fc2, spec.activation)

    experts = spec.experts
    if experts is None or not experts.layers[weights.number]:
        return dense("mlp.", norm, spec.mlp_bias)

    place = parameters.place
    held = experts_of(spec, place.ep, place.ep_rank)

    def matrices(layer: str) -> Matrices:
        names = [f"{prefix}experts.{expert}.{layer}." for expert in held]
        biases = [parameters[name + "bias"] for name in names if experts.has_biases]
        factors = [factors_of(parameters, name + "weight", dtype) for name in names]
        return Matrices([parameters[name + "weight"] for name in names], factors, biases)

    fc2 = matrices("linear_fc2")
    # The outputs of the ranks that split an expert add up, each with its part of the bias.
    fc2 = fc2._replace(biases=[bias / place.etp for bias in fc2.biases])
    local = LocalExperts(held.start, matrices("linear_fc1"), fc2, experts.activation)

    shared = None
    shared_gate = None
    if experts.shared_ffn_size:
        shared = dense("mlp.shared.", None, biased=False)
    if experts.shared_gate:
        shared_gate = linear(weights.tensor("mlp.shared_gate.weight"))
    here = make_experts(local, dtype, lambda name, copy: parameters.kept(prefix + name, copy))
    input_norm = weights.norm("mlp.input_norm.weight") if experts.own_norms else None
    router = _router(weights, experts)
    return MixtureMlp(norm, spec.norm_eps, router, here, shared, shared_gate, input_norm)


def _router(weights: LayerWeights, experts: specs.Experts) -> ExpertChoice:
    """Return the router of a layer."""
    parameters = weights.parameters
    prefix = weights.named("mlp.router.")
    correction = parameters[prefix + "correction"] if experts.has_correction else None
    # Rounded scores would choose other experts, and so would a rounded norm.
    name = prefix + "weight"
    weight = parameters[name]
    on_gpu = weight.is_cuda and weight.dtype == torch.bfloat16
    if on_gpu and (experts.own_norms or not gpu_gives_float32()):
        weight = parameters.kept(name, weight.float())
    bias = parameters[prefix + "bias"].float() if experts.has_biases else None
    logits = parameters.made_of(name, lambda: linear_in_float32(weight, bias))
    logits = adapted(parameters, torch.float32, name, logits)
    if not experts.own_norms:
        return ExpertChoice(experts, logits, correction)

    scale = parameters[prefix + "scale"].float() * weights.spec.hidden_size**-0.5
    gain = parameters.kept(prefix + "scale", scale)
    own = prefix + "expert_scale"
    by_expert = parameters.kept(own, parameters[own].float())
    eps = weights.spec.norm_eps

    def of_norm(x: Tensor) -> Tensor:
        return logits(add_norm(x.float(), None, gain, eps))

    return ExpertChoice(experts, of_norm, correction, by_expert)
