"""Responses that stand in the rows of the prompts and are not drawn; a teacher teaches on them.

It does not know engines or losses.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mrlhf.rollout.drawn_sample import DrawnSample


@dataclass(frozen=True)
class GivenResponses:
    """Chooses the prompts of a batch whose responses are given."""

    token_ids: Mapping[int, Sequence[Sequence[int]]]  # of the responses to each prompt, by uid
    share: float  # of the prompts; at least one prompt of a batch gets drawn responses

    def of(self, uids: Sequence[int], n: int, seed: int) -> dict[int, DrawnSample]:
        """The given responses to some prompts of a batch, by row: `n` to each of them.

        A prompt with fewer repeats them. The number of these prompts is the share of the batch,
        rounded up or down by chance; `seed` decides.
        """
        generator = torch.Generator().manual_seed(seed)
        chance = float(torch.rand((), generator=generator, dtype=torch.float64))
        count = min(int(self.share * len(uids) + chance), len(uids) - 1)
        chosen = torch.randperm(len(uids), generator=generator)[:count].tolist()
        rows = [prompt * n + sample for prompt in sorted(chosen) for sample in range(n)]
        return {row: _given(row, n, self.token_ids[uids[row // n]]) for row in rows}


def _given(row: int, n: int, responses: Sequence[Sequence[int]]) -> DrawnSample:
    """The sample at `row`, of which the policy drew no token."""
    token_ids = responses[row % n % len(responses)]
    sample = DrawnSample(row, array("i", token_ids), ended=True, stopped=True)
    sample.exclude()
    return sample
