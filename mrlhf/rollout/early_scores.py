"""Scores the responses of this rank one after the other in a thread, while the engine draws others.

Users' functions wait in processes of their own, so the thread takes next to no time from the
engine. What has not begun when the engine is done is left to all ranks. This file knows neither
other ranks nor what a score means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread

from mrlhf.batch import Rollout
from mrlhf.rewards.interface import Evaluated, RewardInput
from mrlhf.rollout.response import Response

Key = tuple[int, int]  # the uid of the prompt, and the number of the sample among the prompt's


@dataclass(frozen=True, eq=False)
class EarlyScore:
    """One response, and what the terms give it once they have."""

    response: Response
    given: RewardInput
    evaluated: Future[Evaluated] = field(default_factory=Future)


class EarlyScores:
    """Responses of this rank that are scored before their batch is drawn."""

    def __init__(self, evaluate: Callable[[Sequence[RewardInput]], list[Evaluated]]) -> None:
        """Score nothing yet; `evaluate` is called in another thread."""
        self._evaluate = evaluate
        self._known: dict[Key, list[EarlyScore]] = {}
        self._waiting: SimpleQueue[EarlyScore | None] = SimpleQueue()
        # As a daemon it does not keep a process that has to end.
        self._thread = Thread(target=self._work, name="early-scores", daemon=True)

    def add(self, key: Key, response: Response, given: RewardInput) -> None:
        """Score a response when the ones before it are done; nobody waits for it."""
        if not self._thread.is_alive():
            self._thread.start()
        early = EarlyScore(response, given)
        self._known.setdefault(key, []).append(early)
        self._waiting.put(early)

    @contextmanager
    def taking(self, rollout: Rollout) -> Iterator[dict[int, EarlyScore]]:
        """Those of a rollout's responses whose scoring has begun, by row; they are taken out.

        In the body no scoring begins here. Afterwards that of other rollouts' responses goes on.
        """
        waiting: list[EarlyScore] = []
        with suppress(Empty):
            while (early := self._waiting.get_nowait()) is not None:
                waiting.append(early)

        found = self._take(rollout)
        taken = set(found.values())
        has_begun = taken.difference(waiting)
        yield {row: early for row, early in found.items() if early in has_begun}
        for early in waiting:
            if early not in taken:
                self._waiting.put(early)

    def close(self) -> None:
        """End the thread after the response that it scores now."""
        with suppress(Empty):
            while True:
                self._waiting.get_nowait()
        self._waiting.put(None)

    def _take(self, rollout: Rollout) -> dict[int, EarlyScore]:
        """The responses of a rollout that are known here, by row; they are known no longer."""
        found = {}
        lengths = rollout.response_lengths
        keys = zip(rollout.prompts.uid, rollout.sample_index, strict=True)
        for row, key in enumerate(keys):
            if key not in self._known:
                continue
            # Rows of other splits, and a greedy baseline, may have the same key.
            response = Response.of_row(rollout, row, lengths[row])
            alike = [early for early in self._known[key] if early.response == response]
            if alike:
                found[row] = alike[0]
                self._known[key].remove(alike[0])

        self._known = {key: some for key, some in self._known.items() if some}
        return found

    def _work(self) -> None:
        while (early := self._waiting.get()) is not None:
            try:
                (evaluated,) = self._evaluate([early.given])
            except BaseException as error:  # whoever asks for the score gets it
                early.evaluated.set_exception(error)
            else:
                early.evaluated.set_result(evaluated)
