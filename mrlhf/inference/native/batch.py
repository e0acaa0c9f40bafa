"""Decodes samples together: schedule, run, draw, record.

Where steps are captured, the next one is launched before this one's tokens are read: they are taken
from where the device drew them. A row that has ended by then draws one token that is dropped. This
file does not know where weights come from, or what the samples are for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrlhf.device import Fetch
from mrlhf.inference.base import EngineLimits, Request, Sample, SamplingParams
from mrlhf.inference.native.inputs import PassArrays
from mrlhf.inference.native.runner import Runner
from mrlhf.inference.native.scheduler import Counts, Ints, Scheduler, Step
from mrlhf.inference.native.sequences import DrawnSequences
from mrlhf.inference.stopping import Decode


@dataclass
class _Pass:
    """A pass that was not read yet."""

    draws: Ints  # the rows that get their next token
    gone: set[int] = field(default_factory=set)  # those that ended after it was scheduled
    drawn: Fetch | None = None  # what it draws; None if it draws none

    @property
    def kept(self) -> Ints:
        """The places of the draws that count."""
        if not self.gone:
            return np.arange(len(self.draws))
        return np.flatnonzero([row not in self.gone for row in self.draws.tolist()])


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
        self._scheduler = Scheduler(runner.manager, runner.slots, *sizes)
        self._sequences = DrawnSequences(sampling, decode, version)
        self._unread: _Pass | None = None

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the samples of `requests`."""
        self._scheduler.add(
            [request.prompt for request in requests],
            self._sequences.add(requests),
            [request.sampling.max_tokens for request in requests],
        )

    def step(self) -> list[Sample]:
        """Launch one pass, and return samples that passes have ended; without a row, do nothing."""
        if self._scheduler.done:
            return []
        step = self._scheduler.schedule()
        following = _Pass(step.draws)
        # Blocks whose experts are still to be read must not be handed on.
        overlaps = self._runner.captures and not self._sequences.recorded
        captured = self._runner.captures and step.decodes
        samples = [] if captured and overlaps else self._read(following.gone)

        origins = self._origins(step.rows) if captured else None
        drawn = self._runner.run(self._inputs(step), origins, self._sampling)
        self._runner.cache.copy(step.copies)
        self._runner.cache.copy_states(step.state_copies)
        following.drawn = None if drawn is None else Fetch(*drawn)

        samples += self._read(following.gone)
        self._unread = following
        return samples if overlaps else samples + self._read(set())

    def take_counts(self) -> Counts:
        """Return the counts since the last call."""
        return self._scheduler.take_counts()

    def drawn_so_far(self) -> list[list[int]]:
        """The tokens of each sample that has not ended."""
        return list(self._sequences.drawn_so_far().values())

    def drop_all(self) -> list[Sample]:
        """Give the blocks of all rows back to the cache; the batch cannot be used afterwards.

        Returns:
            The samples that the last pass has ended.
        """
        samples = self._read(set())
        self._share(self._sequences.drawn_so_far())
        self._scheduler.drop_all()
        return samples

    def _read(self, gone: set[int]) -> list[Sample]:
        """Record what the last pass drew, and return the samples that it ends; none if it is read.

        The rows that it ends are added to `gone`.
        """
        last = self._unread
        self._unread = None
        if last is None or last.drawn is None:
            return []
        kept = last.kept
        drawn = (tensor.numpy()[kept] for tensor in last.drawn.wait())

        ended = self._sequences.record(last.draws[kept], *drawn)
        experts = self._experts_of(ended)
        self._share(ended)
        self._scheduler.end(ended)
        gone.update(ended)
        return [self._sequences.remove(row, experts.get(row)) for row in ended]

    def _origins(self, rows: Ints) -> Ints:
        """The places of the newest tokens of `rows` among those drawn last; -1 if they are read."""
        places = np.full(len(self._scheduler.lengths), -1)
        if self._unread is not None:
            kept = self._unread.kept
            places[self._unread.draws[kept]] = kept
        return places[rows]

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
            uniform=self._sequences.uniforms(step.draws, self._scheduler.lengths[step.draws] - 1),
            query_edges=query_edges,
            lengths=lengths.astype(np.int32),
            block_tables=np.ascontiguousarray(block_tables),
            slots=self._scheduler.slots[step.rows],
        )

    def _experts_of(self, rows: Sequence[int]) -> dict[int, NDArray[Any]]:
        """Return the experts of all computed tokens of the `rows` that ask for them.

        The rows must still have their blocks.
        """
        record = self._runner.cache.experts
        wanted = [row for row in rows if row in self._sequences.recorded]
        if record is None or not wanted:
            return {}

        size = self._block_size
        places = []
        for row in wanted:
            positions = np.arange(self._scheduler.lengths[row] - 1)  # but that of the newest token
            blocks = self._scheduler.block_tables[row, positions // size].astype(np.int64)
            places.append(blocks * size + positions % size)
        experts = record[self._runner.send(np.concatenate(places))].cpu().numpy()
        ends = np.cumsum([len(some) for some in places])
        return dict(zip(wanted, np.split(experts, ends[:-1]), strict=True))
