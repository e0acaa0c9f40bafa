"""Decodes samples together: schedule, run, draw, record.

It does not know where weights come from, or what the samples are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrlhf.inference.base import EngineLimits, Request, Sample, SamplingParams
from mrlhf.inference.native.operators import StepInputs
from mrlhf.inference.native.runner import Runner
from mrlhf.inference.native.sampler import Sampler
from mrlhf.inference.native.scheduler import Counts, Scheduler, Step
from mrlhf.inference.native.sequences import Sequences
from mrlhf.inference.stopping import Decode
from mrlhf.parallel.masks import Paged


class Batch:
    """Rows that are decoded together; requests may be added between two steps.

    `decode` is needed for stop strings. `version` is the version of the runner's weights.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        sampling: SamplingParams,
        limits: EngineLimits,
        decode: Decode | None,
        version: int,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._sampling = sampling
        self._block_size = runner.cache.block_size
        self._scheduler = Scheduler(
            runner.manager, self._block_size, limits.max_num_seqs, limits.max_prefill_tokens
        )
        self._sequences = Sequences(sampling, decode, version)

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
        logits = self._runner.run(self._inputs(step))
        self._runner.cache.copy(step.copies)
        if not len(step.draws):
            return []

        ended = self._draw(logits, step)
        experts = self._experts_of(ended)
        self._scheduler.record(step.draws, ended)
        return [self._sequences.remove(row, experts.get(row)) for row in ended]

    def take_counts(self) -> Counts:
        """Return the counts since the last call."""
        return self._scheduler.take_counts()

    def drop_all(self) -> None:
        """Give the blocks of all rows back to the cache; the batch cannot be used afterwards."""
        self._scheduler.drop_all()

    def _inputs(self, step: Step) -> StepInputs:
        ends = np.cumsum(step.counts)
        query_starts = np.concatenate([[0], ends]).astype(np.int32)
        place = np.repeat(np.arange(len(step.rows)), step.counts)
        positions = np.arange(ends[-1]) - query_starts[place] + step.starts[place]
        rows = step.rows[place]

        lengths = step.starts + step.counts
        longest = int(lengths.max())
        used = -(-longest // self._block_size)
        block_tables = self._scheduler.block_tables[step.rows, :used]
        blocks = block_tables[place, positions // self._block_size].astype(np.int64)
        cache_places = blocks * self._block_size + positions % self._block_size

        send = self._runner.send
        return StepInputs(
            tokens=send(self._sequences.tokens_at(rows, positions)),
            positions=send(positions),
            cache_places=send(cache_places),
            mask=Paged(
                query_edges=send(query_starts),
                lengths=send(lengths.astype(np.int32)),
                block_tables=send(np.ascontiguousarray(block_tables)),
                most_queries=int(step.counts.max()),
                most_keys=longest,
            ),
            last=send(ends[step.complete] - 1),
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

    def _draw(self, logits: Tensor, step: Step) -> list[int]:
        """Draw and record the next token of each of `step.draws`; return the rows that ended."""
        if len(step.draws) > len(logits):
            logits = logits[self._runner.send(step.sources)]
        uniform = self._runner.send(self._sequences.uniforms(step.draws))
        tokens, logprobs = self._sampler.draw(
            logits, self._runner.vocab_start, uniform, self._sampling
        )
        # Both in one copy, because the host waits for each. They are exact in float64.
        if tokens.is_cuda:
            tokens, logprobs = torch.stack([tokens.double(), logprobs.double()]).cpu()
        return self._sequences.record(step.draws, tokens.long().numpy(), logprobs.float().numpy())
