"""Draws the samples of one replica, in a single turn each.

`episodes/runner.py` builds on it for several turns. Neither knows the other replicas.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from mrlhf.batch import Episode, Prompts
from mrlhf.errors import EngineError
from mrlhf.inference.base import EngineStats, InferenceEngine, Request, Sample, SamplingParams
from mrlhf.rollout.drawn_sample import DrawnSample

MayStep = Callable[[int, int], bool]
"""Is asked before each step of the engine, with its number and that of the samples still open."""

_SEED_BITS = 63


class RequestId(NamedTuple):
    """Whose tokens a request draws."""

    prompt: int  # the place of the prompt in the batch
    sample: int  # the first of its samples that are drawn
    part: int = 0  # tells apart the requests for one sample that are in flight together


@dataclass(frozen=True)
class Task:
    """The samples of a batch that one replica draws."""

    prompts: Prompts  # of the batch
    sampling: SamplingParams  # of the batch; a request may have another seed
    requests: Sequence[Request]  # with ids of the type `RequestId`
    # What there is of rows that have begun, by row; each of them is a request of its own.
    begun: Mapping[int, DrawnSample] = field(default_factory=dict)
    # Samples that are not drawn, and so have no request.
    given: Sequence[DrawnSample] = ()
    # Is called with each sample that has ended.
    ended: Callable[[DrawnSample], None] = lambda sample: None

    @property
    def samples(self) -> int:
        """How many samples they are."""
        return sum(len(request.samples) for request in self.requests)


class Pace(Protocol):
    """Keeps samples together that need not all end: each may draw as many tokens as the others."""

    @property
    def limit(self) -> int:
        """The most tokens that the present weights may draw of a sample for now."""
        ...

    @property
    def turn_cost(self) -> int:
        """For how many tokens a turn that has ended counts besides its own."""
        ...

    def goes_on(self, ended: Sequence[DrawnSample], interrupted: bool) -> bool:
        """Raise the limit, or say that enough has ended; all replicas call it together.

        That is when each sample has ended or is at the limit, or when the run is interrupted.
        `ended` are the samples that have ended since the last call.
        """
        ...


@dataclass(frozen=True)
class Drawn:
    """The samples of a replica, and its engine's work meanwhile."""

    samples: list[DrawnSample]
    stats: EngineStats


@dataclass
class OpenSample(DrawnSample):
    """One sample on its way."""

    request: Request = field(kw_only=True)  # of the task
    sample_index: int = field(kw_only=True)
    prompt_ids: Sequence[int] = field(kw_only=True)
    turn_tokens: int = 0  # the most tokens of the present turn
    turns_now: int = 0  # turns that the present weights have ended

    @property
    def key(self) -> tuple[int, int, int]:
        """Tells it from all other samples of the run: seed, uid and sample index."""
        return self.request.sampling.seed, self.request.uid, self.sample_index

    @property
    def turn_begin(self) -> int:
        """The number of tokens before the present turn."""
        return 0 if self.episode is None else self.episode.turn_begins[-1]

    @property
    def drawn(self) -> int:
        """The number of tokens of the present turn so far."""
        return self.length - self.turn_begin


S = TypeVar("S", bound=OpenSample)


class TaskRunner(ABC, Generic[S]):
    """Draws a task's samples on one replica, all of whose ranks do the same.

    A subclass says what begins a sample, and what follows a turn.
    """

    def __init__(self, engine: InferenceEngine, task: Task, pace: Pace | None) -> None:
        """Draw every sample to its end, or only as far as `pace` lets them."""
        self._engine = engine
        self._task = task
        self._prompts = task.prompts
        self._sampling = task.sampling
        self._pace = pace
        self._open: dict[int, S] = {}
        self._ended = list(task.given)

    def draw(self, may_step: MayStep) -> Drawn:
        """Draw the samples; if `may_step` says no, what is being drawn is dropped.

        All ranks of a replica must get the same answers. With a pace, samples that have not ended
        are returned too.

        Raises:
            EngineError: other samples are in flight, or the engine refuses or fails.
        """
        if self._engine.in_flight:
            raise EngineError(
                f"{self._engine.in_flight} samples are in flight: collect() or cancel() them first"
            )
        try:
            return self._draw(may_step)
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self._engine.cancel()
            self._abandon()
            raise

    def _draw(self, may_step: MayStep) -> Drawn:
        stats = EngineStats()
        unit = 0
        passed_on = 0
        interrupted = False
        self._begin()
        while True:
            while self._is_busy and not interrupted:
                interrupted = not may_step(unit, len(self._open))
                unit += 1
                if interrupted:
                    finished = self._engine.cancel()
                else:
                    if self._engine.in_flight:
                        self._engine.step()
                    finished = self._engine.collect()
                    for drawn in finished.samples:
                        self._on_drawn(drawn)
                    self._between_steps()
                stats += finished.stats

            ended = self._ended[passed_on:]
            passed_on = len(self._ended)
            if self._pace is None or not self._pace.goes_on(ended, interrupted):
                break
            self._engine.submit(self._next_requests(self._open.values()))

        if interrupted or self._pace is None:
            self._abandon()
            return Drawn(self._ended, stats)
        for sample in self._open.values():
            self._set_aside(sample)
        return Drawn([*self._ended, *self._open.values()], stats)

    @property
    def _is_busy(self) -> bool:
        """Whether a sample is drawn or waits for something else than the other replicas."""
        return self._engine.in_flight > 0

    @abstractmethod
    def _begin(self) -> None:
        """Submit what is drawn first."""

    def _between_steps(self) -> None:
        """Do what else there is to do between two steps of the engine."""

    @abstractmethod
    def _on_turn(self, sample: S, stopped: bool) -> None:
        """Go on after a turn, which has `stopped` by itself or is as long as it may be."""

    def _abandon(self) -> None:
        """Give up what is open."""

    def _new_samples(self) -> Iterator[OpenSample]:
        """The samples of the task, those of a request one after the other."""
        for request in self._task.requests:
            for index in request.samples:
                row = request.id.prompt * self._sampling.n + index
                begun = self._task.begun.get(row, DrawnSample(row))
                yield OpenSample(
                    **vars(begun), request=request, sample_index=index, prompt_ids=request.prompt
                )

    def _next_requests(self, samples: Iterable[S]) -> list[Request]:
        """Requests for the next tokens of those samples that are not at the pace's limit."""
        return [
            self._request(sample, range(sample.sample_index, sample.sample_index + 1), part=1)
            for sample in samples
            if self._tokens_left(sample)
        ]

    def _tokens_left(self, sample: S) -> int:
        """The most tokens that are drawn next."""
        left = sample.turn_tokens - sample.drawn
        if self._pace is None:
            return left
        spent = sample.drawn_by(self._engine.version) + self._pace.turn_cost * sample.turns_now
        return max(0, min(left, self._pace.limit - spent))

    def _request(self, sample: S, indices: range, part: int = 0) -> Request:
        """The request for the next tokens of `sample`, and of others of its prompt as well."""
        sampling = sample.request.sampling
        return Request(
            id=RequestId(sample.request.id.prompt, sample.sample_index, part),
            prompt=self._context(sample),
            uid=sample.request.uid,
            samples=indices,
            sampling=replace(
                sampling,
                max_tokens=self._tokens_left(sample),
                seed=self._seed(sample, sampling.seed),
            ),
            goes_on=self._goes_on(sample),
            drawn=sample.drawn,
        )

    def _context(self, sample: S) -> list[int]:
        """The tokens that are read before the next one."""
        return [*sample.prompt_ids, *sample.token_ids]

    def _goes_on(self, sample: S) -> bool:
        """Whether the sample may draw more after its next request."""
        return self._pace is not None

    def _seed(self, sample: S, seed: int) -> int:
        """The seed of the present turn, where `seed` is the request's."""
        return seed

    def _on_drawn(self, drawn: Sample) -> None:
        """Take what the engine has drawn."""
        sample = self._open[drawn.request_id.prompt * self._sampling.n + drawn.sample_index]
        sample.add_drawn(drawn)
        sample.experts = drawn.experts
        if self._sampling.record_experts:
            sample.recorded = len(sample.prompt_ids) + sample.length - 1
        if self._pace is None or drawn.stopped or sample.drawn == sample.turn_tokens:
            sample.turns_now += 1
            self._on_turn(sample, drawn.stopped)

    def _end(self, sample: S, stopped: bool) -> None:
        """Draw nothing more of a sample."""
        del self._open[sample.row]
        sample.ended = True
        sample.stopped = stopped
        self._ended.append(sample)
        self._task.ended(sample)

    def _set_aside(self, sample: S) -> None:
        """Let a sample that has not ended go on with later weights."""
        sample.forget_record()  # the engine records all of it again


class SingleTurns(TaskRunner[OpenSample]):
    """Draws a task whose samples have a single turn each."""

    def _begin(self) -> None:
        requests = []
        for sample in self._new_samples():
            self._open[sample.row] = sample
            sample.turn_tokens = self._sampling.max_tokens
            if sample.row in self._task.begun:
                requests += self._next_requests([sample])
            elif sample.sample_index == sample.request.samples.start:
                requests.append(self._request(sample, sample.request.samples))
        self._engine.submit(requests)

    def _on_turn(self, sample: OpenSample, stopped: bool) -> None:
        self._end(sample, stopped)


class Sampler:
    """Says how samples are drawn: here in a single turn each."""

    has_episodes = False

    def drawing(self, engine: InferenceEngine, task: Task, pace: Pace | None) -> TaskRunner[Any]:
        """The drawing of a task, not begun yet."""
        return SingleTurns(engine, task, pace)

    def fits(self, episode: Episode | None, length: int, ended: bool, most: int) -> bool:
        """Whether a sample of `length` tokens, at `most`, is in the limits; and goes on if open."""
        return episode is None and length < most + ended


def mix_seed(seed: int, stream: str) -> int:
    """A seed that depends on a seed and the name of a stream of random numbers."""
    digest = hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
