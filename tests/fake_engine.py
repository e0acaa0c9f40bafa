"""An inference engine without a model: each response is a function of (seed, uid, sample index,
position).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from torch import Tensor

from mrlhf.inference.base import EngineStats, Sample, SamplingParams
from mrlhf.reshard.execute import ReshardStats
from mrlhf.weights.shard import Piece, Slot


def draw(*key: int) -> int:
    """A number that depends on the key alone."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "little")


def response(seed: int, uid: int, sample: int, max_tokens: int) -> list[int]:
    """From 1 to `max_tokens` tokens."""
    return [
        draw(seed, uid, sample, position) % 10**6
        for position in range(1 + draw(seed, uid, sample) % max_tokens)
    ]


class FakeEngine:
    """Keeps a list of the calls it got."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: list[tuple[int, range]] = []
        self._version = -1
        self._stats: EngineStats | None = None

    @property
    def version(self) -> int:
        return self._version

    def parameter_pieces(self) -> dict[str, tuple[Piece, ...]]:
        return {}

    def weight_slots(self) -> list[Slot]:
        return []

    def bind(self, parameter: str, tensor: Tensor) -> None:
        raise AssertionError("there are no parameters")

    def commit(self, version: int) -> None:
        self.calls.append("commit")
        self._version = version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        uids: Sequence[int],
        sampling: SamplingParams,
        samples: Sequence[range] | None = None,
    ) -> list[Sample]:
        self.calls.append("generate")
        ranges = [range(sampling.n)] * len(prompts) if samples is None else samples
        self.asked = list(zip(uids, ranges, strict=True))
        found = []
        for index, (uid, wanted) in enumerate(self.asked):
            for sample in wanted:
                tokens = response(sampling.seed, uid, sample, sampling.max_tokens)
                # Numbers that float32 holds exactly.
                logprobs = [-(token % 1024) / 1024 for token in tokens]
                found.append(
                    Sample(
                        index, sample, tokens, logprobs, stopped=len(tokens) < sampling.max_tokens
                    )
                )
        prompt_tokens = sum(len(p) * len(wanted) for p, wanted in zip(prompts, ranges, strict=True))
        self._stats = EngineStats(
            steps=max(len(sample.token_ids) for sample in found),
            prompt_tokens=prompt_tokens,
            computed_prompt_tokens=sum(map(len, prompts)),
            generated_tokens=sum(len(sample.token_ids) for sample in found),
            preemptions=len(prompts),
            cache_bytes=2**40 + len(prompts),
            peak_cache_bytes=len(found),
        )
        return found

    def stats(self) -> EngineStats:
        assert self._stats is not None
        return self._stats

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def take_cache(self) -> None:
        self.calls.append("take_cache")


class FakeResharder:
    """Moves nothing and says what it is told to."""

    def __init__(self, engine: FakeEngine, stats: ReshardStats) -> None:
        self._engine, self._stats = engine, stats

    def run(self, meanwhile: Callable[[], None]) -> ReshardStats:
        self._engine.calls.append("reshard")
        meanwhile()
        return self._stats
