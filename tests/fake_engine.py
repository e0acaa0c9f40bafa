"""An inference engine without a model.

Each response is a function of (seed, uid, sample index, position).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from torch import Tensor

from mrlhf.inference.base import EngineStats, Finished, HeldBytes, Request, Sample
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


def answer(request: Request, index: int, version: int) -> Sample:
    """The sample `index` of a request, whose log-probs are numbers that float32 holds exactly."""
    sampling = request.sampling
    tokens = response(sampling.seed, request.uid, index, sampling.max_tokens)
    logprobs = [-(token % 1024) / 1024 for token in tokens]
    stopped = len(tokens) < sampling.max_tokens
    return Sample(request.id, index, tokens, logprobs, stopped, version)


class FakeEngine:
    """Keeps a list of the calls it got."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: list[tuple[int, range]] = []
        self._version = -1
        self._requests: list[Request] = []

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

    @property
    def in_flight(self) -> int:
        return sum(len(request.samples) for request in self._requests)

    def submit(self, requests: Sequence[Request]) -> None:
        self.calls.append("submit")
        self.asked = [(request.uid, request.samples) for request in requests]
        self._requests = list(requests)

    def step(self) -> None:
        """Everything is drawn by `collect`."""

    def collect(self) -> Finished:
        samples = [
            answer(request, index, self._version)
            for request in self._requests
            for index in request.samples
        ]

        prompts = [request.prompt for request in self._requests]
        stats = EngineStats(
            steps=max(len(sample.token_ids) for sample in samples),
            prompt_tokens=sum(len(r.prompt) * len(r.samples) for r in self._requests),
            computed_prompt_tokens=sum(map(len, prompts)),
            generated_tokens=sum(len(sample.token_ids) for sample in samples),
            preemptions=len(prompts),
            cache_bytes=2**40 + len(prompts),
            peak_cache_bytes=len(samples),
        )

        self._requests = []
        return Finished(samples, stats)

    def cancel(self) -> Finished:
        self._requests = []
        return Finished([], EngineStats())

    def sleep(self, free_weights: bool = False) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    @property
    def held_bytes(self) -> HeldBytes:
        """It has no weights and no cache."""
        return HeldBytes(0, 0)

    def take_cache(self) -> None:
        self.calls.append("take_cache")


class FakeResharder:
    """Moves nothing, and returns the statistics that it was given."""

    nbytes = 0  # of merged weights

    def __init__(self, engine: FakeEngine, stats: ReshardStats) -> None:
        self._engine = engine
        self._stats = stats

    def run(self, meanwhile: Callable[[], None]) -> ReshardStats:
        self._engine.calls.append("reshard")
        meanwhile()
        return self._stats

    def give_back(self) -> None:
        """It has borrowed nothing."""
