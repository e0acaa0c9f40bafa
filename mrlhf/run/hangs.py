"""Finds the ranks that the others wait for, and writes down the stacks of every rank.

A rank that has waited for too long asks through the job's store; each rank's watcher answers, also
while its main thread is blocked. This file knows the names of phases and the stacks of threads, but
not what the ranks do.
"""

from __future__ import annotations

import faulthandler
import json
import linecache
import logging
import math
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from mrlhf.parallel.job import polling_s
from mrlhf.parallel.phases import Phases

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
_NAMED_RANKS = 3
_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")})
_TIMED_OUT = ("timed out waiting", "operation timeout", "wait timeout", "connect timeout")
# The innermost functions of a main thread that waits for other ranks, or for a GPU, which waits.
_WAITING_IN = ("torch/distributed/", "torch/cuda/", "/p2p_comm", "mrlhf/parallel/collectives")
# Methods written in C, whose callers are the innermost functions that Python knows.
_WAITS_FOR_GPU = re.compile(r"\.(item|tolist|cpu|synchronize)\(")


@dataclass(frozen=True)
class Answer:
    """A rank's answer to the question where it is."""

    phase: str  # the phase of the trainer
    seconds: float  # how long the rank has been in the phase
    waits: bool  # whether it waits for other ranks
    where: str  # the innermost place of its main thread that is not in a library


@dataclass(frozen=True)
class HangReport:
    """The answers of all ranks (None if a rank gave none), and the directory with their stacks."""

    answers: Mapping[int, Answer | None]
    directory: Path
    question: int = 0

    @property
    def silent(self) -> frozenset[int]:
        """The ranks that gave no answer in time."""
        return frozenset(rank for rank, answer in self.answers.items() if answer is None)


class HangReports:
    """Asks all ranks where they are, and answers for this one."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, directory: Path, phases: Phases
    ) -> None:
        """Begin without a question; `store` is shared by all ranks, and used by nothing else."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._directory = directory
        self._phases = phases
        self._lock = threading.Lock()
        self._questions = 0
        self._answered_at = -math.inf
        self._has_timed_out = False

    def look(self) -> None:
        """Answer a new question, if there is one; the watcher calls it from time to time."""
        with self._lock:
            while self._store.check([f"question {self._questions}"]):
                folder = self._store.get(f"question {self._questions}").decode()
                answer = self._write(self._directory / folder)
                key = f"answer {self._questions} of rank {self._rank}"
                self._store.set(key, json.dumps(asdict(answer)))
                self._questions += 1
                self._answered_at = time.monotonic()

    def answered_since(self, moment: float) -> bool:
        """Whether some rank has asked since `moment` (a time of `time.monotonic`)."""
        return self._answered_at >= moment

    def report(self, since: float) -> HangReport:
        """The places of all ranks, now or when one last asked after `since`; may take seconds."""
        if not self.answered_since(since):
            with self._lock:
                folder = time.strftime("%Y%m%d-%H%M%S")
                self._store.compare_set(f"question {self._questions}", "", folder)
            self.look()
        question = self._questions - 1
        folder = self._store.get(f"question {question}").decode()

        keys = [f"answer {question} of rank {rank}" for rank in range(self._world_size)]
        latest = time.monotonic() + _ANSWER_S
        while not self._store.check(keys) and time.monotonic() < latest:
            time.sleep(polling_s(self._world_size, 0.02))

        given = keys if self._store.check(keys) else [k for k in keys if self._store.check([k])]
        texts = dict(zip(given, self._store.multi_get(given) if given else [], strict=True))
        answers: dict[int, Answer | None] = {}
        for rank, key in enumerate(keys):
            answers[rank] = Answer(**json.loads(texts[key])) if key in texts else None
        return HangReport(answers, self._directory / folder, question)

    def unanswered(self, report: HangReport) -> frozenset[int]:
        """The silent ranks that have not answered since; one that writes files may be late."""
        keys = {rank: f"answer {report.question} of rank {rank}" for rank in report.silent}
        return frozenset(rank for rank, key in keys.items() if not self._store.check([key]))

    def time_out(self) -> None:
        """Count this rank as one that waits for others, although its wait has just ended."""
        self._has_timed_out = True

    def claim(self) -> bool:
        """Whether this rank is the one that reports why the job failed; True for one rank only."""
        return self._store.compare_set("reporter", "", str(self._rank)) == str(self._rank).encode()

    def _write(self, directory: Path) -> Answer:
        """Write the stacks of all threads of this rank into the directory, if that is possible."""
        main = sys._current_frames()[threading.main_thread().ident or 0]
        answer = Answer(
            phase=self._phases.name,
            seconds=self._phases.seconds,
            waits=self._has_timed_out or _waits(main),
            where=_where(main),
        )

        doing = "waiting for other ranks" if answer.waits else f"at {answer.where}"
        line = f"rank {self._rank}, in {answer.phase} for {answer.seconds:.0f} s, {doing}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with (directory / f"rank_{self._rank}.txt").open("w", encoding="utf-8") as file:
                file.write(f"{line}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            logger.warning("cannot write the stacks of this rank: %s", error)
        return answer


def is_time_out(error: BaseException | None) -> bool:
    """Whether the error says that a collective has waited for other ranks for too long."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _TIMED_OUT)


def describe(rank: int, waited_s: float, report: HangReport) -> str:
    """One line with the ranks for which `rank` has waited, and the directory with the stacks.

    They give no answer or wait for nobody. If all wait, those in another phase are named.
    """
    own = report.answers[rank]
    phase = own.phase if own is not None else "an unknown phase"
    others = {number: answer for number, answer in report.answers.items() if number != rank}

    busy = {number for number, answer in others.items() if answer and not answer.waits}
    elsewhere = {number for number, answer in others.items() if answer and answer.phase != phase}
    missing = sorted(report.silent - {rank} | busy or elsewhere)

    named = [_name(number, others[number]) for number in missing[:_NAMED_RANKS]]
    if len(missing) > _NAMED_RANKS:
        named.append(f"{len(missing) - _NAMED_RANKS} more")
    whom = " and for ".join(named) if named else "other ranks, which all wait in the same phase"
    return (
        f"rank {rank} waited {waited_s:.0f} s in {phase} for {whom}; stacks of all ranks: "
        f"{report.directory}"
    )


def _name(rank: int, answer: Answer | None) -> str:
    if answer is None:
        return f"rank {rank}, which gives no answer"
    place = "" if answer.waits else f" ({answer.where})"
    return f"rank {rank}, which is in {answer.phase} since {answer.seconds:.0f} s{place}"


def _waits(innermost: FrameType) -> bool:
    """Whether the thread waits for other ranks, on a GPU where it asks for a result of a GPU."""
    file = innermost.f_code.co_filename
    if any(part in file.replace("\\", "/") for part in _WAITING_IN):
        return True
    line = linecache.getline(file, innermost.f_lineno)
    return torch.cuda.is_initialized() and _WAITS_FOR_GPU.search(line) is not None


def _where(innermost: FrameType) -> str:
    """The innermost place of the thread that is in no library, else the innermost one."""
    frame: FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    chosen = frame or innermost
    path = Path(chosen.f_code.co_filename)
    return f"{'/'.join(path.parts[-3:])}:{chosen.f_lineno} in {chosen.f_code.co_name}"
