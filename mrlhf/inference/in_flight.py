"""Keeps the requests between `submit` and `collect`, and the samples that have ended.

Every engine uses this class, so all engines refuse and count the same things. This file does not
know models, or how a sample is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mrlhf.errors import EngineError
from mrlhf.inference.base import EngineLimits, EngineStats, Finished, Request, Sample
from mrlhf.inference.checks import check_prompts, check_sampling
from mrlhf.inference.stopping import Decode


class InFlight:
    """The requests and samples of one engine; `len()` counts the samples not collected yet.

    Without `decode`, from token ids to text, stop strings are refused.
    """

    def __init__(self, limits: EngineLimits, vocab_size: int, decode: Decode | None) -> None:
        self._limits = limits
        self._vocab_size = vocab_size
        self._decode = decode
        self._requests: dict[Any, Request] = {}
        self._uncollected: Counter[Any] = Counter()  # samples of each request
        self._length = 0
        self._finished: list[Sample] = []

    def __len__(self) -> int:
        return self._length

    def require_none(self, call: str) -> None:
        """Raise an EngineError that refuses `call` if samples are in flight."""
        if self._length:
            raise EngineError(
                f"{call}() is refused while {self._length} samples are in flight: collect() or "
                f"cancel() them first"
            )

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse, with an EngineError, the first of the requests that cannot be answered now."""
        if not requests:
            return

        check_prompts(requests, self._limits.max_length, self._vocab_size)
        first = next(iter(self._requests.values()), requests[0])
        check_sampling(requests, first.sampling)
        if first.sampling.stop and self._decode is None:
            raise EngineError(
                "stop strings need a decoder: give the engine decode, or set rollout.stop=[]"
            )

        ids = Counter(request.id for request in requests)
        for request_id, count in ids.items():
            if count > 1 or request_id in self._requests:
                raise EngineError(
                    f"two requests in flight have the id {request_id}; give each its own"
                )

    def add(self, requests: Sequence[Request]) -> None:
        """Take in requests that `check` does not refuse."""
        for request in requests:
            if request.samples:
                self._requests[request.id] = request
                self._uncollected[request.id] = len(request.samples)
                self._length += len(request.samples)

    def finish(self, samples: Iterable[Sample]) -> None:
        """Keep samples that have ended until they are collected."""
        self._finished.extend(samples)

    def collect(self) -> Finished:
        """Return the samples that have ended, with their prompt tokens and generated tokens."""
        samples = self._finished
        self._finished = []
        prompt_tokens = 0
        generated_tokens = 0
        for sample in samples:
            request_id = sample.request_id
            prompt_tokens += len(self._requests[request_id].prompt)
            generated_tokens += len(sample.arrays[0])
            self._uncollected[request_id] -= 1
            if self._uncollected[request_id] == 0:
                del self._requests[request_id], self._uncollected[request_id]

        self._length -= len(samples)
        return Finished(
            samples, EngineStats(prompt_tokens=prompt_tokens, generated_tokens=generated_tokens)
        )

    def drop_unfinished(self) -> None:
        """Forget the samples that have not ended."""
        self._uncollected = Counter(sample.request_id for sample in self._finished)
        self._requests = {number: self._requests[number] for number in self._uncollected}
        self._length = len(self._finished)

    def clear(self) -> None:
        """Forget everything."""
        self._finished = []
        self.drop_unfinished()
