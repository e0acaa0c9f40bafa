"""Which sequences of a batch begin with the same prompt, so that packs may hold it once.

Samples of a prompt, and the sides of a preference pair, stand side by side in a batch. What they
share is found from their tokens alone. This file knows neither packs nor ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from mrlhf.batch import Sequences


@dataclass(frozen=True)
class SharedPrompts:
    """The prompts that consecutive rows of a batch share, as numbers; a list has one for each row.

    Rows that stand side by side and have the same number in `groups` begin with the same prompt.
    """

    groups: list[int]  # ascending
    prompts: list[int]  # tokens of the prompt, padded as in a pack
    rests: list[int]  # tokens of what follows it, padded as in a pack
    costs: list[int]  # the work for the prompt

    def tokens(self, rows: Sequence[int], whole: Sequence[int]) -> int:
        """Return the tokens of consecutive rows in a pack; `whole` are those of whole rows."""
        total = 0
        for run in self._runs(rows):
            if len(run) == 1:
                total += whole[run[0]]
            else:
                total += self.prompts[run[0]] + sum(self.rests[row] for row in run)
        return total

    def saved(self, rows: Sequence[int]) -> int:
        """Return the tokens that consecutive rows need not have of their own in a pack."""
        return sum(self.prompts[run[0]] * (len(run) - 1) for run in self._runs(rows))

    def cost(self, rows: Sequence[int], whole: Sequence[int]) -> int:
        """Return the work for consecutive rows in a pack; `whole` is that for whole rows."""
        saved = sum(self.costs[run[0]] * (len(run) - 1) for run in self._runs(rows))
        return sum(whole[row] for row in rows) - saved

    def _runs(self, rows: Sequence[int]) -> Iterator[list[int]]:
        for _, run in groupby(rows, key=self.groups.__getitem__):
            yield list(run)


def prompt_groups(sequences: Sequences) -> Tensor:
    """Return the number of each row's group, int64 [rows], ascending.

    A row belongs to the group of the row before it if both begin with the same prompt, and
    something follows it in both.
    """
    token_ids = sequences.token_ids.numpy()
    begins = sequences.begins.tolist()
    groups = []
    number = -1
    last = None
    for begin, length, prompt in zip(
        begins, sequences.lengths.tolist(), sequences.prompt_lengths.tolist(), strict=True
    ):
        tokens = token_ids[begin : begin + prompt] if length > prompt else None
        if tokens is None or last is None or not np.array_equal(tokens, last):
            number += 1
        groups.append(number)
        last = tokens
    return torch.tensor(groups, dtype=torch.int64)


def united(
    units: Sequence[list[int]], shared: SharedPrompts, budget: int, least: int
) -> list[list[int]]:
    """Join neighbouring units whose rows share a prompt, as far as a micro-batch has room.

    `budget` is the most tokens of a joined unit. Groups are divided where there would be fewer than
    `least` units otherwise, as long as that is possible.
    """
    runs: list[list[list[int]]] = []
    for unit in units:
        previous = runs[-1][-1] if runs else []
        if len({shared.groups[row] for row in (*previous, *unit)}) == 1 and previous:
            runs[-1].append(unit)
        else:
            runs.append([unit])

    # How many pieces each becomes; the longest is divided further first.
    pieces = [1] * len(runs)
    for _ in range(min(least, len(units)) - len(runs)):
        sizes = [len(run) / count for run, count in zip(runs, pieces, strict=True)]
        pieces[sizes.index(max(sizes))] += 1

    joined: list[list[int]] = []
    for run, count in zip(runs, pieces, strict=True):
        for number in range(count):
            room = 0
            for unit in run[number * len(run) // count : (number + 1) * len(run) // count]:
                tokens = sum(shared.rests[row] for row in unit)
                if tokens <= room:
                    joined[-1] += unit
                    room -= tokens
                else:
                    joined.append(list(unit))
                    room = budget - shared.prompts[unit[0]] - tokens
    return joined
