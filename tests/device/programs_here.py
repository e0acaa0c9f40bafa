"""Runs the launchers whole, from their arguments to their exit code, on the simulated device."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

from tests.faults import settings
from tests.simulated_device.counts import Counts
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
    """

    code: int
    by_phase: dict[str, Counts]
    peaks: dict[str, int]
    collectives: list[Collective]
    decoded: dict[str, int]


class _LeftError(BaseException):
    """The program asked for the end of the process."""


def write_inputs(directory: str) -> None:
    """Write models, data and configurations, on the host."""
    settings.write_inputs(0, 1, directory)


def run(program: str, arguments: list[str]) -> Outcome:
    """Run `mrlhf-train-<program>` on this rank."""
    from mrlhf.commands import train
    from mrlhf.parallel.phases import Phases

    launchers = {"ppo": train.ppo, "sft": train.sft, "rm": train.reward_model, "dpo": train.dpo}
    real_enter = Phases.enter

    @contextmanager
    def enter(self: Phases, name: str) -> Iterator[None]:
        with real_enter(self, name), DEVICE.phase(name):
            yield

    with (
        mock.patch.object(Phases, "enter", enter),
        mock.patch.object(sys, "argv", [f"launch/train_{program}.py", *arguments]),
        _caught_exit() as exits,
    ):
        exits.code = launchers[program]()
    return Outcome(
        exits.code, DEVICE.by_phase, DEVICE.memory.phase_peaks, DEVICE.collectives, DEVICE.decoded
    )


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


def bytes_of(path: str) -> Any:
    """The state dict of an exported model, for comparisons."""
    from safetensors.torch import load_file

    files = sorted(Path(path).glob("*.safetensors"))
    return {name: tensor.tolist() for file in files for name, tensor in load_file(file).items()}


def has_gpu() -> bool:
    """Whether torch sees the device."""
    return torch.cuda.is_available()
