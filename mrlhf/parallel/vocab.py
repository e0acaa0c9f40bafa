"""Sums over a vocabulary that is split over tensor-parallel ranks: log-probabilities, entropy, KL.

Logits of any dtype are accepted; they are neither gathered nor changed, and all arithmetic is in
float32. Each function costs two all-reduces of a few numbers a token. For the backward pass it
keeps the logits that it was given and those numbers, nothing else. It works through the rows in
chunks, so that no second tensor as large as the logits is made before the gradient itself. It knows
tokens; it does not know the sequences that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# On a CPU a chunk stays in the cache of a core; on a GPU it keeps the device busy, with temporary
# tensors of 256 MiB.
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
    """Log-probability of each target token, and the entropy of each distribution.

    Both are differentiable in `logits`.

    Args:
        logits: [tokens, vocab_shard]. Rank r of the group holds the columns from r * vocab_shard
            on. Columns from `vocab_size` on are padding: they have probability and gradient 0.
        targets: int64 [tokens], each in [0, vocab_size), equal on all ranks of the group.
        group: the ranks that hold the shards; None if this rank holds all columns.
        temperature: divides the logits; > 0.
        vocab_size: number of columns over all ranks, without padding.
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
    """KL(p || q) = sum of p (log p - log q) over the whole vocabulary.

    p is the distribution of `logits` and q that of `ref_logits`, both [tokens, vocab_shard]. The
    result is differentiable in `logits` only. The other arguments are as for
    `vocab_parallel_logprobs`.

    Returns:
        float32 [tokens] in nats, equal on all ranks of the group.
    """
    assert logits.dim() == 2 and ref_logits.shape == logits.shape and temperature > 0
    return _FullKL.apply(logits, ref_logits.detach(), group, temperature, vocab_size)


@torch.no_grad()
def vocab_parallel_sum_of_squares(
    logits: Tensor, group: Group | None, temperature: float, vocab_size: int
) -> Tensor:
    """The sum of the squared probabilities of the whole vocabulary, which has no gradient.

    The arguments are as for `vocab_parallel_logprobs`.

    Returns:
        float32 [tokens] in (0, 1], equal on all ranks of the group.
    """
    assert logits.dim() == 2 and temperature > 0
    _, valid = _columns(logits, group, vocab_size)
    maximum = _row_maxima([logits], valid, group, temperature)[0]

    # Rows: sum of exp(x), sum of exp(x)^2.
    sums = torch.zeros(2, len(logits), dtype=torch.float32, device=logits.device)
    for rows in _chunks(logits):
        weight = _scaled(logits[rows, :valid], temperature).sub_(maximum[rows, None]).exp_()
        sums[0, rows] = weight.sum(dim=1)
        sums[1, rows] = torch.linalg.vecdot(weight, weight)

    _all_reduce(sums, dist.ReduceOp.SUM, group)
    return sums[1] / sums[0].square()


class _Logprobs(torch.autograd.Function):
    """log p(t) = x_t - log Z and H = log Z - sum of p x.

    x is the scaled logits minus their maximum, and Z the sum of exp(x).
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
        maximum = _row_maxima([logits], valid, group, temperature)[0]
        local = targets - first
        is_local = (local >= 0) & (local < valid)
        local = local.clamp(0, max(0, valid - 1))

        # Rows: sum of exp(x), sum of x exp(x), x of the target.
        sums = torch.zeros(3, len(logits), dtype=torch.float32, device=logits.device)
        for rows in _chunks(logits):
            x = _scaled(logits[rows, :valid], temperature).sub_(maximum[rows, None])
            if valid:
                at_target = x.gather(1, local[rows, None])[:, 0]
                sums[2, rows] = at_target.masked_fill(~is_local[rows], 0.0)
            weight = x.exp()
            sums[0, rows] = weight.sum(dim=1)
            if with_entropy:
                sums[1, rows] = torch.linalg.vecdot(weight, x)

        _all_reduce(sums, dist.ReduceOp.SUM, group)
        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0] if with_entropy else None

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, local, is_local, maximum + log_total, entropy)
        ctx.temperature = temperature
        ctx.valid = valid
        return sums[2] - log_total, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Any, ...]:
        """d log p(t) / dx_j = [j = t] - p_j and dH / dx_j = -p_j (log p_j + H)."""
        logits, local, is_local, log_total, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            scaled_grad = torch.zeros_like(log_total)
        else:
            scaled_grad = grad_logprobs / ctx.temperature

        gradient = torch.empty_like(logits)
        gradient[:, ctx.valid :] = 0.0
        for rows in _chunks(logits):
            log_p = _scaled(logits[rows, : ctx.valid], ctx.temperature).sub_(log_total[rows, None])
            from_logprobs = scaled_grad[rows, None]
            if grad_entropy is None:
                part = log_p.exp_().mul_(-from_logprobs)
            else:
                p = log_p.exp()
                from_entropy = grad_entropy[rows, None] / ctx.temperature
                part = log_p.add_(entropy[rows, None]).mul_(-from_entropy)
                part = part.sub_(from_logprobs).mul_(p)

            if ctx.valid:
                at_target = (scaled_grad * is_local)[rows, None]
                part.scatter_add_(1, local[rows, None], at_target)
            gradient[rows, : ctx.valid] = part

        return gradient, None, None, None, None, None


class _FullKL(torch.autograd.Function):
    """KL = sum of p (x - y) - log Z_x + log Z_y.

    x and y are the scaled logits minus their maxima, and Z_x and Z_y the sums of exp(x) and exp(y).
    """

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
        maxima = _row_maxima([logits, ref_logits], valid, group, temperature)

        # Rows: sum of exp(x), sum of exp(y), sum of (x - y) exp(x).
        sums = torch.zeros(3, len(logits), dtype=torch.float32, device=logits.device)
        for rows in _chunks(logits):
            x = _scaled(logits[rows, :valid], temperature).sub_(maxima[0, rows, None])
            y = _scaled(ref_logits[rows, :valid], temperature).sub_(maxima[1, rows, None])
            weight = x.exp()
            sums[0, rows] = weight.sum(dim=1)
            sums[2, rows] = torch.linalg.vecdot(weight, x.sub_(y))
            sums[1, rows] = y.exp_().sum(dim=1)

        _all_reduce(sums, dist.ReduceOp.SUM, group)
        log_totals = sums[:2].log()
        kl = sums[2] / sums[0] - log_totals[0] + log_totals[1]

        ctx.save_for_backward(logits, ref_logits, *(maxima + log_totals), kl)
        ctx.temperature = temperature
        ctx.valid = valid
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
            part = (log_p - log_q).sub_(kl[rows, None]).mul_(log_p.exp_())
            gradient[rows, : ctx.valid] = part.mul_(grad_kl[rows, None] / ctx.temperature)

        return gradient, None, None, None, None


def _columns(logits: Tensor, group: Group | None, vocab_size: int) -> tuple[int, int]:
    """(number of the first column on this rank, number of its columns that are not padding)."""
    first = 0 if group is None else group.rank() * logits.shape[1]
    return first, max(0, min(logits.shape[1], vocab_size - first))


def _row_maxima(
    tensors: list[Tensor], valid: int, group: Group | None, temperature: float
) -> Tensor:
    """Maximum of each row of each tensor over all shards, divided by the temperature.

    Returns:
        float32 [tensors, tokens].
    """
    shape = (len(tensors), len(tensors[0]))
    maxima = torch.full(shape, -torch.inf, dtype=torch.float32, device=tensors[0].device)
    if valid:
        for maximum, tensor in zip(maxima, tensors, strict=True):
            maximum.copy_(tensor[:, :valid].amax(dim=1))
    _all_reduce(maxima, dist.ReduceOp.MAX, group)
    return maxima / temperature


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A float32 copy, divided by the temperature."""
    return logits.to(torch.float32, copy=True).div_(temperature)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of consecutive rows, each with a bounded number of elements; together all rows."""
    height = max(1, _CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    return (slice(top, top + height) for top in range(0, len(logits), height))


def _all_reduce(tensor: Tensor, operation: Any, group: Group | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, operation, group=group)
