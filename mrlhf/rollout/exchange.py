"""Brings the samples of all replicas together in one table for all ranks of a machine.

It also says how a checkpoint keeps the samples. It knows neither prompts nor engines.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, astuple, dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.batch import Episode
from mrlhf.inference.base import EngineStats, MaskWords
from mrlhf.models.spec import Experts
from mrlhf.parallel.collectives import all_gather_objects, all_gather_ragged
from mrlhf.parallel.groups import EngineGroups
from mrlhf.parallel.machine import OpenTable
from mrlhf.records import Parts
from mrlhf.rollout.drawn_sample import DrawnSample, TokenRun

_STATS = len(fields(EngineStats))
_NO_RECORD = torch.zeros(0, 0, 0, dtype=torch.uint8)
_NO_MASKS = torch.zeros(0, dtype=torch.int32)
_Columns = TypeVar("_Columns", "SampleHeaders", "SampleRuns", Parts)


class SampleHeaders(NamedTuple):
    """Everything about some samples but their tokens; int64 [samples]."""

    rows: Tensor  # the row of each sample in the batch
    lengths: Tensor  # its number of tokens
    ended: Tensor  # 1 if nothing more is drawn of it
    stopped: Tensor  # 1 if a stop token or stop string ended it
    replicas: Tensor  # which replica drew it
    recorded: Tensor  # for how many tokens of prompt and response the experts are recorded
    mask_words: Tensor  # the words of its sampling masks

    @property
    def records(self) -> Parts:
        """The part of each sample if the records of experts are ordered by row."""
        return self._parts(self.recorded)

    @property
    def masks(self) -> Parts:
        """The part of each sample if the words of sampling masks are ordered by row."""
        return self._parts(self.mask_words)

    def _parts(self, counts: Tensor) -> Parts:
        order = self.rows.argsort()
        begins = torch.empty_like(counts)
        begins[order] = counts[order].cumsum(0) - counts[order]
        return Parts(begins, counts)

    @staticmethod
    def of(samples: Sequence[DrawnSample], replica: int = 0) -> SampleHeaders:
        """The headers of one replica's samples."""
        columns = (
            [sample.row for sample in samples],
            [len(sample.token_ids) for sample in samples],
            [sample.ended for sample in samples],
            [sample.stopped for sample in samples],
            [replica] * len(samples),
            [sample.recorded for sample in samples],
            [len(sample.masks.words) for sample in samples],
        )
        return SampleHeaders(*(torch.tensor(column, dtype=torch.int64) for column in columns))


class SampleRuns(NamedTuple):
    """The runs of some samples, those of a sample in their order; int64 [runs]."""

    rows: Tensor  # the row of each run's sample in the batch
    lengths: Tensor
    versions: Tensor

    @staticmethod
    def of(samples: Sequence[DrawnSample]) -> SampleRuns:
        """The runs of one replica's samples."""
        every = [(sample.row, *run) for sample in samples for run in sample.runs]
        return SampleRuns(*torch.tensor(every, dtype=torch.int64).view(-1, 3).unbind(dim=1))

    def of_tokens(self) -> Tensor:
        """The version of each token, int64 [tokens], row after row."""
        order = torch.sort(self.rows, stable=True).indices
        return self.versions[order].repeat_interleave(self.lengths[order])


@dataclass(frozen=True)
class DrawnSamples:
    """The samples of all replicas for one batch."""

    stats: list[EngineStats]  # the statistics of each replica's engine
    headers: SampleHeaders  # the samples that are there
    runs: SampleRuns  # who drew their tokens
    token_ids: Tensor  # int32 [batch, response_len], zero after the end
    logprobs: Tensor  # float32 [batch, response_len], zero after the end
    # uint8 or int16 [recorded tokens, mixtures, per_token], the experts of all tokens of one row,
    # then those of the next row
    experts: Tensor
    masks: Tensor  # int32 [words], the sampling masks of all tokens of one row, then of the next
    # int32 [batch, response_len], words of each token; no rows if no sample has masks
    mask_counts: Tensor
    # what happened in each row beside its tokens; empty without an environment
    episodes: dict[int, Episode]

    @staticmethod
    def none(replicas: int) -> DrawnSamples:
        """The empty table, before anything is drawn."""
        return DrawnSamples(
            [EngineStats()] * replicas,
            SampleHeaders.of([]),
            SampleRuns.of([]),
            torch.zeros(0, 1, dtype=torch.int32),
            torch.zeros(0, 1, dtype=torch.float32),
            _NO_RECORD,
            _NO_MASKS,
            _NO_MASKS[:, None],
            {},
        )

    def open_at(self, rows: Collection[int]) -> dict[int, DrawnSample]:
        """Copies of those of `rows` that have begun and not ended, to go on with."""
        columns = (column.tolist() for column in self.headers[:3])
        lengths = {
            row: length
            for row, length, ended in zip(*columns, strict=True)
            if row in rows and not ended
        }

        runs = self.runs_of(lengths)
        begins = self.headers.masks.begins.tolist()
        begin_of = dict(zip(self.headers.rows.tolist(), begins, strict=True))
        masks = {row: self._masks_of(row, begin_of[row], length) for row, length in lengths.items()}
        return {
            row: DrawnSample(
                row,
                array("i", self.token_ids[row, :length].tolist()),
                array("f", self.logprobs[row, :length].tolist()),
                runs[row],
                episode=deepcopy(self.episodes.get(row)),
                masks=masks[row],
            )
            for row, length in lengths.items()
        }

    def _masks_of(self, row: int, begin: int, length: int) -> MaskWords:
        """The masks of the first tokens of a row, whose words begin at `begin`."""
        if not len(self.masks):
            return MaskWords.none(length)
        counts = self.mask_counts[row, :length].tolist()
        return MaskWords(
            array("i", self.masks[begin : begin + sum(counts)].tolist()), array("i", counts)
        )

    def runs_of(self, rows: Iterable[int]) -> dict[int, list[TokenRun]]:
        """The runs of each of `rows`."""
        runs: dict[int, list[TokenRun]] = {row: [] for row in rows}
        for row, *run in zip(*(column.tolist() for column in self.runs), strict=True):
            if row in runs:
                runs[row].append(TokenRun(*run))
        return runs

    def without(self, rows: Tensor) -> DrawnSamples:
        """The other samples; none of `rows` has a record of experts."""
        stays = ~torch.isin(self.headers.rows, rows)
        headers = _chosen(self.headers, stays)
        order = self.headers.rows.argsort()
        masks = _chosen(self.headers.masks, order[stays[order]]).of(self.masks)
        runs = _chosen(self.runs, ~torch.isin(self.runs.rows, rows))
        gone = set(rows.tolist())
        episodes = {row: episode for row, episode in self.episodes.items() if row not in gone}
        return replace(self, headers=headers, runs=runs, masks=masks, episodes=episodes)

    def select(self, rows: Sequence[int]) -> DrawnSamples:
        """The samples of `rows`, all of which are there, as rows from 0 on; without statistics."""
        index = torch.tensor(rows, dtype=torch.int64)
        number = torch.full((len(self.token_ids),), -1)
        number[index] = torch.arange(len(rows))

        place = torch.empty_like(number)
        place[self.headers.rows] = torch.arange(len(self.headers.rows))
        headers = _chosen(self.headers, place[index])
        width = max([1, *headers.lengths.tolist()])
        runs = _chosen(self.runs, number[self.runs.rows] >= 0)
        return DrawnSamples(
            [EngineStats()] * len(self.stats),
            headers._replace(rows=torch.arange(len(rows))),
            runs._replace(rows=number[runs.rows]),
            self.token_ids[index, :width],
            self.logprobs[index, :width],
            _chosen(self.headers.records, place[index]).of(self.experts),
            _chosen(self.headers.masks, place[index]).of(self.masks),
            self.mask_counts[index, :width] if len(self.masks) else _NO_MASKS[:, None],
            {new: self.episodes[row] for new, row in enumerate(rows) if row in self.episodes},
        )

    def state_dict(self) -> dict[str, Any]:
        """The samples one after the other, without padding, and the statistics as numbers."""
        headers = self.headers
        is_there = torch.arange(self.token_ids.shape[1]) < headers.lengths[:, None]
        return {
            "stats": [list(astuple(stats)) for stats in self.stats],
            **headers._asdict(),
            "runs": self.runs._asdict(),
            "tokens": self.token_ids[headers.rows][is_there],
            "logprobs": self.logprobs[headers.rows][is_there],
            "experts": self.experts,
            "masks": self.masks,
            "mask_counts": self.mask_counts[headers.rows][is_there]
            if len(self.masks)
            else _NO_MASKS,
            "episodes": {str(row): asdict(episode) for row, episode in self.episodes.items()},
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> DrawnSamples:
        """The inverse of `state_dict`."""
        # mrlhf 0.8 kept no masks.
        without = {"mask_words": torch.zeros_like(state["rows"]), "masks": _NO_MASKS}
        state = {**without, "mask_counts": _NO_MASKS, **state}
        headers = SampleHeaders(*(state[name] for name in SampleHeaders._fields))
        if not len(headers.rows):
            return DrawnSamples.none(len(state["stats"]))

        shape = (int(headers.rows.max()) + 1, max(1, int(headers.lengths.max())))
        is_there = torch.arange(shape[1]) < headers.lengths[:, None]

        def spread(numbers: Tensor) -> Tensor:
            of_samples = numbers.new_zeros(is_there.shape)
            of_samples[is_there] = numbers
            table = numbers.new_zeros(shape)
            table[headers.rows] = of_samples
            return table

        stats = [EngineStats(*numbers) for numbers in state["stats"]]
        runs = SampleRuns(**state["runs"])
        episodes = {int(row): Episode(**facts) for row, facts in state["episodes"].items()}
        masks = state["masks"]
        return DrawnSamples(
            stats,
            headers,
            runs,
            spread(state["tokens"]),
            spread(state["logprobs"]),
            state["experts"],
            masks,
            spread(state["mask_counts"]) if len(masks) else _NO_MASKS[:, None],
            episodes,
        )


def exchange_samples(
    groups: EngineGroups,
    batch: int,
    drawn: Sequence[DrawnSample],
    stats: EngineStats,
    earlier: DrawnSamples | None,
    experts: Experts | None = None,
    has_episodes: bool = False,
) -> DrawnSamples:
    """The samples of all replicas, on every rank; every rank calls it.

    Each replica writes its samples into tables that its machine shares. Only a few numbers a sample
    are gathered on every rank, and the episodes if there are any.

    `batch` counts all rows, also those that have not been drawn. `drawn` are the samples of this
    rank's replica, the same on all of its ranks but for the recorded experts, and `stats` the work
    of its engine; `earlier` are the samples drawn before, the same on every rank. One that had not
    ended may be in `drawn`, and further on.
    With `experts`, the mixtures of the model, the recorded experts are exchanged too.
    """
    counts = torch.tensor([*astuple(stats), len(drawn)], dtype=torch.int64)
    headers_here = SampleHeaders.of(drawn, groups.replica)
    mine = torch.cat([counts, *headers_here, *SampleRuns.of(drawn)])
    every_stats = []
    parts = []
    parts_of_runs = []
    for numbers in all_gather_ragged(mine, groups.replicas):
        *counted, samples = numbers[: _STATS + 1].tolist()
        end = _STATS + 1 + samples * len(SampleHeaders._fields)
        every_stats.append(EngineStats(*counted))
        columns = numbers[_STATS + 1 : end].view(len(SampleHeaders._fields), samples)
        parts.append(SampleHeaders(*columns))
        parts_of_runs.append(SampleRuns(*numbers[end:].view(len(SampleRuns._fields), -1)))

    if earlier is None:
        earlier = DrawnSamples.none(len(every_stats))
    if len(earlier.stats) == len(every_stats):
        pairs = zip(earlier.stats, every_stats, strict=True)
        every_stats = [before + now for before, now in pairs]
    earlier = earlier.without(torch.cat([part.rows for part in parts]))
    headers = _joined([earlier.headers, *parts])
    runs = _joined([earlier.runs, *parts_of_runs])
    episodes = earlier.episodes
    if has_episodes:
        of_replica = {sample.row: sample.episode for sample in drawn if sample.episode is not None}
        for others in all_gather_objects(of_replica, groups.replicas):
            episodes = episodes | others

    shape = (batch, max([1, *headers.lengths.tolist()]))
    token_ids = groups.machine.table(shape, torch.int32)
    logprobs = groups.machine.table(shape, torch.float32)
    if dist.get_rank() == 0:
        for table, before in ((token_ids, earlier.token_ids), (logprobs, earlier.logprobs)):
            known = earlier.headers.rows
            table.entries[known, : before.shape[1]] = before[known]
    if groups.tp_rank == 0:
        _write(token_ids, {sample.row: sample.token_ids for sample in drawn})
        _write(logprobs, {sample.row: sample.logprobs for sample in drawn})

    record = _NO_RECORD
    if experts is not None:
        empty = torch.zeros(0, experts.mixtures, experts.per_token, dtype=experts.record_dtype)
        before = earlier.experts if len(earlier.experts) else empty
        recorded = {sample.row: sample.experts for sample in drawn if sample.recorded}
        of_earlier = earlier.headers, before
        record = _exchange_flat(groups, headers, recorded, *of_earlier, attrgetter("records"))

    masks = _exchange_masks(groups, batch, drawn, headers, earlier)
    tables = token_ids.complete(), logprobs.complete()
    return DrawnSamples(every_stats, headers, runs, *tables, record, *masks, episodes)


def _exchange_masks(
    groups: EngineGroups,
    batch: int,
    drawn: Sequence[DrawnSample],
    headers: SampleHeaders,
    earlier: DrawnSamples,
) -> tuple[Tensor, Tensor]:
    """`masks` and `mask_counts` of all samples, which `headers` describes."""
    if not headers.mask_words.any():
        return _NO_MASKS, _NO_MASKS[:, None]
    words = {sample.row: sample.masks.words for sample in drawn}
    known = earlier.headers
    masks = _exchange_flat(groups, headers, words, known, earlier.masks, attrgetter("masks"))

    counts = groups.machine.table((batch, int(headers.lengths.max())), torch.int32)
    if dist.get_rank() == 0 and len(earlier.masks):
        before = earlier.mask_counts[known.rows]
        counts.entries[known.rows, : before.shape[1]] = before
    if groups.tp_rank == 0:
        _write(counts, {sample.row: sample.masks.counts for sample in drawn})
    return masks, counts.complete()


def _exchange_flat(
    groups: EngineGroups,
    headers: SampleHeaders,
    drawn: Mapping[int, Any],
    known: SampleHeaders,
    before: Tensor,
    parts_of: Callable[[SampleHeaders], Parts],
) -> Tensor:
    """The numbers of all samples, which `headers` describes, one row after the other.

    `drawn` has those of rows of this replica, and `before` those of the `known` samples.
    """
    parts = parts_of(headers)
    table = groups.machine.table((int(parts.counts.sum()), *before.shape[1:]), before.dtype)
    if dist.get_rank() == 0 and len(before):
        held = parts_of(known)
        wanted = Parts(parts.begins[: len(known.rows)], held.counts)
        table.entries[wanted.places] = held.of(before)
    if groups.tp_rank == 0:
        begin_of = dict(zip(headers.rows.tolist(), parts.begins.tolist(), strict=True))
        numbers = table.entries.numpy()
        for row, content in drawn.items():
            begin = begin_of[row]
            numbers[begin : begin + len(content)] = content
    return table.complete()


def _chosen(columns: _Columns, which: Tensor) -> _Columns:
    """Some of the entries, by place or by mask."""
    return type(columns)(*(column[which] for column in columns))


def _joined(parts: Sequence[_Columns]) -> _Columns:
    """The entries of all parts, one part after the other."""
    return type(parts[0])(*map(torch.cat, zip(*parts, strict=True)))


def _write(table: OpenTable, contents: Mapping[int, Any]) -> None:
    """Write the contents of each row to its beginning in the table, without a copy."""
    numbers = table.entries.numpy()
    for row, content in contents.items():
        numbers[row, : len(content)] = np.asarray(content)
