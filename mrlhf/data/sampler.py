"""Chooses the rows of each batch, in an endless seeded order that a checkpoint can resume.

It works on row numbers only. It does not know what the rows are, and it does not know ranks: every
rank draws the same batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from mrlhf.errors import DataError


class StatefulSampler:
    """Yields lists of row indices without end, epoch after epoch.

    The order of epoch e depends only on (num_rows, seed, e). If the last batch of an epoch would be
    short, it is dropped.
    """

    def __init__(self, num_rows: int, batch_size: int, *, seed: int, shuffle: bool = True) -> None:
        if not 1 <= batch_size <= num_rows:
            raise DataError(
                f"a batch of {batch_size} cannot be drawn from {num_rows} rows; "
                f"use a batch size of 1..{num_rows}"
            )

        self._num_rows = num_rows
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self.epoch = 0
        self.position = 0  # rows of the current epoch already drawn
        self._order = self._epoch_order()

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if self.position + self._batch_size > self._num_rows:
            self.epoch += 1
            self.position = 0
            self._order = self._epoch_order()

        batch = self._order[self.position : self.position + self._batch_size]
        self.position += self._batch_size
        return batch

    def state_dict(self) -> dict[str, int]:
        """The state that `load_state_dict` needs to continue from here."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_rows": self._num_rows,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from `state`; the batch size may differ, the rows may not."""
        own = self.state_dict()
        for key in ("num_rows", "seed", "shuffle"):
            if state[key] != own[key]:
                raise DataError(
                    f"cannot resume the data order: {key} was {state[key]} in the checkpoint and "
                    f"is {own[key]} now; restore it, or start a new run"
                )

        self.epoch = state["epoch"]
        self.position = state["position"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        order = list(range(self._num_rows))
        if self._shuffle:
            random.Random(f"{self._seed}:{self.epoch}").shuffle(order)
        return order
