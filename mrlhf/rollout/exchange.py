"""Brings the samples of all replicas together in one table for all ranks of a machine.

It also says how a checkpoint keeps the samples. It knows neither prompts nor engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.batch import Parts
from mrlhf.inference.base import EngineStats, Sample
from mrlhf.models.spec import Experts
from mrlhf.parallel.collectives import all_gather_ragged
from mrlhf.parallel.groups import EngineGroups
from mrlhf.parallel.machine import OpenTable

_STATS = len(fields(EngineStats))
_NO_RECORD = torch.zeros(0, 0, 0, dtype=torch.uint8)


@dataclass(frozen=True)
class ReplicaSamples:
    """The samples of one replica; all of its ranks have the same but for the recorded experts."""

    rows: list[int]  # the row of each sample in the batch
    samples: list[Sample]
    # for how many tokens of each sample, prompt included, the experts are recorded
    recorded: list[int]
    stats: EngineStats


class SampleHeaders(NamedTuple):
    """Everything about some samples but their tokens; int64 [samples]."""

    rows: Tensor  # the row of each sample in the batch
    lengths: Tensor  # its number of tokens
    stopped: Tensor  # 1 if a stop token or stop string ended it
    versions: Tensor  # the version of the weights that drew it
    recorded: Tensor  # for how many tokens of prompt and response the experts are recorded

    @property
    def record_begins(self) -> Tensor:
        """Where the record of each sample begins if the records are ordered by row."""
        order = self.rows.argsort()
        counts = self.recorded[order]
        begins = torch.empty_like(counts)
        begins[order] = counts.cumsum(0) - counts
        return begins

    @staticmethod
    def of(drawn: ReplicaSamples) -> SampleHeaders:
        """The headers of one replica's samples."""
        samples = drawn.samples
        columns = (
            drawn.rows,
            [len(sample.arrays[0]) for sample in samples],
            [sample.stopped for sample in samples],
            [sample.version for sample in samples],
            drawn.recorded,
        )
        return SampleHeaders(*(torch.tensor(column, dtype=torch.int64) for column in columns))

    @staticmethod
    def join(parts: Sequence[SampleHeaders]) -> SampleHeaders:
        """The headers of all parts, one part after the other."""
        return SampleHeaders(*map(torch.cat, zip(*parts, strict=True)))


@dataclass(frozen=True)
class DrawnSamples:
    """The samples of all replicas for one batch."""

    stats: list[EngineStats]  # the statistics of each replica's engine
    headers: SampleHeaders  # the samples that are there
    token_ids: Tensor  # int32 [batch, response_len], zero after the end
    logprobs: Tensor  # float32 [batch, response_len], zero after the end
    # uint8 or int16 [recorded tokens, mixtures, per_token], the experts of all tokens of one row,
    # then those of the next row
    experts: Tensor

    @staticmethod
    def none(replicas: int) -> DrawnSamples:
        """The empty table, before anything is drawn."""
        return DrawnSamples(
            [EngineStats()] * replicas,
            SampleHeaders.of(ReplicaSamples([], [], [], EngineStats())),
            torch.zeros(0, 1, dtype=torch.int32),
            torch.zeros(0, 1, dtype=torch.float32),
            _NO_RECORD,
        )

    def state_dict(self) -> dict[str, Any]:
        """The samples one after the other, without padding, and the statistics as numbers."""
        headers = self.headers
        is_there = torch.arange(self.token_ids.shape[1]) < headers.lengths[:, None]
        return {
            "stats": [list(astuple(stats)) for stats in self.stats],
            **headers._asdict(),
            "tokens": self.token_ids[headers.rows][is_there],
            "logprobs": self.logprobs[headers.rows][is_there],
            "experts": self.experts,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> DrawnSamples:
        """The inverse of `state_dict`."""
        headers = SampleHeaders(*(state[name] for name in SampleHeaders._fields))
        if not len(headers.rows):
            return DrawnSamples.none(len(state["stats"]))

        shape = (int(headers.rows.max()) + 1, max(1, int(headers.lengths.max())))
        is_there = torch.arange(shape[1]) < headers.lengths[:, None]
        tables = []
        for name, dtype in (("tokens", torch.int32), ("logprobs", torch.float32)):
            of_samples = torch.zeros(is_there.shape, dtype=dtype)
            of_samples[is_there] = state[name]
            table = torch.zeros(shape, dtype=dtype)
            table[headers.rows] = of_samples
            tables.append(table)
        stats = [EngineStats(*numbers) for numbers in state["stats"]]
        tables.append(state["experts"])
        return DrawnSamples(stats, headers, *tables)


def exchange_samples(
    groups: EngineGroups,
    batch: int,
    drawn: ReplicaSamples,
    earlier: DrawnSamples | None,
    experts: Experts | None = None,
) -> DrawnSamples:
    """The samples of all replicas, on every rank; every rank calls it.

    Each replica writes its samples into tables that its machine shares. Only a few numbers a sample
    are gathered on every rank.

    `batch` counts all rows, also those that have not been drawn. `drawn` are the samples of this
    rank's replica; `earlier` those drawn before an interruption, the same on every rank. With
    `experts`, the mixtures of the model, the recorded experts are exchanged too.
    """
    counts = torch.tensor(astuple(drawn.stats), dtype=torch.int64)
    mine = torch.cat([counts, *SampleHeaders.of(drawn)])
    gathered = all_gather_ragged(mine, groups.replicas)
    every_stats = [EngineStats(*numbers[:_STATS].tolist()) for numbers in gathered]
    columns = len(SampleHeaders._fields)
    parts = [SampleHeaders(*numbers[_STATS:].view(columns, -1)) for numbers in gathered]

    if earlier is None:
        earlier = DrawnSamples.none(len(gathered))
    if len(earlier.stats) == len(every_stats):
        pairs = zip(earlier.stats, every_stats, strict=True)
        every_stats = [before + now for before, now in pairs]
    headers = SampleHeaders.join([earlier.headers, *parts])

    shape = (batch, max([1, *headers.lengths.tolist()]))
    token_ids = groups.machine.table(shape, torch.int32)
    logprobs = groups.machine.table(shape, torch.float32)
    if dist.get_rank() == 0:
        for table, before in ((token_ids, earlier.token_ids), (logprobs, earlier.logprobs)):
            known = earlier.headers.rows
            table.entries[known, : before.shape[1]] = before[known]
    if groups.tp_rank == 0:
        _write(token_ids, drawn.rows, [sample.arrays[0] for sample in drawn.samples])
        _write(logprobs, drawn.rows, [sample.arrays[1] for sample in drawn.samples])
    record = _NO_RECORD
    if experts is not None:
        record = _exchange_experts(groups, drawn, headers, earlier, experts)
    return DrawnSamples(every_stats, headers, token_ids.complete(), logprobs.complete(), record)


def _exchange_experts(
    groups: EngineGroups,
    drawn: ReplicaSamples,
    headers: SampleHeaders,
    earlier: DrawnSamples,
    experts: Experts,
) -> Tensor:
    """The experts of all samples, one row after the other; arguments as for `exchange_samples`.

    `headers` describes all samples, the earlier ones first.
    """
    shape = (int(headers.recorded.sum()), experts.mixtures, experts.per_token)
    table = groups.machine.table(shape, experts.record_dtype)
    begins = headers.record_begins

    known = earlier.headers
    if dist.get_rank() == 0 and len(earlier.experts):
        held = Parts(known.record_begins, known.recorded)
        wanted = Parts(begins[: len(known.rows)], known.recorded)
        table.entries[wanted.places] = held.of(earlier.experts)
    if groups.tp_rank == 0:
        begin_of = dict(zip(headers.rows.tolist(), begins.tolist(), strict=True))
        numbers = table.entries.numpy()
        for row, sample, count in zip(drawn.rows, drawn.samples, drawn.recorded, strict=True):
            if count:
                assert sample.experts is not None and len(sample.experts) == count
                numbers[begin_of[row] : begin_of[row] + count] = sample.experts
    return table.complete()


def _write(table: OpenTable, rows: Sequence[int], contents: Sequence[Any]) -> None:
    """Write each row of `contents` to the beginning of its row of the table, without a copy."""
    numbers = table.entries.numpy()
    for row, content in zip(rows, contents, strict=True):
        numbers[row, : len(content)] = np.asarray(content)
