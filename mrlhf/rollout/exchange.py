"""The samples of one replica as bytes, for one exchange between the replicas, and back.

It knows neither prompts nor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from mrlhf.inference.base import EngineStats, Sample

_STATS = len(fields(EngineStats))
_HEADER = 4  # row, tokens, stopped, version


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
        torch.tensor(astuple(stats), dtype=torch.int64),
        torch.tensor(header, dtype=torch.int64),
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(logprobs, dtype=torch.float32),
    )
    return torch.cat([part.view(torch.uint8) for part in parts])


def from_bytes(sent: Tensor, samples: int) -> ReplicaSamples:
    """The inverse of `to_bytes`, for a known number of samples."""
    header_bytes = 8 * (_STATS + _HEADER * samples)
    numbers = sent[:header_bytes].view(torch.int64)
    by_token = sent[header_bytes:]
    half = len(by_token) // 2

    rows, lengths, stopped, versions = numbers[_STATS:].view(samples, _HEADER).unbind(dim=1)
    return ReplicaSamples(
        stats=EngineStats(*numbers[:_STATS].tolist()),
        rows=rows,
        lengths=lengths,
        stopped=stopped,
        versions=versions,
        tokens=by_token[:half].view(torch.int32),
        logprobs=by_token[half:].view(torch.float32),
    )
