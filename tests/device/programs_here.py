"""Runs the launchers whole, from their arguments to their exit code, on the simulated device."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest import mock

import torch.distributed as dist

from tests.faults import settings
from tests.simulated_device.counts import Counts, Line, place
from tests.simulated_device.orders import Collective
from tests.simulated_device.state import DEVICE


@dataclass(frozen=True)
class Outcome:
    """What one rank did.

    Attributes:
        code: exit code of the program.
        by_phase: counts of each phase of the run, without those inside.
        peaks: bytes of memory by phase.
        collectives: in their order.
        decoded: calls of attention in decode, by whether query heads are packed.
        store: calls of the job's store by the main thread, by phase and line.
    """

    code: int
    by_phase: dict[str, Counts]
    peaks: dict[str, int]
    collectives: list[Collective]
    decoded: dict[str, int]
    store: dict[Line, int]


class _LeftError(BaseException):
    """The program asked for the end of the process."""


def write_inputs(directory: str) -> None:
    """Write models, data and configurations, on the host."""
    settings.write_inputs(0, 1, directory)


def run(program: str, arguments: list[str]) -> Outcome:
    """Run `mrlhf-train-<program>` on this rank."""
    from mrlhf.commands import train
    from mrlhf.parallel.phases import Phases

    launchers = {
        "ppo": train.ppo,
        "sft": train.sft,
        "rm": train.reward_model,
        "critic": train.critic,
        "dpo": train.dpo,
    }
    real_enter = Phases.enter
    phases = ["start"]

    @contextmanager
    def enter(self: Phases, name: str) -> Iterator[None]:
        phases.append(name)
        with real_enter(self, name), DEVICE.phase(name):
            yield
        phases.pop()

    with (
        mock.patch.object(Phases, "enter", enter),
        mock.patch.object(sys, "argv", [f"launch/train_{program}.py", *arguments]),
        _counted_store(phases) as store,
        _caught_exit() as exits,
    ):
        exits.code = launchers[program]()
    return Outcome(
        exits.code,
        DEVICE.by_phase,
        DEVICE.memory.phase_peaks,
        DEVICE.collectives,
        DEVICE.decoded,
        store,
    )


@contextmanager
def _counted_store(phases: list[str]) -> Iterator[Counter[Line]]:
    """Count what the main thread asks the job's store, under the innermost phase."""
    found: Counter[Line] = Counter()
    main = threading.current_thread()

    def counted(name: str) -> Any:
        real = getattr(dist.Store, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is main:
                found[(phases[-1], f"{name} at {place(beside=__file__)}")] += 1
            return real(*arguments, **options)

        return call

    with ExitStack() as stack:
        for name in ("set", "get", "check", "wait", "add", "multi_get", "multi_set"):
            stack.enter_context(mock.patch.object(dist.Store, name, counted(name)))
        yield found


@dataclass
class _Exit:
    code: int = -1


@contextmanager
def _caught_exit() -> Iterator[_Exit]:
    """Go on behind the body when the program ends the process at once."""
    really_exit = os._exit
    main = threading.current_thread()
    found = _Exit()
    has_left = threading.Event()

    def leave(code: int) -> NoReturn:
        if threading.current_thread() is main:
            has_left.set()
            found.code = code
            raise _LeftError
        if not has_left.is_set():
            really_exit(code or 1)
        sys.exit()  # ends the thread that watches over the end of the process

    with mock.patch.object(os, "_exit", leave), suppress(_LeftError):
        yield found
