"""Saves a checkpoint in a thread while a decode step is captured, on the simulated device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mrlhf.checkpoint.model_slices import RankSlices
from mrlhf.checkpoint.rank_files import RankPart, RankWriter, Staging, model_file
from mrlhf.checkpoint.tensor_file import TensorFile, TensorSource
from mrlhf.inference.native.graphs import DecodeGraphs
from mrlhf.inference.native.operators import StepInputs
from mrlhf.parallel.masks import Paged
from tests.simulated_device.counts import Counts
from tests.simulated_device.state import DEVICE

SIZE = 1000


class Saved(NamedTuple):
    """What was written, and how."""

    part: RankPart
    is_whole: bool  # whether the file holds the weights
    counts: Counts  # of the copies


def save_while_capturing() -> list[Saved]:
    """Save twice with one staging memory, each time within the capture of a graph."""
    staging = Staging()
    return [_save(staging, float(number)) for number in range(2)]


def _save(staging: Staging, first: float) -> Saved:
    weights = torch.arange(SIZE, device=DEVICE.device, dtype=torch.float32) + first
    slices = RankSlices((), 1, [], [TensorSource.of("weights", weights)])
    with tempfile.TemporaryDirectory() as folder:
        writer = RankWriter(Path(folder), 0)

        def forward(inputs: StepInputs) -> Tensor:
            if DEVICE.capturing is not None:
                staging.follow(DEVICE.device)
                writer.begin({"actor": slices}, list, staging)
                writer.wait_until_copied()
            return inputs.tokens * 2

        with DEVICE.counted() as counts:
            DecodeGraphs(forward, 1, table_width=1, spare_block=0, block_size=1).run(_inputs())
            part = writer.result()
        assert part.error is None, part.error
        read = TensorFile(Path(folder) / model_file("actor", 0)).read_rows("weights", 0, SIZE)
    return Saved(part, torch.equal(read, weights.cpu()), counts)


def _inputs() -> StepInputs:
    def of(*numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=DEVICE.device)

    mask = Paged(
        query_edges=of(0, 1, dtype=torch.int32),
        lengths=of(1, dtype=torch.int32),
        block_tables=of(0, dtype=torch.int32)[None],
        most_queries=1,
        most_keys=1,
    )
    return StepInputs(of(1), of(0), of(0), mask, of(0))
