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

from mrlhf.models.spec import Experts
from mrlhf.parallel.pack_routing import PackRouting
from mrlhf.parallel.packed_sequences import PackedSequences


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        experts: int64 [tokens, per_token], the numbers of the chosen experts.
        weights: float32 [tokens, per_token], what the output of each is multiplied by.
    """

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True)
class RouterLosses:
    """What the gradients of a mini-batch also hold, for each router.

    Attributes:
        balance: factor of the load-balancing loss of a sequence,
            https://arxiv.org/abs/2412.19437, equation 17. It is 1 where all experts get equally
            much.
        z: factor of the mean square of a sequence's log-sum-exp of the logits,
            https://arxiv.org/abs/2202.08906, equation 5.
        share: what each sequence counts: 1 over the sequences of the mini-batch, times what the
            reduction of gradients divides by.
    """

    balance: float
    z: float
    share: float


class Router(torch.nn.Module):
    """The router of one mixture.

    Attributes:
        mixture: the number of its mixture, from 0, of all in the model.
        weight: [experts, hidden].
        correction: float32 [experts], added to the scores for the choice alone; it is not trained.
        losses: whose gradients a backward pass adds; None: no losses.
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
        """Make a router of zeros.

        Args:
            config: of the model.
            experts: the mixtures of the model.
            mixture: the number of this one.
            groups: the process groups of the model.
        """
        super().__init__()
        self.mixture = mixture
        self._experts = experts
        self._tp_group = groups.tp
        self._sequence_parallel = config.sequence_parallel
        # The ranks that hold parts of each sequence.
        self._sequence_group = groups.tp_cp if config.sequence_parallel else groups.cp

        self.weight = torch.nn.Parameter(
            torch.zeros(experts.count, config.hidden_size, dtype=config.params_dtype)
        )
        # Under sequence parallelism each rank sees its own tokens, and megatron-core sums the
        # gradients of parameters with this mark over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if experts.has_correction:
            correction = torch.zeros(experts.count, dtype=torch.float32)
            self.correction = torch.nn.Parameter(correction, requires_grad=False)

        self.losses: RouterLosses | None = None
        self.load = torch.zeros(experts.count, dtype=torch.int64)

    def forward(self, hidden: Tensor, packed: PackedSequences) -> Routing:
        """Choose the experts of tokens.

        Args:
            hidden: [tokens, hidden]; under sequence parallelism this rank's part of the tokens.
            packed: the sequences of the pack.
        """
        logits = F.linear(hidden.float(), self.weight.float())
        softmax = self._experts.scoring == "softmax"
        scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()

        chosen = self._choose(scores.detach())
        if packed.routing is not None:
            chosen = self._replaced(chosen, packed.routing)
        weights = scores.gather(1, chosen)
        if self._experts.normalised:
            # All sigmoids may be 0.
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        weights = weights * self._experts.scale

        # With recomputation a pass without gradients comes first, which does not count.
        if self.training and torch.is_grad_enabled():
            owners = self._own_part(packed.owners)
            counts = self._count(chosen, owners, len(packed.lengths))
            if self.losses is not None:
                loss = self._loss(self.losses, packed, owners, counts, logits, scores)
                weights = _WithLoss.apply(weights, loss)
        return Routing(chosen, weights)

    def _apply(self, function: Any, recurse: bool = True) -> Router:
        """As for any module, but the correction stays in float32."""
        super()._apply(function, recurse)
        self.load = self.load.to(self.weight.device)
        if self._experts.has_correction:
            self.correction.data = self.correction.data.float()
        return self

    def _choose(self, scores: Tensor) -> Tensor:
        """The numbers of the chosen experts, int64 [tokens, per_token]."""
        experts = self._experts
        if experts.has_correction:
            scores = scores + self.correction

        if experts.groups > 1:
            grouped = scores.unflatten(1, (experts.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(dim=-1)
            kept = best.topk(experts.groups_per_token, dim=-1).indices
            left_out = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
            scores = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
        return scores.topk(experts.per_token, dim=-1).indices

    def _replaced(self, chosen: Tensor, routing: PackRouting) -> Tensor:
        """The experts that the tokens go to, where a pass may replay others than `chosen`."""
        # Without sequence parallelism all tensor-parallel ranks have the same tokens.
        if self._sequence_parallel or self._tp_group.rank() == 0:
            routing.note(self.mixture, chosen, self._own_part)
        return routing.replaced(self.mixture, chosen, self._own_part)

    def _own_part(self, of_tokens: Tensor) -> Tensor:
        """The entries of this rank's tokens."""
        if not self._sequence_parallel:
            return of_tokens
        return of_tokens.chunk(self._tp_group.size())[self._tp_group.rank()]

    def _count(self, chosen: Tensor, owners: Tensor, sequences: int) -> Tensor:
        """Add to the load; returns the tokens of each sequence that each expert got.

        Args:
            chosen: [tokens, per_token].
            owners: [tokens], the sequence of each; `sequences` for padding.
            sequences: how many there are in the pack.

        Returns:
            float32 [sequences + 1, experts], of this rank's tokens.
        """
        experts = self._experts.count
        places = owners.unsqueeze(-1) * experts + chosen
        counts = places.flatten().bincount(minlength=(sequences + 1) * experts)
        counts = counts.view(sequences + 1, experts)
        self.load += counts[:-1].sum(dim=0)
        return counts.float()

    def _loss(
        self,
        losses: RouterLosses,
        packed: PackedSequences,
        owners: Tensor,
        counts: Tensor,
        logits: Tensor,
        scores: Tensor,
    ) -> Tensor:
        """A scalar with the gradient that this rank's tokens contribute.

        Args:
            losses: which there are.
            packed: the sequences of the pack.
            owners: as for `_count`.
            counts: what `_count` returned.
            logits: [tokens, experts].
            scores: of the logits.
        """
        if losses.balance and self._sequence_group.size() > 1:
            dist.all_reduce(counts, group=self._sequence_group)
        # A sequence counts as much as any other, so its tokens count less the more there are;
        # padding does not count.
        lengths = packed.lengths.float()
        per_token = F.pad(losses.share / lengths, (0, 1))[owners]

        loss = losses.z * (logits.logsumexp(dim=-1).square() * per_token).sum()
        if losses.balance:
            tokens = F.pad(lengths, (0, 1), value=1.0).unsqueeze(-1)
            loads = counts * self._experts.count / (self._experts.per_token * tokens)
            if self._experts.scoring == "sigmoid":
                scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
            balance = (loads[owners] * scores).sum(dim=-1)
            loss = loss + losses.balance * (balance * per_token).sum()
        return loss


class _WithLoss(torch.autograd.Function):
    """Gives what it takes; in the backward pass a loss gets a gradient of 1."""

    @staticmethod
    def forward(context: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        return carrier.view_as(carrier)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=torch.float32, device=grad.device)
