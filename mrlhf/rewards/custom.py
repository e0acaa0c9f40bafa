"""Runs a user's own reward function, named "path/to/file.py:function", in a process of its own.

The process is started once, serves whole batches and is killed if a call takes too long, even if
the call hangs in C. It shares nothing with the trainer: no torch state, no process group. This file
does not know weights, terms or tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrlhf.config.user_code import UserCodeError, read_reference
from mrlhf.errors import RewardError, UserTraceback
from mrlhf.rewards.interface import RewardInput, Scored, check_places, split_score
from mrlhf.workers.process import Limits, WorkerProcess

logger = logging.getLogger(__name__)

_NO_LIMITS_BUT_TIME = Limits()
_MOST_STARTS = 3  # for one batch, if signals of the job end the process


class CustomReward:
    """A user's function, called as `f(data_source=, solution_str=, ground_truth=, extra_info=)`.

    It returns a number, or a dict with "score", further numbers, values at places and, as "acc" and
    "pred", whether the response is right and its answer. What it prints goes to the log. The
    process starts with the object and ends with `close`, with the object or with the trainer. If it
    was killed, the next call starts another.
    """

    def __init__(
        self,
        file: Path,
        name: str,
        *,
        limits: Limits = _NO_LIMITS_BUT_TIME,
        load_timeout_s: float = 120.0,
    ) -> None:
        """Start the process, and load the function in time; RewardError if that fails."""
        self.name = name
        self._file = file.resolve()
        self._limits = limits
        self._load_timeout_s = load_timeout_s
        self._process: WorkerProcess | None = None
        self._started()

    def score(self, inputs: Sequence[RewardInput]) -> list[Scored]:
        """The score, the further numbers and the answer of each input.

        If a signal of the job ends the process, another one scores all of them.

        Raises:
            RewardError: a call failed, took too long, ended the process, or returned what cannot be
                used.
        """
        for start in range(_MOST_STARTS):
            try:
                return self._score(inputs)
            except RewardError:
                was_signalled = self._process is not None and self._process.was_signalled
                if not was_signalled or start == _MOST_STARTS - 1:
                    raise
        raise AssertionError

    def _score(self, inputs: Sequence[RewardInput]) -> list[Scored]:
        process = self._started()
        process.send(
            [(row.data_source, row.solution_str, row.ground_truth, row.extra()) for row in inputs]
        )

        values = []
        for row in inputs:
            kind, value = process.receive(self._limits.timeout_s, f" on {row.title}")
            if kind == "error":
                summary, trace = value
                what = f"raised {process.with_limit(summary)} on {row.title}"
                raise process.failure(what, process.drain()) from UserTraceback(trace)
            values.append(value)

        printed = process.drain()
        if printed:
            logger.info("%s printed: %s", self._title, printed)
        return [self._checked(value, row) for value, row in zip(values, inputs, strict=True)]

    def close(self) -> None:
        """End the process; a later call starts another."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    @property
    def _title(self) -> str:
        return f"{self.name} of {self._file}"

    def _checked(self, value: Any, row: RewardInput) -> Scored:
        try:
            scored = split_score(value, f"reward function {self._title}")
            check_places(scored.placed, row, f"reward function {self._title}")
            return scored
        except RewardError as error:
            raise RewardError(f"{error}; on {row.title}") from None

    def _started(self) -> WorkerProcess:
        if self._process is None or self._process.has_ended:
            self._process = WorkerProcess(
                "mrlhf.rewards.worker",
                [str(self._file), self.name],
                self._limits,
                title=f"reward function {self._title}",
                error=RewardError,
            )
            self._process.load(self._load_timeout_s, "a reward function")
        return self._process


def load_custom(reference: str, limits: Limits = _NO_LIMITS_BUT_TIME) -> CustomReward:
    """The reward function that "path/to/file.py:name" names; RewardError if there is none."""
    try:
        file, name = read_reference(reference)
    except UserCodeError as error:
        raise RewardError(f"reward function {reference!r}: {error}") from None
    return CustomReward(file, name, limits=limits)
