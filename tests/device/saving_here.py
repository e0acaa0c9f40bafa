"""Saves a checkpoint in a thread while a decode step is captured, on the simulated device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mrlhf.checkpoint.model_slices import RankSlices
from mrlhf.checkpoint.rank_files import RankPart, RankWriter, Staging, model_file
from mrlhf.checkpoint.tensor_file import TensorFile, TensorSource
from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.native.graphs import DecodeGraphs, Drawn
from mrlhf.inference.native.inputs import Pass, PassArrays
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

        def draw(step: Pass) -> Drawn:
            if DEVICE.capturing is not None:
                staging.follow(DEVICE.device)
                writer.begin({"actor": slices}, list, staging)
                writer.wait_until_copied()
            inputs, _, uniform = step
            return inputs.tokens * 2, uniform

        limits = EngineLimits(max_num_seqs=1, max_length=1, max_prefill_tokens=1)
        graphs = DecodeGraphs(limits, 1, DEVICE.device)
        with DEVICE.counted() as counts:
            sampling = SamplingParams(temperature=1.0, max_tokens=1, seed=1)
            graphs.run(_arrays(), np.array([-1]), sampling, draw)
            part = writer.result()
        assert part.error is None, part.error
        read = TensorFile(Path(folder) / model_file("actor", 0)).read_rows("weights", 0, SIZE)
    return Saved(part, torch.equal(read, weights.cpu()), counts)


def _arrays() -> PassArrays:
    """The inputs of a step of one sequence."""
    zero = np.zeros(1, dtype=np.int64)
    return PassArrays(
        tokens=zero + 1,
        positions=zero,
        cache_places=zero,
        last=zero,
        sources=zero,
        uniform=np.full(1, 0.5),
        query_edges=np.array([0, 1], dtype=np.int32),
        lengths=np.ones(1, dtype=np.int32),
        block_tables=np.zeros((1, 1), dtype=np.int32),
    )
