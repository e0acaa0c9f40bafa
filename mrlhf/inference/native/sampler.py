"""Draws the next token of each row: a uniform number picks it from the distribution.

The number is a hash of (seed, uid, sample index, position) alone. So batch order, replica and
layout cannot change a response, except where they round the logits differently. Each rank keeps its
columns of the logits and reads them once; the ranks exchange a few numbers for each row. This file
knows rows, and no models or sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mrlhf.device import send
from mrlhf.gpu.library import operator, serves
from mrlhf.host import kernels
from mrlhf.host.kernels import Kernels, threads_for
from mrlhf.inference.base import SamplingParams
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.records import as_bits

Words = NDArray[np.uint64]

_COLUMNS = 128
# Stands for the logits of tokens that are never drawn. Divided by a temperature it stays finite,
# and its difference to any other logit is beyond what exp does not round to zero.
_NEVER = -1e30
# The most logits that are worked on at once: a float32 copy of them must fit the device.
_MOST_LOGITS = 2**27


def splitmix64(state: Words) -> Words:
    """The output of SplitMix64 for each `state` (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = state + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def sample_keys(seeds: Sequence[int], uids: Sequence[int], samples: Sequence[range]) -> Words:
    """Return one hash of (seed, uid, sample index) for each sample, by prompt, then by sample."""
    counts = [len(indices) for indices in samples]
    roots = splitmix64(np.array(list(seeds), dtype=np.uint64))
    prompts = splitmix64(roots ^ np.array(list(uids), dtype=np.int64).view(np.uint64))
    indices = np.array([index for chosen in samples for index in chosen], dtype=np.uint64)
    return splitmix64(np.repeat(prompts, counts) ^ indices)


def uniforms(keys: Words, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) of 53 random bits, [batch], by `keys` and `positions` [batch]."""
    bits = splitmix64(keys ^ positions.view(np.uint64)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


class TokenSampler:
    """Draws tokens from logits whose columns are spread over the ranks of a replica.

    All ranks draw the same tokens. Token ids in `never` are never drawn.
    """

    def __init__(self, parallel: TensorParallel, never: Sequence[int] = ()) -> None:
        self._parallel = parallel
        self._never = torch.tensor(list(never), dtype=torch.int64)
        # Their columns, by the first token, the number of columns and the device of logits.
        self._columns: dict[tuple[int, int, torch.device], Tensor] = {}

    def draw(
        self, logits: Tensor, vocab_start: int, uniform: Tensor, sampling: SamplingParams
    ) -> tuple[Tensor, ...]:
        """Draw one token for each row.

        Args:
            logits: [batch, vocab_shard], any float dtype; columns of tokens that are never drawn
                are overwritten.
            vocab_start: the token id of the first column.
            uniform: the numbers that pick, in [0, 1), float64 [batch]; not used if greedy.
            sampling: its temperature, top_k and top_p are used.

        Returns:
            The tokens, int64 [batch], and their log-probabilities over the whole vocabulary at the
            temperature, float32 [batch]. With `record_masks` they are over the tokens that top-k
            and top-p let through, and the third result has a bit for each of these; see `as_bits`.
        """
        if not len(self._never):
            return self._draw_any(logits, vocab_start, uniform, sampling)

        key = (vocab_start, logits.shape[-1], logits.device)
        if key not in self._columns:
            here = (self._never >= vocab_start) & (self._never < vocab_start + logits.shape[-1])
            self._columns[key] = send(self._never[here] - vocab_start, logits.device)
        columns = self._columns[key]
        scale = 1.0 / (sampling.temperature or 1.0)
        excluded = (logits[:, columns].float() * scale).logsumexp(dim=-1).double()
        logits.index_fill_(1, columns, max(_NEVER, torch.finfo(logits.dtype).min))
        tokens, logprobs, *bits = self._draw_any(logits, vocab_start, uniform, sampling)
        if bits:
            return tokens, logprobs, *bits
        return tokens, self._over_all(logits, vocab_start, tokens, logprobs, excluded, scale)

    def _over_all(
        self,
        logits: Tensor,
        vocab_start: int,
        tokens: Tensor,
        logprobs: Tensor,
        excluded: Tensor,
        scale: float,
    ) -> Tensor:
        """Return log-probabilities over the whole vocabulary, [batch].

        `logprobs` [batch] are over the tokens that may be drawn. `excluded`, float64 [batch], is
        the logarithm of the sum of exp(logit) over this rank's columns that are never drawn.
        """
        columns = tokens - vocab_start
        is_mine = (columns >= 0) & (columns < logits.shape[-1])
        places = columns.clamp(0, logits.shape[-1] - 1)[:, None]
        chosen = logits.gather(-1, places)[:, 0].double() * scale
        chosen = chosen.masked_fill(~is_mine, -torch.inf)

        all_excluded, all_chosen = self._parallel.gather(torch.stack([excluded, chosen])).unbind(1)
        allowed = all_chosen.amax(dim=0) - logprobs
        ratio = all_excluded.logsumexp(dim=0) - allowed
        return (logprobs - ratio.logaddexp(torch.zeros_like(ratio))).float()

    def _draw_any(
        self, logits: Tensor, vocab_start: int, uniform: Tensor, sampling: SamplingParams
    ) -> tuple[Tensor, ...]:
        """Draw as `draw` does, among all tokens."""
        if sampling.temperature > 0 and sampling.truncates:
            return sample_truncated(self._parallel.all_columns(logits), uniform, sampling)

        rows = max(1, _MOST_LOGITS // max(1, logits.shape[-1]))
        compiled = kernels.find_for(logits) is not None or serves(logits)
        if compiled or len(logits) <= rows:
            return self._draw_rows(logits, uniform, vocab_start, sampling)

        all_tokens = []
        all_logprobs = []
        for some, numbers in zip(logits.split(rows), uniform.split(rows), strict=True):
            tokens, logprobs = self._draw_rows(some, numbers, vocab_start, sampling)
            all_tokens.append(tokens)
            all_logprobs.append(logprobs)
        return torch.cat(all_tokens), torch.cat(all_logprobs)

    def _draw_rows(
        self, logits: Tensor, uniform: Tensor, vocab_start: int, sampling: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Draw as `draw` does, among all tokens, without top-k and top-p."""
        greedy = sampling.temperature == 0
        scale = 1.0 if greedy else 1.0 / sampling.temperature
        host = kernels.find_for(logits)
        if self._parallel.size == 1 and (host is not None or serves(logits)):
            numbers = torch.full_like(uniform, -1.0) if greedy else uniform
            if host is not None:
                return _draw_from_all(host, logits, scale, numbers)
            tokens, logprobs = _draw_on_gpu(logits, scale, numbers)
            return tokens, logprobs

        # This rank's highest logit, the mass of its columns, and its likeliest token.
        highest, sums, likeliest = logit_blocks(logits, scale)
        top = highest.amax(dim=1)
        mass = ((highest - top[:, None]).double().exp() * sums).sum(dim=1)
        mine = torch.stack([top.double(), mass, (likeliest + vocab_start).double()])

        # The same of all ranks, with masses on one scale.
        tops, masses, likeliest = self._parallel.gather(mine).unbind(dim=1)
        top = tops.amax(dim=0)
        masses = masses * (tops - top).exp()
        ends = masses.cumsum(dim=0)
        total = ends[-1]
        if greedy:
            winner = (tops == top).int().argmax(dim=0, keepdim=True)
            return likeliest.gather(0, winner)[0].long(), -total.log().float()

        # The rank that has the token: the first whose end lies beyond the target. If rounding puts
        # the target past all ends, it is the last rank that has any mass.
        target = uniform * total
        owner = torch.minimum((ends <= target).sum(dim=0), (masses > 0).cumsum(dim=0).argmax(dim=0))
        local = target - (ends - masses)[self._parallel.rank]
        local = torch.where(owner == self._parallel.rank, local.clamp_min(0.0), -1.0)

        # The owner finds the token; the other ranks add zeros.
        columns, chosen = pick(logits, scale, highest, sums, top.float(), local)
        tokens = torch.where(columns >= 0, columns + vocab_start, 0)
        drawn = torch.stack([tokens.double(), chosen.double()])
        tokens, chosen = self._parallel.sum(drawn)
        return tokens.long(), (chosen - top - total.log()).float()


def _draw_from_all(
    host: Kernels, logits: Tensor, scale: float, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw from logits [batch, vocab] of the whole vocabulary; a negative number is greedy."""
    rows, columns = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    logprobs = torch.empty(rows, dtype=torch.float32)
    threads = threads_for(logits.numel())
    host.draw(logits, scale, uniform, tokens, logprobs, rows, columns, threads)
    return tokens, logprobs


def _draw_by_torch(logits: Tensor, scale: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """`_draw_from_all` on torch's operators."""
    scaled = logits.float() * scale
    top, likeliest = scaled.max(dim=-1)
    ends = (scaled - top[:, None]).double().exp().cumsum(dim=-1)
    total = ends[:, -1]
    drawn = _first_above(ends, (uniform * total)[:, None])[0][:, 0]
    tokens = torch.where(uniform < 0, likeliest, drawn)
    chosen = scaled.gather(-1, tokens[:, None])[:, 0]
    return tokens, chosen - top - total.log().float()


_draw_on_gpu = operator(
    "draw(Tensor logits, float factor, Tensor uniform) -> (Tensor, Tensor)", _draw_by_torch
)


def logit_blocks(logits: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Summarise each row of `scale` * logits [batch, vocab_shard] by blocks of 128 columns.

    Returns:
        The highest scaled logit of each block, float32 [batch, blocks]; the sum of exp(scaled logit
        - that highest) over each block, float32 [batch, blocks]; and the first column that has the
        highest scaled logit of the whole row, int64 [batch].
    """
    host = kernels.find_for(logits)
    if host is not None:
        rows, columns = logits.shape
        highest, sums = torch.empty((2, rows, -(-columns // _COLUMNS)), dtype=torch.float32)
        likeliest = torch.empty(rows, dtype=torch.int64)
        threads = threads_for(logits.numel())
        host.logit_blocks(logits, scale, highest, sums, likeliest, rows, columns, threads)
        return highest, sums, likeliest

    scaled = logits.float() * scale
    padded = F.pad(scaled, (0, -scaled.shape[-1] % _COLUMNS), value=-torch.inf)
    blocks = padded.unflatten(-1, (-1, _COLUMNS))
    highest = blocks.amax(dim=-1)
    return highest, (blocks - highest[:, :, None]).exp().sum(dim=-1), scaled.argmax(dim=-1)


def pick(
    logits: Tensor, scale: float, highest: Tensor, sums: Tensor, tops: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Find the column of each row at which the running sum of weights passes the row's target.

    The weight of a column is exp(scaled logit - top). `highest` and `sums` come from
    `logit_blocks`; `tops` are the rows' highest scaled logits over all ranks, float32 [batch];
    `targets` are float64 [batch], and a row with a negative one is skipped.

    Returns:
        The columns, int64 [batch], and their scaled logits, float32 [batch]. A row that is skipped
        has column -1 and logit 0.
    """
    host = kernels.find_for(logits)
    if host is not None:
        rows = len(logits)
        tokens = torch.empty(rows, dtype=torch.int64)
        chosen = torch.empty(rows, dtype=torch.float32)
        sizes = (rows, logits.shape[1], threads_for(64 * rows))
        host.pick(logits, scale, highest, sums, tops, targets, tokens, chosen, *sizes)
        return tokens, chosen

    ends = ((highest - tops[:, None]).double().exp() * sums).cumsum(dim=-1)
    block, before = _first_above(ends, targets[:, None])

    columns = block * _COLUMNS + torch.arange(_COLUMNS, device=logits.device)
    inside = columns < logits.shape[-1]
    scaled = logits.gather(-1, columns.clamp_max(logits.shape[-1] - 1)).float() * scale
    scaled = scaled.masked_fill(~inside, -torch.inf)

    within = (scaled - tops[:, None]).double().exp().cumsum(dim=-1) + before
    place, _ = _first_above(within, targets[:, None])
    column = (block * _COLUMNS + place)[:, 0].clamp_max(logits.shape[-1] - 1)
    skipped = targets < 0
    chosen = scaled.gather(-1, place)[:, 0].masked_fill(skipped, 0.0)
    return column.masked_fill(skipped, -1), chosen


def sample_truncated(
    logits: Tensor, uniform: Tensor, sampling: SamplingParams
) -> tuple[Tensor, ...]:
    """Draw as `TokenSampler.draw`, with top-k and top-p, from all logits [batch, vocab]."""
    scaled = logits.float() / sampling.temperature
    shifted = scaled - scaled.amax(dim=-1, keepdim=True)
    weights = shifted.exp()
    kept = truncate(weights, sampling.top_k, sampling.top_p)
    tokens = invert(kept, uniform)
    chosen = shifted.gather(-1, tokens[:, None])[:, 0]
    if not sampling.record_masks:
        return tokens, chosen - weights.sum(dim=-1).log()
    return tokens, chosen - kept.sum(dim=-1).log(), as_bits(kept > 0)


def truncate(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set weights [batch, vocab] to zero outside top-k, then outside top-p of what is left.

    A token stays in top-p if the tokens before it have less than `top_p` together. The tokens
    before it are likelier, or as likely with a lower id.
    """
    if 0 < top_k < weights.shape[-1]:
        kth = weights.topk(top_k, dim=-1).values[:, -1:]
        weights = weights.masked_fill(weights < kth, 0.0)
    if top_p < 1:
        ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
        cumulative = ordered.to(torch.float64).cumsum(dim=-1)
        dropped = cumulative - ordered >= top_p * cumulative[:, -1:]
        dropped[:, 0] = False
        weights = weights.masked_fill(dropped.scatter(-1, ids, dropped), 0.0)
    return weights


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return each row's first token id where the cumulative share exceeds `uniform` [batch]."""
    ends = weights.to(torch.float64).cumsum(dim=-1)
    return _first_above(ends, uniform[:, None] * ends[:, -1:])[0][:, 0]


def _first_above(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first entry of each row of running sums that is above the row's target [batch, 1].

    If rounding has put the target past the end, the last entry that adds anything is taken. NaN
    takes the last index.

    Returns:
        The index of the entry and the value of the entry before it (0 before the first), both
        [batch, 1].
    """
    end = cumulative[:, -1:]
    inside = torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
    index = torch.searchsorted(cumulative, inside, right=True).clamp_max(cumulative.shape[-1] - 1)
    before = cumulative.gather(-1, (index - 1).clamp_min(0)).masked_fill(index == 0, 0.0)
    return index, before
