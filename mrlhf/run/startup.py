"""How a run starts: the job is joined, seeds are set, and the output directory is taken.

Nothing is written there until `Run.begin`, so that a start that is refused changes no run.

It knows no algorithm and no model.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TextIO, cast

import torch.distributed as dist

from mrlhf.config.roots import Root
from mrlhf.config.sections import RoleSection
from mrlhf.config.trainer import DistributedSection, TrainerSection
from mrlhf.device import Device, pick_device, seed_everything
from mrlhf.errors import CheckpointError, ConfigError, Interrupted, MrlhfError
from mrlhf.job import (
    STORE_S,
    Job,
    connect_before_start,
    end_of_allocation,
    init_distributed,
    read_launch,
    read_starts,
)
from mrlhf.log import configure_logging
from mrlhf.metrics import PhaseTimer
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.stop_points import NeverStop, StopPoints
from mrlhf.run.board import Board
from mrlhf.run.deadline import Deadline
from mrlhf.run.directory import (
    METRICS,
    Opening,
    Wishes,
    describe_opening,
    inputs_in,
    open_directory,
    plan_opening,
)
from mrlhf.run.failures import FAILED, Failures, Told, explain, log_failure
from mrlhf.run.hangs import is_time_out
from mrlhf.run.leaving import leave
from mrlhf.run.lock import DirectoryLock
from mrlhf.run.monitor import Monitor
from mrlhf.run.status import StatusFile
from mrlhf.run.timeline import Timeline
from mrlhf.run.view import View, console_of_log, is_drawn
from mrlhf.run.watcher import Watcher
from mrlhf.terminal import LinesAboveView


@dataclass(frozen=True)
class Run:
    """This process's part in the job.

    Attributes:
        device: where it computes.
        rank: its number.
        world_size: processes of the job.
        factory: creates the process groups, in the same order on every rank.
        output_dir: where the run writes.
        resume_from: a checkpoint to go on from, or a folder of checkpoints, of which the newest
            whole one is meant; None to begin anew.
        lock: keeps other jobs out of `output_dir`; the main rank holds it.
        changes: what the main rank does in `output_dir` when the run begins, in this order.
        stops: the places where all ranks may stop together.
        watcher: watches over this rank; None in a program that nobody may interrupt.
        failures: where the ranks agree on why the job fails; None if each one says it for itself.
        timeline: where this rank writes down its phases; None: nowhere.
        deadline: when this job stops by itself; the main rank's counts.
        board: where the run stands.
        monitor: shows the board to people and programs; None on other ranks than the main one, and
            in a program that nobody watches.
    """

    device: Device
    rank: int
    world_size: int
    factory: GroupFactory
    output_dir: Path
    resume_from: Path | None = None
    lock: DirectoryLock | None = None
    changes: list[Callable[[], None]] = field(default_factory=list)
    stops: StopPoints = field(default_factory=NeverStop)
    watcher: Watcher | None = None
    failures: Failures | None = None
    timeline: Timeline | None = None
    deadline: Deadline = field(default_factory=Deadline)
    board: Board = field(default_factory=Board)
    monitor: Monitor | None = None

    @property
    def is_main_rank(self) -> bool:
        """Whether this is the rank that writes files and reports."""
        return self.rank == 0

    def groups(self, name: str, section: RoleSection) -> RoleGroups:
        """The process groups of role `name`."""
        layout = ParallelLayout.for_world(name, self.world_size, AxisSizes.of(section))
        return self.factory.role_groups(layout)

    def begin(self) -> None:
        """Change the output directory, now that all has been checked; every rank calls it once.

        Raises:
            ConfigError: the directory cannot be written.
        """
        dist.barrier()  # another rank may still find a reason to refuse the start
        try:
            while self.changes:
                self.changes.pop(0)()
        except OSError as error:
            raise _unusable(self.output_dir, error) from error

        dist.barrier()  # an earlier run that has to go is gone, and no file of this one with it
        if self.timeline is not None:
            self.timeline.begin()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the directory back, and say why the job fails, if it does.

        Raises:
            Told: this rank has failed, and it or another one has said why.
            HangError: it has waited for another one for too long, and `failures` is None.
        """
        if self.monitor is not None:
            self.monitor.close_view()
        reason = None if isinstance(error, Interrupted) else error
        hang = None
        if self.watcher is not None and is_time_out(reason):
            hang = self.watcher.explain_time_out()
            reason = hang
        if reason is None and self.monitor is not None:
            self.monitor.end("finished" if error is None else "interrupted", str(error or ""))
        if self.lock is not None and self.changes:
            self.lock.withdraw()
        elif self.lock is not None:
            self.lock.release()

        if reason is not None and self.failures is not None:
            at_start = self.watcher is None or not self.watcher.has_begun
            own = explain(reason, self.rank, at_start)
            failure = self.failures.tell(own, log_failure)
            if self.monitor is not None:
                self.monitor.end("failed", failure.text)
            raise Told(failure) from error
        if hang is not None:
            raise hang from error

    def require_directory(self, model: Path) -> None:
        """Make sure that what the run has written is still there; the main rank calls it.

        Args:
            model: where the trained model is.

        Raises:
            CheckpointError: the output directory or the metrics file was deleted during the run.
        """
        try:
            if self.lock is not None:
                self.lock.verify()
            if not (self.output_dir / METRICS).is_file():
                raise CheckpointError(
                    f"{self.output_dir / METRICS} was deleted during the run, so its metrics are "
                    "lost"
                )
        except CheckpointError as error:
            raise CheckpointError(f"{error}; the trained model is in {model}") from error

    def timer(self) -> PhaseTimer:
        """Measures the phases of one step, and lets other ranks know in which phase this one is."""
        return PhaseTimer(self.device.synchronize, self.board.phase)

    def record_phases(self, step: int, timer: PhaseTimer) -> None:
        """Write down when this rank was in which phase of training step `step`."""
        if self.timeline is not None:
            self.timeline.write(step, timer.spans)


def start(
    config: Root,
    distributed: DistributedSection,
    trainer: TrainerSection,
    seed: int,
) -> Run:
    """Join the job, set the seeds, take the output directory and find out what it holds.

    From then on a signal is a request to stop, and so is the end of the job's time, which comes
    after `trainer.save_by_minutes` or, where that is null, when Slurm says. The run gives the
    directory back when it is left as a context.

    Raises:
        Told: the job cannot start, and one rank has said why: another job holds the directory, or
            it holds a run that must not be touched, or a rank has no device or does not come.
    """
    began = time.time()
    deadline = _deadline(trainer.save_by_minutes)
    launch = read_launch()
    before = Failures(
        connect_before_start(max(STORE_S, distributed.timeout_s)), launch.rank, launch.world_size
    )
    try:
        device = pick_device(distributed.device, launch.local_rank)
        job = init_distributed(device, distributed.timeout_s, before.raise_if_told)
    except Exception as error:
        raise _told(before, error, launch.rank) from error

    failures = Failures(dist.PrefixStore("failures", job.store), job.rank, job.world_size)
    try:
        joined = Joined(device, job, failures, began, deadline)
        return _begin(config, distributed, trainer, seed, joined)
    except Exception as error:
        raise _told(failures, error, job.rank) from error


def _told(failures: Failures, error: Exception, rank: int) -> Told:
    if isinstance(error, Told):
        return error
    return Told(failures.tell(explain(error, rank, at_start=True), log_failure))


@dataclass(frozen=True)
class Joined:
    """What a process has once it has joined the job.

    Attributes:
        device: where it computes.
        job: the job.
        failures: where the ranks agree on why the job fails.
        began: when it started, in seconds since 1970.
        deadline: when it stops by itself.
    """

    device: Device
    job: Job
    failures: Failures
    began: float
    deadline: Deadline


def _begin(
    config: Root,
    distributed: DistributedSection,
    trainer: TrainerSection,
    seed: int,
    joined: Joined,
) -> Run:
    """Set the seeds, take the output directory and watch over this rank; see `start`."""
    job = joined.job
    configure_logging(job.rank, console_of_log(trainer.console))
    seed_everything(seed)

    directory = Path(trainer.output_dir)
    lock = None
    changes: list[Callable[[], None]] = []
    outcome: list[Path | MrlhfError | None] = [None]
    if job.rank == 0:
        lock = DirectoryLock(directory, read_starts().job, partial(leave, FAILED))
        wishes = _wishes(config, trainer)
        opening = _take(directory, lock, wishes)
        if isinstance(opening, Opening):
            outcome = [opening.resume_from]
            changes.append(partial(open_directory, directory, config, wishes, opening))
            changes.append(lock.remove_earlier)
        else:
            outcome = [opening]

    dist.broadcast_object_list(outcome, src=0)
    resume_from = outcome[0]
    if isinstance(resume_from, MrlhfError):
        raise resume_from

    board = Board()
    monitor = None
    if job.rank == 0:
        monitor = Monitor(board, View(board, directory) if is_drawn(trainer.console) else None)
        changes.append(partial(monitor.write_to, StatusFile(directory, job.world_size)))
    if is_drawn(trainer.console):
        # The view, which is built by now and writes to the terminal itself, stands below them.
        sys.stderr = cast(TextIO, LinesAboveView(sys.stderr))
    watcher = Watcher(
        job.store,
        job.rank,
        job.world_size,
        directory,
        distributed.timeout_s,
        joined.deadline,
        joined.failures,
        board.phase,
        None if monitor is None else partial(_end_failed, monitor, lock, changes),
    )
    watcher.start()
    if monitor is not None:
        monitor.start()
    return Run(
        device=joined.device,
        rank=job.rank,
        world_size=job.world_size,
        factory=GroupFactory(distributed.timeout_s),
        output_dir=directory,
        resume_from=resume_from,
        lock=lock,
        changes=changes,
        stops=watcher.stops,
        watcher=watcher,
        failures=joined.failures,
        timeline=_timeline(directory, trainer.timeline_freq, joined),
        deadline=joined.deadline,
        board=board,
        monitor=monitor,
    )


def _end_failed(
    monitor: Monitor, lock: DirectoryLock | None, changes: Collection[object], text: str
) -> None:
    """Say that the run has failed, or leave no trace of it if it has not begun."""
    monitor.end("failed", text)
    if lock is not None and changes:
        lock.withdraw()


def _timeline(directory: Path, every: int, joined: Joined) -> Timeline:
    """Where this rank writes down its phases, with a description of the process."""
    process = {**joined.device.describe(), "ranks": joined.job.world_size, "began": joined.began}
    return Timeline(directory, joined.job.rank, every, process)


def _deadline(save_by_minutes: float | None) -> Deadline:
    """When a job that starts now stops by itself."""
    now = time.monotonic()
    if save_by_minutes is not None:
        return Deadline(stop_at=now + 60 * save_by_minutes)
    end = end_of_allocation()  # in seconds since 1970
    return Deadline(end=None if end is None else now + end - time.time())


def foresee(config: Root, trainer: TrainerSection) -> str:
    """What a start would do with the output directory now, in words; nothing is written."""
    directory = Path(trainer.output_dir)
    holder = DirectoryLock(directory, None, partial(leave, FAILED)).living_holder()
    if holder is not None:
        return f"a start would be refused: {holder} is using {directory}"
    return describe_opening(directory, _wishes(config, trainer))


def _wishes(config: Root, trainer: TrainerSection) -> Wishes:
    starts = read_starts()
    return Wishes(trainer.resume, trainer.overwrite, starts.names, starts.again, inputs_in(config))


def _take(directory: Path, lock: DirectoryLock, wishes: Wishes) -> Opening | MrlhfError:
    """Lock the output directory; returns what to do with it, or the error."""
    try:
        lock.acquire()
        return plan_opening(directory, wishes)
    except MrlhfError as error:
        lock.withdraw()
        return error
    except OSError as error:
        lock.withdraw()
        return _unusable(directory, error)


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"trainer.output_dir {directory} cannot be used: {error}")
