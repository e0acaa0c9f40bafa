"""Sends each token to a few experts, counts what they get, and adds the gradients of router losses.

Everything is computed in float32. A loss is a mean over the sequences of a mini-batch, so that it
depends neither on the layout nor on how sequences are packed. This file knows tokens, sequences and
scores; it does not know what experts compute nor where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrlhf.models.adapters import Adapters
from mrlhf.models.expert_choice import SMALLEST_SUM, chosen_experts, occurrences
from mrlhf.models.linear import adapted, whole_parameter
from mrlhf.models.ops import rms_norm
from mrlhf.models.spec import Experts
from mrlhf.parallel.pack_routing import PackRouting
from mrlhf.parallel.packed_sequences import PackedSequences


class Routing(NamedTuple):
    """The experts of tokens."""

    experts: Tensor  # int64 [tokens, per_token], the numbers of the chosen experts
    weights: Tensor  # float32 [tokens, per_token], the factor of each expert's output


@dataclass(frozen=True)
class RouterLosses:
    """The losses of each router, whose gradients are added to those of a mini-batch.

    Attributes:
        balance: factor of the load-balancing loss of a sequence, https://arxiv.org/abs/2412.19437,
            equation 17. It is 1 if all experts get equally much.
        z: factor of the mean square of a sequence's log-sum-exp of the logits,
            https://arxiv.org/abs/2202.08906, equation 5.
        share: the weight of each sequence: 1 over the sequences of the mini-batch, times the
            divisor of the reduction of gradients.
    """

    balance: float
    z: float
    share: float


class Router(torch.nn.Module):
    """The router of one mixture.

    Attributes:
        mixture: the number of its mixture in the model, from 0.
        weight: [experts, hidden].
        bias: [experts], added to the logits; None: the model has none.
        scale: [hidden], multiplied with the norm of the input and 1 / sqrt(hidden), and
            expert_scale: [experts], multiplied with the weights of chosen experts; both only where
            experts have own norms.
        correction: float32 [experts], added to the scores for the choice alone; it is not trained.
        losses: a backward pass adds their gradients; None: no losses.
        load: int64 [experts], how many tokens each expert got in the forward passes of training
            since `load` was set to zero. Padding does not count.
    """

    def __init__(
        self,
        config: TransformerConfig,
        experts: Experts,
        mixture: int,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        self.mixture = mixture
        self._experts = experts
        self._tp_group = groups.tp
        self._sequence_parallel = config.sequence_parallel
        # The ranks that hold parts of each sequence.
        self._sequence_group = groups.tp_cp if config.sequence_parallel else groups.cp

        self.weight = whole_parameter(config, experts.count, config.hidden_size)
        self.bias: torch.nn.Parameter | None = None
        if experts.has_biases:
            self.bias = whole_parameter(config, experts.count)
        self._eps = config.layernorm_epsilon
        if experts.own_norms:
            self.scale = whole_parameter(config, config.hidden_size, value=1.0)
            self.expert_scale = whole_parameter(config, experts.count, value=1.0)
        self.adapters: Adapters | None = None
        if experts.has_correction:
            correction = torch.zeros(experts.count, dtype=torch.float32)
            self.correction = torch.nn.Parameter(correction, requires_grad=False)

        self.losses: RouterLosses | None = None
        self.load = torch.zeros(experts.count, dtype=torch.int64)

    def forward(self, hidden: Tensor, packed: PackedSequences) -> Routing:
        """Choose the experts of this rank's tokens, `hidden` [tokens, hidden]."""
        wide = hidden.float()
        if self._experts.own_norms:
            wide = rms_norm(wide, self.scale.float() * hidden.shape[-1] ** -0.5, self._eps)
        bias = None if self.bias is None else self.bias.float()
        logits = adapted(F.linear(wide, self.weight.float(), bias), self.adapters, wide)
        softmax = self._experts.scoring == "softmax"
        scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()

        correction = self.correction if self._experts.has_correction else None
        chosen = chosen_experts(scores.detach(), correction, self._experts)
        if packed.routing is not None:
            chosen = self._replaced(chosen, packed.routing)
        weights = scores.gather(1, chosen)
        if self._experts.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
        weights = weights * self._experts.scale
        if self._experts.own_norms:
            weights = weights * self.expert_scale.float()[chosen]

        # With recomputation a pass without gradients comes first, which does not count.
        if self.training and torch.is_grad_enabled():
            owners = self._own_part(packed.owners)
            counts = packed.rows_of(self._count(chosen, owners, packed.parts))
            self.load += counts.sum(dim=0)
            if self.losses is not None:
                loss = self._loss(self.losses, packed, owners, counts.float(), logits, scores)
                weights = _WithLoss.apply(weights, loss)
        return Routing(chosen, weights)

    def _apply(self, function: Any, recurse: bool = True) -> Router:
        """Apply `function` as any module does, but keep the correction in float32."""
        super()._apply(function, recurse)
        self.load = self.load.to(self.weight.device)
        if self._experts.has_correction:
            self.correction.data = self.correction.data.float()
        return self

    def _replaced(self, chosen: Tensor, routing: PackRouting) -> Tensor:
        """Return the experts that the tokens go to; a pass may replay others than `chosen`."""
        # Without sequence parallelism all tensor-parallel ranks have the same tokens.
        if self._sequence_parallel or self._tp_group.rank() == 0:
            routing.note(self.mixture, chosen, self._own_part)
        return routing.replaced(self.mixture, chosen, self._own_part)

    def _own_part(self, of_tokens: Tensor) -> Tensor:
        """Return the entries of this rank's tokens."""
        if not self._sequence_parallel:
            return of_tokens
        return of_tokens.chunk(self._tp_group.size())[self._tp_group.rank()]

    def _count(self, chosen: Tensor, owners: Tensor, parts: int) -> Tensor:
        """Count this rank's tokens that each expert got: int64 [parts + 1, experts], 0 for padding.

        `chosen` is [tokens, per_token]; `owners`, [tokens], their part, or `parts` for padding.
        """
        experts = self._experts.count
        places = owners.unsqueeze(-1) * experts + chosen
        counts = occurrences(places, (parts + 1) * experts).view(parts + 1, experts)
        counts[-1] = 0
        return counts

    def _loss(
        self,
        losses: RouterLosses,
        packed: PackedSequences,
        owners: Tensor,
        counts: Tensor,
        logits: Tensor,
        scores: Tensor,
    ) -> Tensor:
        """Return a scalar with the gradient that this rank's tokens contribute.

        `owners` are those of `_count`; `logits` and `scores` are [tokens, experts]. `counts`,
        float32 [rows, experts], are the tokens of each sequence that each expert got.
        """
        if losses.balance and self._sequence_group.size() > 1:
            dist.all_reduce(counts, group=self._sequence_group)
        # A sequence counts as much as any other, so its tokens count less the more there are; a
        # shared prompt counts in each of its sequences, and padding in none.
        lengths = packed.lengths.float()
        per_token = losses.share / lengths
        weights = packed.parts_of(per_token)[owners]

        loss = losses.z * (logits.logsumexp(dim=-1).square() * weights).sum()
        if losses.balance:
            tokens = self._experts.per_token * lengths.unsqueeze(-1)
            loads = counts * self._experts.count / tokens * per_token.unsqueeze(-1)
            if self._experts.scoring == "sigmoid":
                scores = scores / (scores.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
            loss = loss + losses.balance * (packed.parts_of(loads)[owners] * scores).sum()
        return loss


class _WithLoss(torch.autograd.Function):
    """Returns `carrier`; in the backward pass the loss gets a gradient of 1."""

    @staticmethod
    def forward(context: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        return carrier.view_as(carrier)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=torch.float32, device=grad.device)
