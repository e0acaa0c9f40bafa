"""Runs a user's own reward function, named "path/to/file.py:function", in a process of its own.

The process is started once, serves whole batches and is killed if a call takes too long, even if
the call hangs in C. It shares nothing with the trainer: no torch state, no process group. This file
does not know weights, terms or tokens.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrlhf.config.user_code import UserCodeError, read_reference
from mrlhf.errors import RewardError, UserTraceback
from mrlhf.rewards.interface import RewardInput, Scored, split_score
from mrlhf.workers.process import Limits, WorkerProcess

logger = logging.getLogger(__name__)

# Words in the errors of Python if the memory limit refuses memory, a process or a thread.
_NO_MEMORY = ("MemoryError", "Cannot allocate memory", "can't start new thread")
_NO_LIMITS_BUT_TIME = Limits()
_WORKER = Path(__file__).with_name("worker.py")


class CustomReward:
    """A user's function, called as `f(data_source=, solution_str=, ground_truth=, extra_info=)`.

    It returns a number, or a dict with "score", further numbers and, as "acc" and "pred", whether
    the response is right and its answer. What it prints goes to the log. The process starts with
    the object and ends with `close`, with the object or with the trainer. If it was killed, the
    next call starts another.
    """

    def __init__(
        self,
        file: Path,
        name: str,
        *,
        limits: Limits = _NO_LIMITS_BUT_TIME,
        load_timeout_s: float = 120.0,
    ) -> None:
        """Start the process and load the function `name` of `file` within `load_timeout_s` seconds.

        Raises:
            RewardError: the file or the function is missing, fails to import, or takes other
                arguments.
        """
        self.name = name
        self._file = file.resolve()
        self._limits = limits
        self._load_timeout_s = load_timeout_s
        self._process: WorkerProcess | None = None
        self._started()

    def score(self, inputs: Sequence[RewardInput]) -> list[Scored]:
        """The score, the further numbers and the answer of each input.

        Raises:
            RewardError: a call failed, took too long, ended the process, or returned what cannot be
                used.
        """
        process = self._started()
        process.send(
            [(row.data_source, row.solution_str, row.ground_truth, row.extra()) for row in inputs]
        )

        values = []
        for row in inputs:
            kind, value = self._receive(process, self._limits.timeout_s, f"on {row.title}")
            if kind == "error":
                summary, trace = value
                what = f"raised {self._with_limit(summary)} on {row.title}"
                raise self._failure(what, process.drain()) from UserTraceback(trace)
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
            return split_score(value, f"reward function {self._title}")
        except RewardError as error:
            raise RewardError(f"{error}; on {row.title}") from None

    def _started(self) -> WorkerProcess:
        if self._process is None:
            arguments = [str(self._file), self.name]
            self._process = WorkerProcess(_WORKER, arguments, self._limits)
            self._process.send(sys.path)
            when = "while its file was imported"
            kind, value = self._receive(self._process, self._load_timeout_s, when)
            if kind == "error":
                self.close()
                summary, trace = value
                cause = UserTraceback(trace) if trace else None
                raise RewardError(
                    f"cannot load a reward function: {self._with_limit(summary)}"
                ) from cause
        return self._process

    def _receive(self, process: WorkerProcess, timeout_s: float, when: str) -> tuple[str, Any]:
        """The kind and the value of the next answer; if there is none, the process is ended."""
        try:
            kind, value = process.receive(timeout_s)
            return kind, value
        except TimeoutError:
            printed = process.stop()
            what = f"took more than {timeout_s:g} s and was stopped"
        except (EOFError, ConnectionResetError):
            what = process.ending()
            printed = process.stop()

        self._process = None
        raise self._failure(f"{what} {when}", printed)

    def _with_limit(self, summary: str) -> str:
        """The summary of an error; if the memory limit is the cause, the limit is named too."""
        is_limited = self._limits.memory_mb is not None
        if is_limited and any(words in summary for words in _NO_MEMORY):
            return f"{summary}; {self._limits.hint}"
        return summary

    def _failure(self, what: str, printed: str) -> RewardError:
        output = f"; it printed: {printed}" if printed else ""
        return RewardError(f"reward function {self._title} {what}{output}")


def load_custom(reference: str, limits: Limits = _NO_LIMITS_BUT_TIME) -> CustomReward:
    """The reward function that "path/to/file.py:name" names.

    Raises:
        RewardError: the file or the function is missing; the message names the nearest one.
    """
    try:
        file, name = read_reference(reference)
    except UserCodeError as error:
        raise RewardError(f"reward function {reference!r}: {error}") from None
    return CustomReward(file, name, limits=limits)
