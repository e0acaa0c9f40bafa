"""Sums over a vocabulary that is split over ranks, and the gradient of the numbers that they give.

Each rank sums over its own columns, relative to the maximum of its own columns. One gather of a few
numbers a token brings the sums of all ranks together. Logits of any dtype are accepted; all
arithmetic is in float32. On a CPU it goes through blocks that stay in the cache of a core, on a GPU
it is one kernel for the sums and one for the gradient. This file does not know where logits come
from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.gpu.library import operator, serves

# On a CPU a block stays in the cache of a core; on a GPU it keeps the device busy, with temporary
# tensors of 64 MiB.
_BLOCK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}
# The maximum of no columns. Infinity would give NaN when it is multiplied by a sum of 0.
NO_MAXIMUM = -1e30


@dataclass(frozen=True)
class Columns:
    """The columns of the vocabulary that a rank holds."""

    first: int  # the token of the first column
    valid: int  # the number of columns that are not padding
    scale: float  # multiplies the logits

    def scaled(self, logits: Tensor) -> Tensor:
        """A float32 copy of the columns that are not padding, scaled."""
        return logits[:, : self.valid].to(torch.float32, copy=True).mul_(self.scale)

    def at(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The scaled logits of `tokens` [rows, any], float32; 0 for those of another rank."""
        if not self.valid:
            return torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        local, is_local = self.place(tokens)
        return logits.gather(1, local).float().mul_(self.scale).masked_fill_(~is_local, 0.0)

    def add_at(self, gradients: Tensor, tokens: Tensor, amounts: Tensor) -> None:
        """Add gradients in the scaled logits of `tokens` [rows, any] to those in the logits."""
        if self.valid:
            local, is_local = self.place(tokens)
            gradients.scatter_add_(1, local, amounts.mul(self.scale).masked_fill_(~is_local, 0.0))

    def place(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each target token, and whether it is one of this rank's."""
        local = targets - self.first
        is_local = (local >= 0) & (local < self.valid)
        return local.clamp(0, max(0, self.valid - 1)), is_local


@dataclass(frozen=True)
class NumbersToCompute:
    """The numbers that are computed beside the log-probability of each target token."""

    entropy: bool = False  # the entropy of each distribution
    squares: bool = False  # the sum of the squared probabilities of the vocabulary
    kl: bool = False  # the divergence from a reference over the whole vocabulary
    # of that divergence, with p the policy and q the reference, as in
    # https://arxiv.org/abs/2306.13649: 1: KL(p || q); 0: KL(q || p); between: the generalised
    # Jensen-Shannon divergence beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p
    beta: float = 1.0
    # Of that divergence too: both distributions are renormalised over so many of the reference's
    # likeliest tokens, None: all; and this multiplies their scaled logits.
    top_k: int | None = None
    sharpness: float = 1.0

    @property
    def apart(self) -> bool:
        """Whether the divergence is that of other distributions than the other numbers."""
        return self.kl and (self.top_k is not None or self.sharpness != 1)

    @property
    def mixes(self) -> bool:
        """Whether the divergence is measured from a mixture of both distributions."""
        return self.kl and 0 < self.beta < 1


@dataclass(frozen=True)
class TokenNumbers:
    """The numbers of the distribution at each token; float32 [tokens], None if not computed."""

    logprobs: Tensor  # the log-probability of the target token
    entropy: Tensor | None  # in nats
    full_kl: Tensor | None  # KL(p || q) = sum of p (log p - log q), q the reference; see `beta`
    sum_of_squares: Tensor | None  # of all probabilities; it has no gradient
    # the log-probabilities of the tokens of each head, [tokens, head]
    heads: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> TokenNumbers:
        """Apply `change` to each of the numbers."""
        fields: dict[str, Any] = {
            name: None if number is None else change(number) for name, number in vars(self).items()
        }
        return TokenNumbers(**fields)

    def tokens(self, rows: slice) -> TokenNumbers:
        """The numbers of some tokens."""
        return self.map(lambda number: number[rows])


@dataclass(frozen=True)
class Normalisers:
    """The logarithm of the sum of exp(logits) of each token, float32 [tokens]."""

    policy: Tensor  # of the scaled logits
    reference: Tensor  # of the reference's, or zeros where there is none
    to_mixture: Tensor | None = None  # KL(p || m) where the divergence has a mixture m

    def __getitem__(self, rows: slice) -> Normalisers:
        to_mixture = None if self.to_mixture is None else self.to_mixture[rows]
        return Normalisers(self.policy[rows], self.reference[rows], to_mixture)


class LocalSums:
    """The sums over this rank's columns, with x the scaled logits minus their maximum on this rank.

    y is the same of the reference's logits.
    """

    # The rows of the table.
    MAXIMUM, TOTAL, TARGET, WEIGHTED, SQUARES, REF_MAXIMUM, REF_TOTAL, DIFFERENCE = range(8)

    def __init__(
        self, tokens: int, columns: Columns, wanted: NumbersToCompute, device: torch.device
    ) -> None:
        self._columns = columns
        self._wanted = wanted
        self._table = torch.zeros(8, tokens, dtype=torch.float32, device=device)
        for row in (self.MAXIMUM, self.REF_MAXIMUM):
            self._table[row] = NO_MAXIMUM

    def add(self, begin: int, logits: Tensor, targets: Tensor, ref_logits: Tensor | None) -> None:
        """Add the logits [rows, vocab_shard] of the tokens from number `begin` on.

        `targets` is int64 [rows]; `ref_logits` is None where no KL is computed.
        """
        columns, wanted = self._columns, self._wanted
        if columns.valid:
            write = _write_sums if serves(logits) else _write_sums_by_torch
            write(
                self._table[:, begin : begin + len(logits)], logits, targets, ref_logits,
                columns.first, columns.valid, columns.scale, wanted.entropy, wanted.squares,
                wanted.beta == 0,
            )  # fmt: skip

    def combine(self, group: dist.ProcessGroup | None) -> tuple[TokenNumbers, Normalisers]:
        """The numbers of all tokens, and the normalisers for their gradient, equal on all ranks.

        Every rank of the group calls it; the group is None if this rank holds all columns.
        """
        parts = gather_tables(self._table, group)  # [ranks, 8, tokens]
        maxima = parts[:, self.MAXIMUM]
        maximum = maxima.amax(dim=0)
        # Each rank's sums are relative to its own maximum; this brings them to the common one.
        moved = maxima - maximum
        factors = moved.exp()
        total = (parts[:, self.TOTAL] * factors).sum(dim=0)
        log_total = total.log()

        entropy = squares = kl = None
        reference = torch.zeros_like(log_total)
        if self._wanted.entropy:
            weighted = parts[:, self.WEIGHTED] + moved * parts[:, self.TOTAL]
            entropy = log_total - (weighted * factors).sum(dim=0) / total
        if self._wanted.squares:
            squares = (parts[:, self.SQUARES] * factors.square()).sum(dim=0) / total.square()
        if self._wanted.kl:
            ref_maxima = parts[:, self.REF_MAXIMUM]
            ref_maximum = ref_maxima.amax(dim=0)
            ref_moved = ref_maxima - ref_maximum
            ref_factors = ref_moved.exp()
            ref_total = (parts[:, self.REF_TOTAL] * ref_factors).sum(dim=0)
            ref_log_total = ref_total.log()
            if self._wanted.beta == 0:
                difference = parts[:, self.DIFFERENCE]
                difference = difference + (ref_moved - moved) * parts[:, self.REF_TOTAL]
                kl = (difference * ref_factors).sum(dim=0) / ref_total - ref_log_total + log_total
            else:
                difference = parts[:, self.DIFFERENCE] + (moved - ref_moved) * parts[:, self.TOTAL]
                kl = (difference * factors).sum(dim=0) / total - log_total + ref_log_total
            reference = ref_maximum + ref_log_total

        logprobs = parts[:, self.TARGET].sum(dim=0) - maximum - log_total
        numbers = TokenNumbers(logprobs, entropy, kl, squares)
        return numbers, Normalisers(maximum + log_total, reference)


def gather_tables(table: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The tables of all ranks, [ranks, ...]; all have the same tokens, and there may be none."""
    if group is None or group.size() == 1 or not table.numel():
        return table[None]
    parts = [torch.empty_like(table) for _ in range(group.size())]
    dist.all_gather(parts, table, group=group)
    return torch.stack(parts)


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    ref_logits: Tensor | None,
    columns: Columns,
    numbers: TokenNumbers,
    gradients: TokenNumbers,
    normalisers: Normalisers,
    beta: float,
) -> None:
    """Overwrite the logits [tokens, vocab_shard] with the gradient of a loss.

    With x the scaled logits, d log p(t) / dx_j = [j = t] - p_j, dH / dx_j = -p_j (log p_j + H), and
    of the divergence with this `beta`

        1:        d KL(p || q) / dx_j = p_j (log p_j - log q_j - KL(p || q))
        0:        d KL(q || p) / dx_j = p_j - q_j
        between:  d JSD / dx_j = (1 - beta) p_j (log p_j - log m_j - KL(p || m))

    The reference's logits stay as they are; they are None where no divergence is computed.
    `gradients` are those of the loss in the `numbers`, None for a number that it does not depend
    on.
    """
    write = _write_gradient if serves(logits) else _write_gradient_by_torch
    to_mixture = normalisers.to_mixture
    write(
        logits, targets, ref_logits, normalisers.policy, normalisers.reference,
        numbers.entropy, numbers.full_kl if to_mixture is None else to_mixture,
        gradients.logprobs, gradients.entropy, gradients.full_kl,
        columns.first, columns.valid, columns.scale, beta,
    )  # fmt: skip


def cap_logits(logits: Tensor, cap: float) -> None:
    """Replace each logit x [tokens, vocab_shard] by cap * tanh(x / cap)."""
    for rows in blocks(logits):
        logits[rows].div_(cap).tanh_().mul_(cap)


def cap_slopes(logits: Tensor, cap: float) -> Tensor:
    """The derivative of each capped logit in what it was before; 0 below all that are."""
    return logits.div(cap).clamp_(min=-1.0).square_().neg_().add_(1.0)


def add_mixture(
    sums: Tensor,
    logits: Tensor,
    ref_logits: Tensor,
    columns: Columns,
    normalisers: Normalisers,
    beta: float,
) -> None:
    """Write this rank's part of each token's divergence and of KL(p || m) to `sums` [2, tokens].

    It needs the normalisers of all ranks, so it is a second pass over the logits; the sums over
    ranks are the caller's. It has no kernel of its own on a GPU.
    """
    if not columns.valid:
        return
    for rows in blocks(logits):
        log_p = columns.scaled(logits[rows]).sub_(normalisers.policy[rows, None])
        log_q = columns.scaled(ref_logits[rows]).sub_(normalisers.reference[rows, None])
        log_m = log_mixture(log_p, log_q, beta)
        p, q = log_p.exp(), log_q.exp()
        of_policy = torch.linalg.vecdot(p, log_p.sub_(log_m))
        of_reference = torch.linalg.vecdot(q, log_q.sub_(log_m))
        sums[0, rows] = beta * of_reference + (1 - beta) * of_policy
        sums[1, rows] = of_policy


def log_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """log(beta q + (1 - beta) p)."""
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))


def _write_sums_by_torch(
    table: Tensor, logits: Tensor, targets: Tensor, ref_logits: Tensor | None,
    first: int, valid: int, scale: float, entropy: bool, squares: bool, forward: bool,
) -> None:  # fmt: skip
    """Write the rows of `LocalSums` for some tokens to `table` [8, tokens]."""
    columns = Columns(first, valid, scale)
    local, is_local = columns.place(targets)
    for rows in blocks(logits):
        sums = table[:, rows]
        x = columns.scaled(logits[rows])
        at_target = x.gather(1, local[rows, None])[:, 0]
        sums[LocalSums.TARGET] = at_target.masked_fill_(~is_local[rows], 0.0)
        torch.amax(x, dim=1, out=sums[LocalSums.MAXIMUM])
        x.sub_(sums[LocalSums.MAXIMUM][:, None])

        weight = x.exp() if entropy or ref_logits is not None else x.exp_()
        torch.sum(weight, dim=1, out=sums[LocalSums.TOTAL])
        if entropy:
            torch.linalg.vecdot(weight, x, out=sums[LocalSums.WEIGHTED])
        if squares:
            torch.linalg.vecdot(weight, weight, out=sums[LocalSums.SQUARES])

        if ref_logits is not None:
            y = columns.scaled(ref_logits[rows])
            torch.amax(y, dim=1, out=sums[LocalSums.REF_MAXIMUM])
            y.sub_(sums[LocalSums.REF_MAXIMUM][:, None])
            difference = x.sub_(y)
            ref_weight = y.exp_()
            torch.sum(ref_weight, dim=1, out=sums[LocalSums.REF_TOTAL])
            if forward:
                weight = ref_weight.neg_()
            torch.linalg.vecdot(weight, difference, out=sums[LocalSums.DIFFERENCE])


def _write_gradient_by_torch(
    logits: Tensor, targets: Tensor, ref_logits: Tensor | None,
    log_total: Tensor, ref_log_total: Tensor, entropy: Tensor | None, kl: Tensor | None,
    grad_logprobs: Tensor, grad_entropy: Tensor | None, grad_kl: Tensor | None,
    first: int, valid: int, scale: float, beta: float,
) -> None:  # fmt: skip
    """`write_gradient`, with each of its tensors."""
    columns = Columns(first, valid, scale)
    logits[:, valid:] = 0.0
    if not valid:
        return
    local, is_local = columns.place(targets)
    grad_logprobs = (grad_logprobs * scale)[:, None]

    for rows in blocks(logits):
        log_p = columns.scaled(logits[rows]).sub_(log_total[rows, None])
        p = log_p.exp()
        grad_x = p * -grad_logprobs[rows]
        if grad_entropy is not None:
            assert entropy is not None
            plus_entropy = log_p + entropy[rows, None]
            grad_x.sub_(plus_entropy.mul_(p).mul_((grad_entropy[rows] * scale)[:, None]))
        if grad_kl is not None:
            assert ref_logits is not None and kl is not None
            log_q = columns.scaled(ref_logits[rows]).sub_(ref_log_total[rows, None])
            if beta == 0:
                slope = p - log_q.exp_()
            elif beta == 1:
                slope = log_p.sub_(log_q).sub_(kl[rows, None]).mul_(p)
            else:
                log_m = log_mixture(log_p, log_q, beta)
                slope = log_p.sub_(log_m).sub_(kl[rows, None]).mul_(p).mul_(1 - beta)
            grad_x.add_(slope.mul_((grad_kl[rows] * scale)[:, None]))

        at_target = grad_logprobs[rows] * is_local[rows, None]
        grad_x.scatter_add_(1, local[rows, None], at_target)
        logits[rows, :valid] = grad_x


_write_sums = operator(
    "vocab_sums(Tensor(a!) table, Tensor logits, Tensor targets, Tensor? ref_logits, int first, "
    "int valid, float scale, bool entropy, bool squares, bool forward) -> ()",
    _write_sums_by_torch,
)
_write_gradient = operator(
    "vocab_gradient(Tensor(a!) logits, Tensor targets, Tensor? ref_logits, Tensor log_total, "
    "Tensor ref_log_total, Tensor? entropy, Tensor? kl, Tensor grad_logprobs, "
    "Tensor? grad_entropy, Tensor? grad_kl, int first, int valid, float scale, float beta) -> ()",
    _write_gradient_by_torch,
)


def blocks(logits: Tensor) -> Iterator[slice]:
    """Slices of consecutive rows, each with a bounded number of elements; together all rows."""
    height = max(1, _BLOCK_ELEMENTS[logits.device.type] // logits.shape[1])
    for top in range(0, len(logits), height):
        yield slice(top, min(top + height, len(logits)))
