"""The samples of one replica as bytes, for one exchange between the replicas, and back; and the
samples of all replicas together, as a checkpoint keeps them.

It knows neither prompts nor ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mrlhf.inference.base import EngineStats, Sample

_STATS = len(fields(EngineStats))
_COUNT = 1
_HEADER = 4  # row, tokens, stopped, version
_TABLES = ("rows", "lengths", "stopped", "versions", "tokens", "logprobs")


@dataclass(frozen=True)
class ReplicaSamples:
    """What one replica has drawn.

    Attributes:
        stats: what its engine did.
        rows: int64 [samples], the row of the batch that each sample is.
        lengths: int64 [samples], its number of tokens.
        stopped: int64 [samples], 1 if a stop token or stop string ended it.
        versions: int64 [samples], the version of the weights that drew it.
        tokens: int32 [tokens], sample after sample.
        logprobs: float32 [tokens].
    """

    stats: EngineStats
    rows: Tensor
    lengths: Tensor
    stopped: Tensor
    versions: Tensor
    tokens: Tensor
    logprobs: Tensor


def to_bytes(rows: Sequence[int], samples: Sequence[Sample], stats: EngineStats) -> Tensor:
    """A replica's statistics and samples as uint8 [bytes]; `rows` are the samples' rows."""
    header: list[int] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    for row, sample in zip(rows, samples, strict=True):
        header += (row, len(sample.token_ids), int(sample.stopped), sample.version)
        tokens += sample.token_ids
        logprobs += sample.logprobs

    parts = (
        torch.tensor([*astuple(stats), len(samples)], dtype=torch.int64),
        torch.tensor(header, dtype=torch.int64),
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(logprobs, dtype=torch.float32),
    )
    return torch.cat([part.view(torch.uint8) for part in parts])


def from_bytes(sent: Tensor) -> ReplicaSamples:
    """The inverse of `to_bytes`."""
    *stats, samples = sent[: 8 * (_STATS + _COUNT)].view(torch.int64).tolist()
    header_bytes = 8 * (_STATS + _COUNT + _HEADER * samples)
    header = sent[8 * (_STATS + _COUNT) : header_bytes].view(torch.int64)
    by_token = sent[header_bytes:]
    half = len(by_token) // 2

    rows, lengths, stopped, versions = header.view(samples, _HEADER).unbind(dim=1)
    return ReplicaSamples(
        stats=EngineStats(*stats),
        rows=rows,
        lengths=lengths,
        stopped=stopped,
        versions=versions,
        tokens=by_token[:half].view(torch.int32),
        logprobs=by_token[half:].view(torch.float32),
    )


@dataclass(frozen=True)
class DrawnSamples:
    """What all replicas have drawn of one batch; tables as in `ReplicaSamples`.

    Attributes:
        stats: what each replica's engine did.
    """

    stats: list[EngineStats]
    rows: Tensor
    lengths: Tensor
    stopped: Tensor
    versions: Tensor
    tokens: Tensor
    logprobs: Tensor

    @staticmethod
    def join(parts: Sequence[ReplicaSamples], earlier: DrawnSamples | None) -> DrawnSamples:
        """The samples of all replicas, after those that were drawn before an interruption."""
        stats = [part.stats for part in parts]
        if earlier is not None and len(earlier.stats) == len(stats):
            stats = [before + now for before, now in zip(earlier.stats, stats, strict=True)]

        sources: list[ReplicaSamples | DrawnSamples] = [] if earlier is None else [earlier]
        sources += parts
        tables = {}
        for name in _TABLES:
            tables[name] = torch.cat([vars(source)[name] for source in sources])
        return DrawnSamples(stats, **tables)

    def state_dict(self) -> dict[str, Any]:
        """The tables, and the statistics as numbers."""
        tables = {name: vars(self)[name] for name in _TABLES}
        return {"stats": [list(astuple(stats)) for stats in self.stats], **tables}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> DrawnSamples:
        """The inverse of `state_dict`."""
        tables = {name: state[name] for name in _TABLES}
        return DrawnSamples([EngineStats(*numbers) for numbers in state["stats"]], **tables)
