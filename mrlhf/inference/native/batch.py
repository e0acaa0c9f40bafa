"""Decodes samples together: schedule, run, draw, record.

It does not know where weights come from, or what the samples are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrlhf.device import fetch
from mrlhf.inference.base import EngineLimits, Request, Sample, SamplingParams
from mrlhf.inference.native.inputs import PassArrays
from mrlhf.inference.native.runner import Runner
from mrlhf.inference.native.scheduler import Counts, Scheduler, Step
from mrlhf.inference.native.sequences import DrawnSequences
from mrlhf.inference.stopping import Decode


class Batch:
    """Rows that are decoded together; requests may be added between two steps.

    `decode` is needed for stop strings. `version` is the version of the runner's weights.
    """

    def __init__(
        self,
        runner: Runner,
        sampling: SamplingParams,
        limits: EngineLimits,
        decode: Decode | None,
        version: int,
    ) -> None:
        self._runner = runner
        self._sampling = sampling
        self._block_size = runner.cache.block_size
        # A pass that starts rows is no captured graph.
        together = max(1, limits.max_num_seqs // 16) if runner.captures else 1
        sizes = (self._block_size, limits.max_num_seqs, limits.max_prefill_tokens, together)
        self._scheduler = Scheduler(runner.manager, *sizes)
        self._sequences = DrawnSequences(sampling, decode, version)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the samples of `requests`."""
        self._scheduler.add(
            [request.prompt for request in requests],
            self._sequences.add(requests),
            [request.sampling.max_tokens for request in requests],
        )

    def step(self) -> list[Sample]:
        """Run one pass, and return the samples that it ends; without a row, do nothing."""
        if self._scheduler.done:
            return []
        step = self._scheduler.schedule()
        drawn = self._runner.run(self._inputs(step), self._sampling)
        self._runner.cache.copy(step.copies)
        if drawn is None:
            return []

        tokens, logprobs = fetch(*drawn)
        ended = self._sequences.record(step.draws, tokens.numpy(), logprobs.numpy())
        experts = self._experts_of(ended)
        self._share(ended)
        self._scheduler.record(step.draws, ended)
        return [self._sequences.remove(row, experts.get(row)) for row in ended]

    def take_counts(self) -> Counts:
        """Return the counts since the last call."""
        return self._scheduler.take_counts()

    def drawn_so_far(self) -> list[list[int]]:
        """The tokens of each sample that has not ended."""
        return list(self._sequences.drawn_so_far().values())

    def drop_all(self) -> None:
        """Give the blocks of all rows back to the cache; the batch cannot be used afterwards."""
        self._share(self._sequences.drawn_so_far())
        self._scheduler.drop_all()

    def _share(self, rows: Iterable[int]) -> None:
        """Let later prompts share what has been computed of the rows that they may begin with."""
        for row in filter(self._sequences.goes_on, rows):
            self._scheduler.share_response(row, self._sequences.tokens_of(row))

    def _inputs(self, step: Step) -> PassArrays:
        ends = np.cumsum(step.counts)
        query_edges = np.concatenate([[0], ends]).astype(np.int32)
        place = np.repeat(np.arange(len(step.rows)), step.counts)
        positions = np.arange(ends[-1]) - query_edges[place] + step.starts[place]
        rows = step.rows[place]

        lengths = step.starts + step.counts
        used = -(-int(lengths.max()) // self._block_size)
        block_tables = self._scheduler.block_tables[step.rows, :used]
        blocks = block_tables[place, positions // self._block_size].astype(np.int64)

        return PassArrays(
            tokens=self._sequences.tokens_at(rows, positions),
            positions=positions,
            cache_places=blocks * self._block_size + positions % self._block_size,
            last=ends[step.complete] - 1,
            sources=step.sources,
            uniform=self._sequences.uniforms(step.draws),
            query_edges=query_edges,
            lengths=lengths.astype(np.int32),
            block_tables=np.ascontiguousarray(block_tables),
        )

    def _experts_of(self, rows: Sequence[int]) -> dict[int, NDArray[Any]]:
        """Return the experts of all computed tokens of the `rows` that ask for them.

        The rows must still have their blocks.
        """
        record = self._runner.cache.experts
        wanted = [row for row in rows if self._sequences.wants_experts(row)]
        if record is None or not wanted:
            return {}

        size = self._block_size
        places = []
        for row in wanted:
            positions = np.arange(self._scheduler.lengths[row])
            blocks = self._scheduler.block_tables[row, positions // size].astype(np.int64)
            places.append(blocks * size + positions % size)
        experts = record[self._runner.send(np.concatenate(places))].cpu().numpy()
        ends = np.cumsum([len(some) for some in places])
        return dict(zip(wanted, np.split(experts, ends[:-1]), strict=True))
