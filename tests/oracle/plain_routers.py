"""Watches the routers of a transformers model: the losses of routers, and the load of experts.

The formulas are those of https://arxiv.org/abs/2412.19437 (equations 17 to 20) and
https://arxiv.org/abs/2202.08906 (equation 5), for one sequence at a time. It shares no code with
mrlhf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BALANCE = 0.3
Z = 0.05
# Two ways of computing the same scores differ by up to 1e-6. Where the last expert that a token
# goes to and the first one that it does not go to are nearer, layouts could choose differently.
TIE = 4e-6


@dataclass(frozen=True)
class Choice:
    """What a router did with one sequence: logits [tokens, experts], experts [tokens, chosen]."""

    logits: Tensor
    experts: Tensor


class Routers:
    """The routers of a model, in its passes with gradients since the last `begin`."""

    def __init__(self, model: Any, with_losses: bool) -> None:
        """Watch them; a dense model has none.

        Args:
            model: of transformers.
            with_losses: whether routers have losses.
        """
        self._sigmoid = model.config.model_type == "deepseek_v3"
        self._with_losses = with_losses
        self._layers: list[list[Choice]] = []
        for name, module in model.named_modules():
            if name.endswith((".mlp.gate", ".mlp.router")):
                self._watch(module)

    def _watch(self, router: Any) -> None:
        choices: list[Choice] = []
        self._layers.append(choices)

        def see(module: Any, inputs: Any, outputs: Any) -> None:
            if torch.is_grad_enabled():
                logits, _, experts = outputs
                assert _gap(module, logits) > TIE, "two experts are nearly tied; take another seed"
                choices.append(Choice(logits, experts))

        router.register_forward_hook(see)

    def begin(self) -> None:
        """Forget all passes so far."""
        for choices in self._layers:
            choices.clear()

    def losses(self) -> Tensor:
        """The losses of all layers, each a mean over sequences."""
        total = torch.zeros(())
        if self._with_losses:
            for choices in self._layers:
                total = total + torch.stack([self._loss(choice) for choice in choices]).mean()
        return total

    def metrics(self) -> dict[str, float]:
        """How evenly the experts of the worst layer were loaded."""
        if not self._layers:
            return {}
        shares = torch.stack([_load(choices) for choices in self._layers])
        entropies = -(shares * shares.clamp(min=1e-30).log()).sum(dim=1)
        experts = shares.shape[1]
        return {
            "expert_load_max": (shares.max() * experts).item(),
            "expert_load_entropy": (entropies.min() / math.log(experts)).item(),
        }

    def _loss(self, choice: Choice) -> Tensor:
        z = choice.logits.logsumexp(dim=-1).square().mean()
        return BALANCE * balance_loss(choice, self._sigmoid) + Z * z


def balance_loss(choice: Choice, sigmoid: bool) -> Tensor:
    """The load-balancing loss of one sequence; 1 where all experts get equally much."""
    scores = choice.logits.sigmoid() if sigmoid else choice.logits.softmax(dim=-1)
    shares = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=0)
    tokens, experts = choice.logits.shape
    chosen = choice.experts.shape[1]
    counts = choice.experts.flatten().bincount(minlength=experts)
    return (counts * experts / (chosen * tokens) * shares).sum()


def _load(choices: list[Choice]) -> Tensor:
    """The share of each expert of a layer in all that tokens were sent to, float64 [experts]."""
    experts = choices[0].logits.shape[1]
    counts = torch.cat([choice.experts.flatten() for choice in choices]).bincount(minlength=experts)
    return counts.double() / counts.sum()


def _gap(router: Any, logits: Tensor) -> float:
    """How far the score of the last chosen expert or group is above the next, over all tokens."""
    if not hasattr(router, "e_score_correction_bias"):
        return _distance(logits.softmax(dim=-1), router.top_k)

    scores = logits.sigmoid() + router.e_score_correction_bias
    groups = scores.unflatten(1, (router.num_group, -1))
    of_groups = groups.topk(2, dim=-1).values.sum(dim=-1)
    kept = of_groups.topk(router.topk_group, dim=-1).indices
    candidates = groups.gather(1, kept[..., None].expand(-1, -1, groups.shape[2])).flatten(1)
    return min(_distance(of_groups, router.topk_group), _distance(candidates, router.top_k))


def _distance(scores: Tensor, chosen: int) -> float:
    ordered = scores.sort(dim=-1, descending=True).values
    return (ordered[:, chosen - 1] - ordered[:, chosen]).min().item()
