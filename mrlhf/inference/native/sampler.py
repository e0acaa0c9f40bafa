"""Which token comes next: a uniform number that is a hash of what is sampled, and the inverse of
the distribution.

The number depends on (seed, uid, sample index, position) and on nothing else, so batch order,
replica and layout cannot change a response, except where they round the logits differently. The
logits stay cut over the vocabulary, and are gone through once: what the ranks tell each other is a
few numbers a row. It knows neither models nor sequences, only rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mrlhf.inference.base import SamplingParams
from mrlhf.inference.native.kernels import Kernels
from mrlhf.inference.native.tensor_parallel import TensorParallel

Words = NDArray[np.uint64]

_COLUMNS = 128
# Rows are worked on together as long as a float32 copy of their logits leaves a device some memory.
_ELEMENTS = 2**27


def splitmix64(state: Words) -> Words:
    """The output of SplitMix64 in each `state` (Steele, Lea and Flood, OOPSLA 2014), modulo 2**64."""
    mixed = state + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def sample_keys(seeds: Sequence[int], uids: Sequence[int], samples: Sequence[range]) -> Words:
    """One hash a sample, of (seed, uid, sample index).

    Args:
        seeds: one for each prompt.
        uids: one for each prompt.
        samples: sample indices of each prompt.

    Returns:
        [samples of all prompts], ordered by prompt, then by sample.
    """
    counts = [len(indices) for indices in samples]
    roots = splitmix64(np.array(list(seeds), dtype=np.uint64))
    prompts = splitmix64(roots ^ np.array(list(uids), dtype=np.int64).view(np.uint64))
    indices = np.array([index for chosen in samples for index in chosen], dtype=np.uint64)
    return splitmix64(np.repeat(prompts, counts) ^ indices)


def uniforms(keys: Words, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """The numbers in [0, 1), 53 bits each, for token `positions` [batch] of the samples with these
    `keys` [batch].
    """
    return (splitmix64(keys ^ positions.view(np.uint64)) >> np.uint64(11)).astype(
        np.float64
    ) * 2.0**-53


class Sampler:
    """Draws tokens from logits that are cut over the ranks of a replica; all ranks come to the same
    tokens.
    """

    def __init__(self, parallel: TensorParallel, kernels: Kernels | None) -> None:
        """Args:
        parallel: the ranks of the replica.
        kernels: compiled ones for the dtype of host logits; None for torch's operators.
        """
        self._parallel, self._kernels = parallel, kernels

    def draw(
        self, logits: Tensor, vocab_start: int, uniform: Tensor, sampling: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        """Draw one token a row.

        Args:
            logits: [batch, vocab_shard], any float dtype; not altered.
            vocab_start: token id of the first column.
            uniform: float64 [batch] in [0, 1); not looked at when greedy.
            sampling: temperature, top_k and top_p are used.

        Returns:
            int64 [batch] tokens, and float32 [batch] log-probabilities over the whole vocabulary at
            the temperature.
        """
        if sampling.temperature > 0 and (sampling.top_k != -1 or sampling.top_p < 1):
            return sample_truncated(self._parallel.all_columns(logits), uniform, sampling)
        rows = (
            len(logits)
            if self._kernels is not None
            else max(1, _ELEMENTS // max(1, logits.shape[-1]))
        )
        parts = [
            self._draw_rows(*part, vocab_start, sampling)
            for part in zip(logits.split(rows), uniform.split(rows), strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat(
            [logprobs for _, logprobs in parts]
        )

    def _draw_rows(
        self, logits: Tensor, uniform: Tensor, vocab_start: int, sampling: SamplingParams
    ) -> tuple[Tensor, Tensor]:
        greedy = sampling.temperature == 0
        scale = 1.0 if greedy else 1.0 / sampling.temperature
        if self._kernels is not None and self._parallel.size == 1:
            return self._kernels.draw(
                logits, scale, torch.full_like(uniform, -1.0) if greedy else uniform
            )
        blocks = self._kernels.logit_blocks if self._kernels is not None else _logit_blocks
        highest, sums, likeliest = blocks(logits, scale)
        top = highest.amax(dim=1)
        mass = ((highest - top[:, None]).double().exp() * sums).sum(dim=1)
        mine = torch.stack([top.double(), mass, (likeliest + vocab_start).double()])
        tops, masses, likeliest = self._parallel.gather(mine).unbind(dim=1)
        top = tops.amax(dim=0)
        masses = masses * (tops - top).exp()
        ends = masses.cumsum(dim=0)
        total = ends[-1]
        if greedy:
            winner = (tops == top).int().argmax(dim=0, keepdim=True)
            return likeliest.gather(0, winner)[0].long(), -total.log().float()
        target = uniform * total
        # The first shard whose end lies beyond the target; where rounding leaves a rest, the last
        # that has any mass.
        owner = torch.minimum((ends <= target).sum(dim=0), (masses > 0).cumsum(dim=0).argmax(dim=0))
        local = target - (ends - masses)[self._parallel.rank]
        local = torch.where(owner == self._parallel.rank, local.clamp_min(0.0), -1.0)
        pick = self._kernels.pick if self._kernels is not None else _pick
        columns, chosen = pick(logits, scale, highest, sums, top.float(), local)
        found = columns >= 0
        drawn = torch.stack(
            [torch.where(found, columns + vocab_start, 0).double(), chosen.double()]
        )
        tokens, chosen = self._parallel.sum(drawn)
        return tokens.long(), (chosen - top - total.log()).float()


def _logit_blocks(logits: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """As `Kernels.logit_blocks`."""
    scaled = logits.float() * scale
    blocks = F.pad(scaled, (0, -scaled.shape[-1] % _COLUMNS), value=-torch.inf).unflatten(
        -1, (-1, _COLUMNS)
    )
    highest = blocks.amax(dim=-1)
    return highest, (blocks - highest[:, :, None]).exp().sum(dim=-1), scaled.argmax(dim=-1)


def _pick(
    logits: Tensor, scale: float, highest: Tensor, sums: Tensor, tops: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """As `Kernels.pick`."""
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
) -> tuple[Tensor, Tensor]:
    """As `Sampler.draw`, from logits [batch, vocab] of the whole vocabulary, after top-k and top-p."""
    scaled = logits.float() / sampling.temperature
    shifted = scaled - scaled.amax(dim=-1, keepdim=True)
    weights = shifted.exp()
    normaliser = weights.sum(dim=-1).log()
    tokens = invert(truncate(weights, sampling.top_k, sampling.top_p), uniform)
    return tokens, shifted.gather(-1, tokens[:, None])[:, 0] - normaliser


def truncate(weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """`weights` [batch, vocab] (unnormalised probabilities), zero outside top-k, then outside top-p
    of what is left.

    A token stays in top-p if those likelier than it, or as likely with a lower id, have less than
    `top_p` together.
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
    """The first token id at which the cumulative share of `weights` [batch, vocab] exceeds
    `uniform` [batch].
    """
    ends = weights.to(torch.float64).cumsum(dim=-1)
    return _first_above(ends, uniform[:, None] * ends[:, -1:])[0][:, 0]


def _first_above(cumulative: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Index [batch, 1] of the first entry above `target` [batch, 1], and the entry before it (0
    before the first).

    Where rounding has put the target past the end, the last entry that adds anything is taken;
    not-a-number takes the last index.
    """
    end = cumulative[:, -1:]
    inside = torch.minimum(target, torch.nextafter(end, torch.zeros_like(end)))
    index = torch.searchsorted(cumulative, inside, right=True).clamp_max(cumulative.shape[-1] - 1)
    before = cumulative.gather(-1, (index - 1).clamp_min(0)).masked_fill(index == 0, 0.0)
    return index, before
