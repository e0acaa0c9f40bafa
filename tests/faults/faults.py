"""Makes a rank fail at a chosen moment: at the n-th call of a method of the real program.

Nothing of the program is replaced; a method is wrapped so that something happens to the process
before the method goes on. This file does not know how ranks are started.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrlhf.errors import DataError
from mrlhf.run.failures import STOP_SIGNALS
from mrlhf.run.watcher import Watcher

HAND_OVER = "mrlhf.reshard.execute:Resharder.run"
EPISODE = "mrlhf.episodes.runner:EpisodeRunner._finish"
GENERATION = "mrlhf.inference.native.engine:NativeEngine.step"
SCORING = "mrlhf.rewards.combine:RewardFunction.combine"
FORWARD = "mrlhf.roles.token_logprobs:TokenLogprobs.evaluate"
VALUES = "mrlhf.roles.critic:Critic.values"
REFERENCE = "mrlhf.roles.reference:Reference.logprobs"
CRITIC_LOSS = "mrlhf.roles.critic:_ValueObjective.__call__"
ACTOR_LOSS = "mrlhf.roles.policy_objective:MiniBatchLoss.__call__"
OPTIMIZER_STEP = "mrlhf.training.optimizer:ShardedOptimizer.step"
VALIDATION = "mrlhf.trainers.ppo.held_out:HeldOut.measure"
END_OF_STEP = "mrlhf.trainers.checkpoints:Checkpoints.after_step"
FILE = "mrlhf.checkpoint.saver:write_tensors"
MODEL_FILE = "mrlhf.checkpoint.rank_files:write_tensors"
MANIFEST_FILE = "mrlhf.checkpoint.saver:write_bytes"
DELETION = "mrlhf.checkpoint.retention:shutil.rmtree"
RENAMING = "pathlib:Path.rename"
CHECK = "mrlhf.preflight:preflight"
JOINING = "mrlhf.run.startup:pick_device"
SPEAKING = "mrlhf.run.startup:log_failure"
LISTENING = "mrlhf.run.failures:Failures.claim_turn"
SUPERVISED_VALIDATION = "mrlhf.training.engine:ModelEngine.per_token"
SUPERVISED_STEP = "mrlhf.training.engine:ModelEngine.train_mini_batch"

_FULL_BYTES = 64 * 1024  # more than a metrics file, less than a model


@dataclass(frozen=True)
class Fault:
    """What happens to one rank, and when."""

    where: str  # "module:function" or "module:Class.method"; the fault comes before a call of it
    call: int  # which call, from 1, counted in this process
    # Names of signals that the process sends itself, separated by spaces ("ALL=" before one: to
    # all that it has started as well); or "NAN", from this call
    # on the actor's gradients are no numbers; "FULL", from this call on no file may be longer than
    # 64 kB; "ROOM", files may again have any length; "HOLD", the process waits there until it is
    # asked to stop; "TOUCH=<file>" makes a file, "AWAIT=<file>" waits for one; "DATA" raises a
    # DataError and "BUG" an error of no user.
    action: str
    rank: int = 1  # the rank; -1: every rank
    attempt: int = 0  # which start of the job by the same launcher, from 0


def install(faults: Sequence[Fault], rank: int, attempt: int) -> None:
    """Let the faults of this rank and attempt come."""
    watchers: list[Watcher] = []
    _wrap("mrlhf.run.watcher:Watcher.start", lambda number, *args: watchers.append(args[0]))
    for fault in faults:
        if fault.rank in (rank, -1) and fault.attempt == attempt:
            _wrap(fault.where, functools.partial(_strike, fault, watchers))


def _wrap(where: str, before: Callable[..., None]) -> None:
    """Call `before(number of the call, *args)` before each call of the function `where`."""
    module_name, path = where.split(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    function = getattr(owner, name)
    calls = [0]

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        before(calls[0], *args)
        return function(*args, **kwargs)

    setattr(owner, name, wrapped)


def _strike(fault: Fault, watchers: Sequence[Watcher], number: int, *args: Any) -> None:
    if fault.action == "NAN" and number >= fault.call:
        args[1].data.fill_(math.nan)  # the hidden states, and with them the gradient
    if number != fault.call or fault.action == "NAN":
        return

    for action in fault.action.split():
        if action == "FULL":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails instead
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_BYTES, resource.RLIM_INFINITY))
        elif action == "ROOM":
            resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (resource.RLIM_INFINITY,))
        elif action == "HOLD":
            _wait_until_asked(watchers)
        elif action == "DATA":
            raise DataError(f"rank {os.environ['RANK']} cannot read its data")
        elif action == "BUG":
            raise KeyError(f"a bug on rank {os.environ['RANK']}")
        elif action.startswith("TOUCH="):
            Path(action.removeprefix("TOUCH=")).touch()
        elif action.startswith("AWAIT="):
            wait_for(Path(action.removeprefix("AWAIT=")))
        else:
            which = signal.Signals[action.removeprefix("ALL=")]
            if action.startswith("ALL="):  # as schedulers do
                _send_to_children(os.getpid(), which)
            os.kill(os.getpid(), which)
            if which in STOP_SIGNALS:
                _wait_until_asked(watchers)


def _send_to_children(parent: int, which: signal.Signals) -> None:
    """Send a signal to all processes that a process has started, and that they have."""
    for task in Path(f"/proc/{parent}/task").iterdir():
        with suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                _send_to_children(child, which)
                os.kill(child, which)


def wait_for(file: Path) -> None:
    """Wait until there is this file; the limit of the test ends the wait."""
    while not file.exists():
        time.sleep(0.01)


def _wait_until_asked(watchers: Sequence[Watcher]) -> None:
    """Wait until the watcher, another thread, knows that the run is to stop.

    From then on this rank stops at its next stop point.
    """
    while not watchers[0].phases.stops.asked:
        time.sleep(0.001)
