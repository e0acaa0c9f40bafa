"""The divergence from a reference over its likeliest tokens, at a temperature of its own.

Both distributions are renormalised over these tokens. Each rank looks at its own columns of the
vocabulary; a few numbers a token and rank bring them together. It has no kernel of its own on a
GPU. This file does not know where logits come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.vocab_sums import (
    NO_MAXIMUM,
    Columns,
    NumbersToCompute,
    blocks,
    gather_tables,
    log_mixture,
)


@dataclass(frozen=True)
class Subset:
    """What the gradient needs beside the logits; each float32 [tokens], equal on all ranks."""

    divergence: Tensor
    lowest: Tensor  # the least logit of the reference that counts
    policy: Tensor  # the logarithm of the sum of exp(logits) that count
    reference: Tensor  # the same of the reference's
    to_other: Tensor  # KL(p || m), m the mixture, or the reference

    @staticmethod
    def of(
        logits: Tensor,
        ref_logits: Tensor,
        columns: Columns,
        wanted: NumbersToCompute,
        group: dist.ProcessGroup | None,
    ) -> Subset:
        """Measure the divergence of logits [tokens, vocab_shard]; every rank of the group calls it.

        The formulas are those of `NumbersToCompute.beta`. Tokens with the same logit as the last of
        the likeliest count too.
        """
        lowest = _lowest(ref_logits[:, : columns.valid], wanted.top_k, group)
        sums = torch.zeros(4, len(logits), device=logits.device)
        sums[::2] = NO_MAXIMUM
        for rows, *both in _counting(logits, ref_logits, columns, wanted, lowest):
            for first, x in zip((0, 2), both, strict=True):
                sums[first, rows] = x.amax(dim=1)
                sums[first + 1, rows] = x.sub_(sums[first, rows, None]).exp_().sum(dim=1)
        parts = gather_tables(sums, group)
        maxima, totals = parts[:, ::2], parts[:, 1::2]
        most = maxima.amax(dim=0)
        policy, reference = most + (totals * (maxima - most).exp()).sum(dim=0).log()

        found = torch.zeros(2, len(logits), device=logits.device)
        for rows, x, y in _counting(logits, ref_logits, columns, wanted, lowest):
            log_p = x.sub_(policy[rows, None])
            log_q = y.sub_(reference[rows, None])
            log_m = _other(log_p, log_q, wanted.beta)
            of_policy = torch.linalg.vecdot(log_p.exp(), log_p - log_m)
            of_reference = torch.linalg.vecdot(log_q.exp(), log_q - log_m)
            share = wanted.beta if wanted.mixes else 1 - wanted.beta
            found[0, rows] = share * of_reference + (1 - share) * of_policy
            found[1, rows] = of_policy
        divergence, to_other = gather_tables(found, group).sum(dim=0)
        return Subset(divergence, lowest, policy, reference, to_other)

    def write_slope(
        self, logits: Tensor, ref_logits: Tensor, columns: Columns, wanted: NumbersToCompute
    ) -> None:
        """Overwrite the reference's logits with the divergence's gradient in those of the policy.

        It is 0 at the tokens that do not count, and in the padding.
        """
        ref_logits[:, columns.valid :] = 0.0
        scale = columns.scale * wanted.sharpness
        for rows, x, y in _counting(logits, ref_logits, columns, wanted, self.lowest):
            log_p = x.sub_(self.policy[rows, None])
            log_q = y.sub_(self.reference[rows, None])
            if wanted.beta == 0:
                slope = log_p.exp_().sub_(log_q.exp_()).mul_(scale)
            else:
                log_m = _other(log_p, log_q, wanted.beta)
                share = 1 - wanted.beta if wanted.mixes else 1.0
                slope = (log_p - log_m).sub_(self.to_other[rows, None])
                slope.mul_(log_p.exp_()).mul_(share * scale)
            ref_logits[rows, : columns.valid] = slope


def _lowest(ref_logits: Tensor, top_k: int | None, group: dist.ProcessGroup | None) -> Tensor:
    """The least of the `top_k` largest logits of each token over all ranks; None: of all."""
    lowest = torch.full((len(ref_logits),), NO_MAXIMUM, device=ref_logits.device)
    if top_k is None:
        return lowest
    own = lowest.repeat(top_k, 1)
    here = min(top_k, ref_logits.shape[1])
    own[:here] = ref_logits.topk(here, dim=1).values.t()
    every = gather_tables(own, group).flatten(0, 1)
    return every.topk(min(top_k, len(every)), dim=0).values[-1]


def _counting(
    logits: Tensor, ref_logits: Tensor, columns: Columns, wanted: NumbersToCompute, lowest: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Copies of both logits, block by block of tokens, scaled; far below all that do not count."""
    if not columns.valid:
        return
    for rows in blocks(logits):
        y = columns.scaled(ref_logits[rows]).mul_(wanted.sharpness)
        outside = ref_logits[rows, : columns.valid] < lowest[rows, None]
        x = columns.scaled(logits[rows]).mul_(wanted.sharpness)
        yield rows, x.masked_fill_(outside, NO_MAXIMUM), y.masked_fill_(outside, NO_MAXIMUM)


def _other(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """The logarithm of what the divergence is measured from."""
    return {0.0: log_p, 1.0: log_q}[beta] if beta in (0, 1) else log_mixture(log_p, log_q, beta)
