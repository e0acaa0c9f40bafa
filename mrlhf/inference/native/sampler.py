"""Draws the next token of each row: a uniform number picks it from the distribution.

The number is a hash of (seed, uid, sample index, position) alone. So batch order, replica and
layout cannot change a response, except where they round the logits differently. Each rank keeps its
columns of the logits and reads them once; the ranks exchange two numbers for each block of columns.
This file knows rows, and no models or sequences.
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
from mrlhf.host.kernels import threads_for
from mrlhf.inference.base import SamplingParams
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.records import as_bits, head_octets

Words = NDArray[np.uint64]

# Columns of the vocabulary that form a block: on a host, as in `drawing.h`, and on a GPU.
_HOST_COLUMNS = 128
_COLUMNS = 1024
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
            sampling: its temperature, top_k, top_p and min_p are used.

        Returns:
            The tokens, int64 [batch], and their log-probabilities over the whole vocabulary at the
            temperature, float32 [batch]. With `record_masks` they are over the tokens that are let
            through, and the third result has a bit for each of these; see `as_bits`. With
            `record_head` the third result ends with the likeliest tokens; see `head_octets`.
        """
        tokens, logprobs, *record = self._draw_allowed(logits, vocab_start, uniform, sampling)
        if sampling.record_head and not record:
            record = [self._head(logits, vocab_start, tokens, logprobs, sampling)]
        return tokens, logprobs, *record

    def _draw_allowed(
        self, logits: Tensor, vocab_start: int, uniform: Tensor, sampling: SamplingParams
    ) -> tuple[Tensor, ...]:
        """Draw as `draw` does, with a record only where tokens are cut off."""
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
        tokens, logprobs, *record = self._draw_any(logits, vocab_start, uniform, sampling)
        if record:
            return tokens, logprobs, *record
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
        chosen = _own_logits(logits, vocab_start, tokens).double() * scale
        all_excluded, all_chosen = self._parallel.gather(torch.stack([excluded, chosen])).unbind(1)
        allowed = all_chosen.amax(dim=0) - logprobs
        ratio = all_excluded.logsumexp(dim=0) - allowed
        return (logprobs - ratio.logaddexp(torch.zeros_like(ratio))).float()

    def _head(
        self,
        logits: Tensor,
        vocab_start: int,
        tokens: Tensor,
        logprobs: Tensor,
        sampling: SamplingParams,
    ) -> Tensor:
        """Return the words of the likeliest tokens; see `head_octets`.

        Each rank gathers its own likeliest. The drawn `tokens` tell by their `logprobs` what the
        logits are normalised by.
        """
        most = min(sampling.record_head, max(self._parallel.widths(logits)))
        own, columns = logits.topk(min(most, logits.shape[1]))
        missing = most - own.shape[1]
        values = F.pad(own.float(), (0, missing), value=-torch.inf)
        drawn = _own_logits(logits, vocab_start, tokens).float()
        # Ids are whole in float32: no vocabulary has 2^24 tokens.
        ids = F.pad((columns + vocab_start).float(), (0, missing))
        mine = torch.cat([values, drawn[:, None], ids], dim=1)
        every = self._parallel.gather(mine)
        drawn = every[:, :, most].amax(dim=0)

        values = every[:, :, :most].transpose(0, 1).flatten(1)
        ids = every[:, :, most + 1 :].transpose(0, 1).flatten(1)
        top, place = values.topk(min(sampling.record_head, values.shape[1]))
        top = (top - drawn[:, None]) / (sampling.temperature or 1.0) + logprobs[:, None]
        return _octets(ids.gather(1, place), top, sampling.record_head)

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
        """Draw as `draw` does, among all tokens, of which none is cut off.

        The ranks tell each other how much weight each block of their columns has. So all find the
        block that has a row's token, and the rank of the block finds the token in it.
        """
        greedy = sampling.temperature == 0
        scale = 1.0 if greedy else 1.0 / sampling.temperature
        numbers = torch.full_like(uniform, -1.0) if greedy else uniform
        each = _COLUMNS if logits.is_cuda else _HOST_COLUMNS
        blocks = -(-max(self._parallel.widths(logits)) // each)
        summarise, choose = (logit_blocks, draw) if serves(logits) else (_logit_blocks, _draw)
        summaries = self._parallel.gather(summarise(logits, scale, blocks, each))

        # The rank that has a row's token writes it, and the others zeros: a sum joins them.
        words = torch.empty(3 * len(logits), dtype=torch.int32, device=logits.device)
        tokens = words[: 2 * len(logits)].view(torch.int64)
        logprobs = words[2 * len(logits) :].view(torch.float32)
        place = (self._parallel.rank, vocab_start, each)
        choose(logits, scale, summaries, numbers, *place, tokens, logprobs)
        self._parallel.sum(words)
        return tokens, logprobs


def _logit_blocks(logits: Tensor, scale: float, blocks: int, each: int) -> Tensor:
    """Summarise each row of `scale` * logits [batch, vocab_shard] by `blocks` of `each` columns.

    Returns:
        The highest scaled logit of each block, and the sum of exp(scaled logit - that highest) over
        it, float32 [2, batch, blocks]. A block past the last column has no weight.
    """
    host = kernels.find_for(logits)
    if host is not None and each == _HOST_COLUMNS:
        rows, columns = logits.shape
        summaries = torch.empty(2, rows, blocks, dtype=torch.float32)
        threads = threads_for(logits.numel())
        host.logit_blocks(logits, scale, summaries, rows, columns, blocks, threads)
        return summaries

    parts = _in_blocks(logits, scale, blocks, each)
    highest = parts.amax(dim=-1)
    safe = highest.masked_fill(highest == -torch.inf, 0.0)
    return torch.stack([highest, (parts - safe[:, :, None]).exp().sum(dim=-1)])


def _draw(
    logits: Tensor,
    scale: float,
    summaries: Tensor,
    uniform: Tensor,
    rank: int,
    first: int,
    each: int,
    tokens: Tensor,
    logprobs: Tensor,
) -> None:
    """Write a token of each row and its log-probability if it is one of this rank's, else zeros.

    Args:
        logits: [batch, vocab_shard].
        scale: factor of the logits.
        summaries: what `logit_blocks` gives on all ranks, [ranks, 2, batch, blocks].
        uniform: picks the token, float64 [batch]: a number in [0, 1), or a negative one for the
            likeliest token.
        rank: this rank's place in `summaries`.
        first: the token of the first column.
        each: columns of a block.
        tokens: int64 [batch], to be written.
        logprobs: float32 [batch], to be written.
    """
    ranks, _, rows, blocks = summaries.shape
    host = kernels.find_for(logits)
    if host is not None and each == _HOST_COLUMNS:
        sizes = (ranks, rank, first, rows, logits.shape[1], blocks, threads_for(logits.numel()))
        host.draw(logits, scale, summaries, uniform, tokens, logprobs, *sizes)
        return

    greedy = uniform[:, None] < 0
    tops, sums = summaries.permute(1, 2, 0, 3).flatten(2)
    top = tops.amax(dim=1, keepdim=True)
    ends = ((tops - top).double().exp() * sums).cumsum(dim=1)
    target = uniform[:, None] * ends[:, -1:]
    block, before = _first_above(ends, target)
    block = torch.where(greedy, tops.argmax(dim=1, keepdim=True), block)

    # This rank's block of that number; where the token is another rank's, it does not count.
    place = (block % blocks)[:, :, None].expand(-1, -1, each)
    scaled = _in_blocks(logits, scale, blocks, each).gather(1, place)[:, 0]
    within = before + (scaled - top).double().exp().cumsum(dim=1)
    lane = torch.where(greedy, scaled.argmax(dim=1, keepdim=True), _first_above(within, target)[0])
    chosen = scaled.gather(1, lane) - top - ends[:, -1:].log().float()
    column = (block % blocks * each + lane).clamp_max(logits.shape[1] - 1)

    other = (block // blocks != rank)[:, 0]
    tokens.copy_((first + column)[:, 0].masked_fill(other, 0))
    logprobs.copy_(chosen[:, 0].masked_fill(other, 0.0))


def _in_blocks(logits: Tensor, scale: float, blocks: int, each: int) -> Tensor:
    """Scaled logits, float32 [batch, blocks, each]; -inf stands for columns that there are not."""
    missing = blocks * each - logits.shape[1]
    padded = F.pad(logits.float() * scale, (0, missing), value=-torch.inf)
    return padded.unflatten(1, (blocks, each))


logit_blocks = operator(
    "logit_blocks(Tensor logits, float factor, int blocks, int each) -> Tensor", _logit_blocks
)
draw = operator(
    "draw(Tensor logits, float factor, Tensor summaries, Tensor uniform, int rank, int first, "
    "int each, Tensor(a!) tokens, Tensor(b!) logprobs) -> ()",
    _draw,
)


def sample_truncated(
    logits: Tensor, uniform: Tensor, sampling: SamplingParams
) -> tuple[Tensor, ...]:
    """Draw as `TokenSampler.draw`, with tokens cut off, from all logits [batch, vocab]."""
    scaled = logits.float() / sampling.temperature
    shifted = scaled - scaled.amax(dim=-1, keepdim=True)
    weights = shifted.exp()
    kept = truncate(weights, sampling.top_k, sampling.top_p, sampling.min_p)
    tokens = invert(kept, uniform)
    chosen = shifted.gather(-1, tokens[:, None])[:, 0]
    if not sampling.record_masks:
        return tokens, chosen - weights.sum(dim=-1).log()
    total = kept.sum(dim=-1)
    logprobs, record = chosen - total.log(), as_bits(kept > 0)
    if sampling.record_head:
        top, ids = kept.topk(min(sampling.record_head, kept.shape[1]))
        head = _octets(ids, (top / total[:, None]).log(), sampling.record_head)
        record = torch.cat([record, head], dim=1)
    return tokens, logprobs, record


def _own_logits(logits: Tensor, vocab_start: int, tokens: Tensor) -> Tensor:
    """The logit of each row's token if it is one of this rank's columns, else -inf; [batch]."""
    columns = tokens - vocab_start
    is_mine = (columns >= 0) & (columns < logits.shape[-1])
    places = columns.clamp(0, logits.shape[-1] - 1)[:, None]
    return logits.gather(-1, places)[:, 0].masked_fill(~is_mine, -torch.inf)


def _octets(ids: Tensor, logprobs: Tensor, head: int) -> Tensor:
    """`head_octets` of parts that may be shorter than the head, which ends with probability 0."""
    missing = head - ids.shape[1]
    return head_octets(F.pad(ids, (0, missing)), F.pad(logprobs, (0, missing), value=-torch.inf))


def truncate(weights: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Set weights [batch, vocab] to zero outside top-k, then outside top-p of what is left, then
    those below `min_p` of the highest.

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
    if min_p > 0:
        least = min_p * weights.amax(dim=-1, keepdim=True)
        weights = weights.masked_fill(weights < least, 0.0)
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
