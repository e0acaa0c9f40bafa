"""Log-probabilities, entropy and KL over a vocabulary that is split over tensor-parallel ranks.

Logits are never gathered and never changed, whatever their dtype; all arithmetic is float32. Each
function costs two all-reduces of a few numbers a token, keeps for the backward pass only the logits
it was given and those numbers, and works through the rows in chunks so that no second tensor of the
logits' size is ever made before the gradient itself. It knows tokens only, not the sequences they
stand in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# A chunk that stays in the cache of a CPU core; one that keeps a GPU busy with temporaries of 256
# MiB.
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}

Group = dist.ProcessGroup


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    group: Group | None,
    temperature: float,
    vocab_size: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target token, and the entropy of each distribution; differentiable in
    `logits`.

    Args:
        logits: [tokens, vocab_shard], rank r of the group holding columns r * vocab_shard and on.
            Columns from `vocab_size` on are padding: they have probability and gradient 0.
        targets: int64 [tokens], each in [0, vocab_size), equal on all ranks of the group.
        group: the ranks that hold the shards; None where one holds all.
        temperature: divides the logits; > 0.
        vocab_size: columns in all, without padding.
        with_entropy: whether to compute the entropy.

    Returns:
        Log-probabilities and entropies (nats) or None, float32 [tokens], equal on all ranks of the
        group.
    """
    assert logits.dim() == 2 and targets.shape == logits.shape[:1] and temperature > 0
    logprobs, entropy = _Logprobs.apply(
        logits, targets, group, temperature, vocab_size, with_entropy
    )
    return logprobs, entropy


def vocab_parallel_kl(
    logits: Tensor, ref_logits: Tensor, group: Group | None, temperature: float, vocab_size: int
) -> Tensor:
    """KL(p || q) = sum of p (log p - log q) over the whole vocabulary, p from `logits` and q from
    `ref_logits`.

    Differentiable in `logits` only. Arguments are as for `vocab_parallel_logprobs`, both logits
    [tokens, vocab_shard].

    Returns:
        float32 [tokens] in nats, equal on all ranks of the group.
    """
    assert logits.dim() == 2 and ref_logits.shape == logits.shape and temperature > 0
    return _FullKL.apply(logits, ref_logits.detach(), group, temperature, vocab_size)


class _Logprobs(torch.autograd.Function):
    """log p(t) = x_t - log Z and H = log Z - sum of p x, with x the scaled logits less their
    maximum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: Group | None,
        temperature: float,
        vocab_size: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        first, valid = _columns(logits, group, vocab_size)
        peak = _peaks([logits], valid, group, temperature)[0]
        sums = torch.zeros(3, len(logits), dtype=torch.float32, device=logits.device)
        local = targets - first
        mine = (local >= 0) & (local < valid)
        local = local.clamp(0, max(0, valid - 1))
        for rows in _chunks(logits):
            x = _scaled(logits[rows, :valid], temperature).sub_(peak[rows, None])
            if valid:
                sums[2, rows] = x.gather(1, local[rows, None])[:, 0].masked_fill(~mine[rows], 0.0)
            weight = x.exp()
            sums[0, rows] = weight.sum(dim=1)
            if with_entropy:
                sums[1, rows] = torch.linalg.vecdot(weight, x)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0] if with_entropy else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, local, mine, peak + log_total, entropy)
        ctx.temperature, ctx.valid = temperature, valid
        return sums[2] - log_total, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Any, ...]:
        """d log p(t) / dx_j = [j = t] - p_j and dH / dx_j = -p_j (log p_j + H)."""
        logits, local, mine, log_total, entropy = ctx.saved_tensors
        pull = (
            torch.zeros_like(log_total)
            if grad_logprobs is None
            else grad_logprobs / ctx.temperature
        )
        gradient = torch.empty_like(logits)
        gradient[:, ctx.valid :] = 0.0
        for rows in _chunks(logits):
            log_p = _scaled(logits[rows, : ctx.valid], ctx.temperature).sub_(log_total[rows, None])
            if grad_entropy is None:
                slope = log_p.exp_().mul_(-pull[rows, None])
            else:
                p = log_p.exp()
                lift = grad_entropy[rows, None] / ctx.temperature
                slope = log_p.add_(entropy[rows, None]).mul_(-lift).sub_(pull[rows, None]).mul_(p)
            if ctx.valid:
                slope.scatter_add_(1, local[rows, None], (pull * mine)[rows, None])
            gradient[rows, : ctx.valid] = slope
        return gradient, None, None, None, None, None


class _FullKL(torch.autograd.Function):
    """KL = sum of p (x - y) - log Z_x + log Z_y, with x and y the scaled logits less their maxima."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ref_logits: Tensor,
        group: Group | None,
        temperature: float,
        vocab_size: int,
    ) -> Tensor:
        _, valid = _columns(logits, group, vocab_size)
        peaks = _peaks([logits, ref_logits], valid, group, temperature)
        sums = torch.zeros(3, len(logits), dtype=torch.float32, device=logits.device)
        for rows in _chunks(logits):
            x = _scaled(logits[rows, :valid], temperature).sub_(peaks[0, rows, None])
            y = _scaled(ref_logits[rows, :valid], temperature).sub_(peaks[1, rows, None])
            weight = x.exp()
            sums[0, rows] = weight.sum(dim=1)
            sums[2, rows] = torch.linalg.vecdot(weight, x.sub_(y))
            sums[1, rows] = y.exp_().sum(dim=1)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        log_totals = sums[:2].log()
        kl = sums[2] / sums[0] - log_totals[0] + log_totals[1]
        ctx.save_for_backward(logits, ref_logits, *(peaks + log_totals), kl)
        ctx.temperature, ctx.valid = temperature, valid
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Any, ...]:
        """d KL / dx_j = p_j (log p_j - log q_j - KL)."""
        logits, ref_logits, log_total, ref_log_total, kl = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        gradient[:, ctx.valid :] = 0.0
        for rows in _chunks(logits):
            log_p = _scaled(logits[rows, : ctx.valid], ctx.temperature).sub_(log_total[rows, None])
            log_q = _scaled(ref_logits[rows, : ctx.valid], ctx.temperature).sub_(
                ref_log_total[rows, None]
            )
            slope = (log_p - log_q).sub_(kl[rows, None]).mul_(log_p.exp_())
            gradient[rows, : ctx.valid] = slope.mul_(grad_kl[rows, None] / ctx.temperature)
        return gradient, None, None, None, None


def _columns(logits: Tensor, group: Group | None, vocab_size: int) -> tuple[int, int]:
    """(number of this rank's first column, how many of its columns are not padding)."""
    first = 0 if group is None else group.rank() * logits.shape[1]
    return first, max(0, min(logits.shape[1], vocab_size - first))


def _peaks(tensors: list[Tensor], valid: int, group: Group | None, temperature: float) -> Tensor:
    """Maximum of each row of each tensor over all shards, divided by the temperature: float32
    [tensors, tokens].
    """
    shape = (len(tensors), len(tensors[0]))
    peaks = torch.full(shape, -torch.inf, dtype=torch.float32, device=tensors[0].device)
    if valid:
        for peak, tensor in zip(peaks, tensors, strict=True):
            peak.copy_(tensor[:, :valid].amax(dim=1))
    _all_reduce(peaks, dist.ReduceOp.MAX, group)
    return peaks / temperature


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A float32 copy, divided by the temperature."""
    return logits.to(torch.float32, copy=True).div_(temperature)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of consecutive rows, together all rows once, each of a bounded number of elements."""
    height = max(1, _CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    return (slice(top, top + height) for top in range(0, len(logits), height))


def _all_reduce(tensor: Tensor, operation: Any, group: Group | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, operation, group=group)
