"""Draws the samples of one replica, in a single turn each.

`conversations` builds on it for several turns. Neither knows the other replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from numpy.typing import NDArray

from mrlhf.batch import Episode, Prompts
from mrlhf.errors import EngineError
from mrlhf.inference.base import EngineStats, InferenceEngine, Request, Sample, SamplingParams
from mrlhf.rollout.trajectory import GrowingTrajectory, Trajectory

MayStep = Callable[[int, int], bool]
"""Is asked before each step of the engine, with its number and that of the samples still open."""

_SEED_BITS = 63


def _ignore(trajectory: Trajectory) -> None:
    """Nobody wants to know that a sample has ended."""


@dataclass(frozen=True)
class Task:
    """The samples of a batch that one replica draws."""

    prompts: Prompts  # of the batch
    sampling: SamplingParams  # of the batch; a request may have another seed
    requests: Sequence[Request]  # the id of each is the row of its first sample
    # What there is of rows that have begun, by row; each of them is a request of its own.
    begun: Mapping[int, Trajectory] = field(default_factory=dict)
    ended: Callable[[Trajectory], None] = _ignore  # is told of each sample that has ended

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

    def goes_on(self, ended: Sequence[int], interrupted: bool) -> bool:
        """Raise the limit, or say that enough has ended; all replicas call it together.

        It is called when each sample of this replica has ended or is at the limit, or when the run
        is interrupted. `ended` are the rows that have ended since the last call.
        """
        ...


@dataclass(frozen=True)
class Drawn:
    """The samples of a replica, and its engine's work meanwhile."""

    trajectories: list[Trajectory]
    stats: EngineStats


@dataclass
class OpenSample:
    """One sample on its way."""

    row: int
    request: Request  # of the task
    sample_index: int
    prompt_ids: Sequence[int]
    said: GrowingTrajectory
    turn_begins: int = 0  # the number of tokens before the present turn
    turn_tokens: int = 0  # the most tokens of the present turn
    turns_now: int = 0  # turns that the present weights have ended
    recorded: int = 0  # for how many tokens `experts` says which experts they went to
    experts: NDArray[Any] | None = None

    @property
    def drawn(self) -> int:
        """The tokens of the present turn so far."""
        return len(self.said) - self.turn_begins


S = TypeVar("S", bound=OpenSample)


class Drawing(Generic[S]):
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
        self._batch = len(task.prompts) * task.sampling.n
        self._open: dict[int, S] = {}
        self._ended: list[Trajectory] = []

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
        told = 0
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
                    for sample in finished.samples:
                        self._hear(sample)
                    self._look_around()
                stats += finished.stats

            ended = [one.row for one in self._ended[told:]]
            told = len(self._ended)
            if self._pace is None or not self._pace.goes_on(ended, interrupted):
                break
            self._engine.submit(self._next_requests(self._open.values()))

        if interrupted or self._pace is None:
            self._abandon()
            return Drawn(self._ended, stats)
        return Drawn(self._ended + [self._put_aside(one) for one in self._open.values()], stats)

    @property
    def _is_busy(self) -> bool:
        """Whether a sample is drawn or waits for something else than the other replicas."""
        return self._engine.in_flight > 0

    def _begin(self) -> None:
        """Submit what is drawn first."""
        raise NotImplementedError

    def _look_around(self) -> None:
        """Do what else there is to do between two steps of the engine."""

    def _turn_ends(self, one: S, stopped: bool) -> None:
        """Go on after a turn, which has `stopped` by itself or is as long as it may be."""
        raise NotImplementedError

    def _abandon(self) -> None:
        """Give up what is open."""

    def _prompt_of(self, one: OpenSample) -> int:
        """The place of a sample's prompt in the batch."""
        return one.row // self._sampling.n

    def _new_samples(self) -> Iterator[OpenSample]:
        """The samples of the task, those of a request one after the other."""
        for request in self._task.requests:
            for index in request.samples:
                row = request.id + index - request.samples.start
                begun = self._task.begun.get(row)
                said = GrowingTrajectory() if begun is None else GrowingTrajectory.of(begun)
                yield OpenSample(row, request, index, request.prompt, said)

    def _next_requests(self, some: Iterable[S]) -> list[Request]:
        """Requests for the next tokens of those samples that are not at the pace's limit."""
        return [
            self._request(one, range(one.sample_index, one.sample_index + 1), later=True)
            for one in some
            if self._tokens_left(one)
        ]

    def _tokens_left(self, one: S) -> int:
        """The most tokens that are drawn next."""
        left = one.turn_tokens - one.drawn
        if self._pace is None:
            return left
        spent = one.said.drawn_by(self._engine.version) + self._pace.turn_cost * one.turns_now
        return max(0, min(left, self._pace.limit - spent))

    def _request(self, one: S, samples: range, later: bool = False) -> Request:
        """The request for the next tokens of `one`, and of the other `samples` with its prompt.

        `later` requests have other ids than the first ones.
        """
        sampling = one.request.sampling
        return Request(
            id=one.row + self._batch * later,
            prompt=self._context(one),
            uid=one.request.uid,
            samples=samples,
            sampling=replace(
                sampling, max_tokens=self._tokens_left(one), seed=self._seed(one, sampling.seed)
            ),
            goes_on=self._goes_on(one),
            drawn=one.drawn,
        )

    def _context(self, one: S) -> list[int]:
        """The tokens that are read before the next one."""
        return [*one.prompt_ids, *one.said.token_ids]

    def _goes_on(self, one: S) -> bool:
        """Whether the sample may draw more after its next request."""
        return self._pace is not None

    def _seed(self, one: S, seed: int) -> int:
        """The seed of the present turn, where `seed` is the request's."""
        return seed

    def _hear(self, sample: Sample) -> None:
        """Take what the engine has drawn."""
        later = sample.request_id >= self._batch
        first = sample.request_id // self._sampling.n * self._sampling.n
        one = self._open[sample.request_id - self._batch if later else first + sample.sample_index]
        one.said.add_drawn(sample)
        one.experts = sample.experts
        if self._sampling.record_experts:
            one.recorded = len(one.prompt_ids) + len(one.said) - 1
        if self._pace is None or sample.stopped or one.drawn == one.turn_tokens:
            one.turns_now += 1
            self._turn_ends(one, sample.stopped)

    def _end(self, one: S, stopped: bool, episode: Episode | None = None) -> None:
        """Nothing more is drawn of a sample."""
        del self._open[one.row]
        whole = replace(
            _trajectory(one), stopped=stopped, recorded=one.recorded, experts=one.experts
        )
        self._ended.append(replace(whole, ended=True, episode=episode))
        self._task.ended(self._ended[-1])

    def _put_aside(self, one: S) -> Trajectory:
        """A sample that has not ended, to go on with later weights."""
        return _trajectory(one)


class SingleTurns(Drawing[OpenSample]):
    """Draws a task whose samples have a single turn each."""

    def _begin(self) -> None:
        requests = []
        for one in self._new_samples():
            self._open[one.row] = one
            one.turn_tokens = self._sampling.max_tokens
            if one.row in self._task.begun:
                requests += self._next_requests([one])
            elif one.sample_index == one.request.samples.start:
                requests.append(self._request(one, one.request.samples))
        self._engine.submit(requests)

    def _turn_ends(self, one: OpenSample, stopped: bool) -> None:
        self._end(one, stopped)


def _trajectory(one: OpenSample) -> Trajectory:
    said = one.said
    return Trajectory(one.row, said.token_ids, said.logprobs, tuple(said.runs))


def mix_seed(seed: int, stream: str) -> int:
    """A seed that depends on a seed and the name of a stream of random numbers."""
    digest = hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
