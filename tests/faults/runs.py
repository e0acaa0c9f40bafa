"""Starts jobs of the real launchers in two ranks, with faults, and compares what they leave.

A rank is a process of its own, with its own output file, which a test may kill. It is a fork of a
server that has imported torch already, since importing it anew in every rank of every start would
take most of the time. In all else this file does what torchrun does: it keeps the store, and when a
rank ends with an error it sends SIGTERM to the others, and SIGKILL soon afterwards (torchrun waits
for 30 s). The tests of `test_torchrun` use torchrun.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from mrlhf.checkpoint.state_tree import read_state
from tests.faults.faults import Fault, install
from tests.leftovers import assert_nothing_is_left
from tests.metric_rows import without_row
from tests.ranks import fork_server

ROOT = Path(__file__).parents[2]
WORLD_SIZE = 2
LIMIT_S = 1500.0
GRACE_S = 120.0
QUEUE_AGAIN = 75

# Numbers that no two runs share, or none that were stopped in a rollout, which the engine counts
# twice; docs/checkpoints.md names them.
FREE = ("timing_s/", "timing_per_token_ms/", "perf/", "reshard/seconds", "rollout/")
# A run of adapters that goes on hands the base over again.
FREE_WITH_ADAPTERS = (
    *("reshard/bytes_moved", "reshard/bytes_had_to_move", "reshard/peak_extra_bytes"),
)
Program = Literal["ppo", "sft", "rm", "critic", "dpo"]


@dataclass(frozen=True)
class Ended:
    """A job that has ended."""

    codes: list[int]  # exit code of each rank; negative: the signal that ended it
    outputs: list[str]  # what each rank printed

    @property
    def text(self) -> str:
        """What all ranks printed."""
        return "".join(self.outputs)


@dataclass
class Job:
    """A job that runs."""

    processes: list[Any]
    logs: list[Path]
    store: Any

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [process.pid for process in self.processes]

    def send(self, which: signal.Signals, *ranks: int) -> None:
        """Send a signal to these ranks."""
        for rank in ranks:
            os.kill(self.pids[rank], which)

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        """Wait for the end of all ranks; one that fails has the others ended, as torchrun does."""
        deadline = time.monotonic() + limit_s
        told = False

        while alive := [process for process in self.processes if process.exitcode is None]:
            failed = any(process.exitcode not in (None, 0) for process in self.processes)
            if failed and not told:
                told = True
                deadline = time.monotonic() + GRACE_S
                for process in alive:
                    process.terminate()

            left = deadline - time.monotonic()
            if left <= 0:
                for process in alive:
                    process.kill()
                assert told, f"the job does not end:\n{self._text()}"
            wait([process.sentinel for process in alive], timeout=max(0.1, left))

        codes = [process.exitcode for process in self.processes]
        return Ended(codes, [log.read_text(errors="replace") for log in self.logs])

    def _text(self) -> str:
        return "".join(log.read_text(errors="replace")[-4000:] for log in self.logs)


def start(
    program: Program,
    arguments: Sequence[str],
    logs: Path,
    faults: Sequence[Fault] = (),
    world_size: int = WORLD_SIZE,
) -> Job:
    """Start a launcher with these arguments; each rank writes its output into `logs`.

    `<rank>` in an argument stands for the number of the rank.
    """
    logs.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = fork_server()

    processes = []
    files = []
    for rank in range(world_size):
        files.append(logs / f"rank{rank}_{time.monotonic_ns()}.log")
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": f"test {store.port}",
            "OMP_NUM_THREADS": "1",
        }
        own = [argument.replace("<rank>", str(rank)) for argument in arguments]
        rest = (program, own, str(files[-1]), environment, list(faults))
        processes.append(context.Process(target=_rank, args=rest, daemon=True))
        processes[-1].start()
    return Job(processes, files, store)


def _rank(
    program: Program,
    arguments: list[str],
    log: str,
    environment: dict[str, str],
    faults: list[Fault],
) -> None:
    """One rank: its output goes to `log`, and then it is the launcher."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)

    import torch

    torch.set_num_threads(1)
    install(faults, int(environment["RANK"]), attempt=0)
    launch(program, arguments)


def launch(program: str, arguments: Sequence[str]) -> None:
    """Run `launch/train_<program>.py` in this process, which it ends."""
    file = str(ROOT / "launch" / f"train_{program}.py")
    sys.argv = [file, *arguments]
    runpy.run_path(file, run_name="__main__")


@dataclass(frozen=True)
class Setting:
    """A way of training: the launcher, and its arguments but for the output directory."""

    name: str
    program: Program
    arguments: list[str]
    world_size: int = WORLD_SIZE


@dataclass
class Sequel:
    """One run, which faults may end and which is then started again, in a directory of its own.

    Attributes:
        setting: what is trained.
        directory: its output directory.
        root: names this directory and all that the run's processes have open.
    """

    setting: Setting
    directory: Path
    extra: list[str] = field(default_factory=list)

    def start(self, *faults: Fault, keys: Sequence[str] = ()) -> Job:
        """Start it, or go on with it."""
        place = [f"trainer.output_dir={self.directory}"]
        arguments = [*self.setting.arguments, *place, *self.extra, *keys]
        logs = self.directory.with_name(self.directory.name + "_logs")
        return start(self.setting.program, arguments, logs, faults, self.setting.world_size)

    def run(self, *faults: Fault, keys: Sequence[str] = ()) -> Ended:
        """Start it, or go on with it, and wait until it ends; nothing of it may be left."""
        job = self.start(*faults, keys=keys)
        ended = job.wait()
        assert_nothing_is_left(self.directory.parent)
        return ended

    def finish(self, keys: Sequence[str] = ()) -> Ended:
        """Go on to the end, which must come."""
        ended = self.run(keys=keys)
        assert ended.codes == [0] * len(ended.codes), ended.text
        assert not list(self.directory.glob("checkpoints/.*")), "a save was not cleared away"
        return ended

    @property
    def checkpoints(self) -> list[str]:
        """The names of its checkpoints, without those that are being written."""
        return sorted(path.name for path in self.directory.glob("checkpoints/step_*"))

    def state(self, checkpoint: str) -> dict[str, Any]:
        """The trainer's part of the state in a checkpoint."""
        state: dict[str, Any] = read_state(self.directory / "checkpoints" / checkpoint)["trainer"]
        return state

    def rows(self, free: Sequence[str] = FREE) -> list[dict[str, Any]]:
        """The rows of its metrics file, without the numbers that no two runs share."""
        rows = []
        for line in (self.directory / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert without_row(row) == []
            rows.append({key: row[key] for key in row if not key.startswith(tuple(free))})
        return rows

    def weights(self) -> dict[str, bytes]:
        """The bytes of the exported weights, by directory and file name."""
        files: list[Path] = []
        for name in ("actor", "critic", "model"):
            files += sorted(self.directory.glob(f"{name}/*.safetensors"))
        return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


Undisturbed = Callable[[Setting], Sequel]
"""The fixture that gives the run of a setting that no fault has met."""


def assert_same_run(run: Sequel, wanted: Sequel, free: Sequence[str] = ()) -> None:
    """Metrics and weights are equal bit for bit, but for metrics whose names begin with `free`."""
    rows = run.rows([*FREE, *free])
    expected = wanted.rows([*FREE, *free])
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, wished in zip(rows, expected, strict=True):
        differing = {
            key: (row.get(key), wished.get(key))
            for key in row.keys() | wished.keys()
            if not _same(row.get(key), wished.get(key))
        }
        assert not differing, f"step {row['step']}: {differing}"
    assert wanted.weights(), "there are no weights to compare"
    assert run.weights() == wanted.weights()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return bool(one == other)
