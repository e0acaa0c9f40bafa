"""How a run starts: it joins the job, sets the seeds and takes the output directory.

Nothing is written there until `Run.begin`, so that a start that is refused changes no run. This
file knows no algorithm and no model.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

import torch.distributed as dist

from mrlhf.checkpoint.output_files import METRICS
from mrlhf.config.roots import AnyConfig, PPOConfig
from mrlhf.config.sections import RoleSection
from mrlhf.config.trainer import TrainerSection
from mrlhf.device import Device, pick_device, seed_everything
from mrlhf.errors import CheckpointError, ConfigError, Interrupted, MrlhfError
from mrlhf.log import configure_logging
from mrlhf.nvidia import fault_of_compiler
from mrlhf.parallel.agreed_stop import AgreedStop
from mrlhf.parallel.collectives import from_first, wait_for_all
from mrlhf.parallel.device_memory import DeviceMemory
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.job import (
    STORE_S,
    Job,
    connect_before_start,
    end_of_allocation,
    init_distributed,
    read_launch,
    read_launch_history,
)
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.phases import Phases, seconds_by_phase
from mrlhf.run.board import Board, Monitor, Timeline
from mrlhf.run.directory import (
    OpeningOptions,
    begun_keys,
    describe_opening,
    inputs_in,
    open_directory,
    plan_opening,
)
from mrlhf.run.failures import FAILED, FailureReported, Failures, explain, log_failure
from mrlhf.run.hangs import is_time_out
from mrlhf.run.leaving import leave
from mrlhf.run.library_variables import set_allocator
from mrlhf.run.lock import DirectoryLock
from mrlhf.run.profiles import Profiles
from mrlhf.run.terminal import LinesAboveView, TerminalView, console_of_log, is_drawn
from mrlhf.run.watcher import Deadline, Watcher


@dataclass(frozen=True)
class Run:
    """This process's part in the job."""

    device: Device
    rank: int
    world_size: int
    factory: GroupFactory  # creates the process groups, in the same order on every rank
    output_dir: Path
    # A checkpoint to continue from, or a folder of checkpoints, of which the newest whole one is
    # meant; None for a new run.
    resume_from: Path | None = None
    # Keeps other jobs out of `output_dir`; the main rank holds it.
    lock: DirectoryLock | None = None
    # What the main rank does in `output_dir` when the run begins, in this order.
    changes: list[Callable[[], None]] = field(default_factory=list)
    watcher: Watcher | None = None  # None in a program that nobody may interrupt
    # Where the ranks agree on why the job fails; None if each one reports for itself.
    failures: Failures | None = None
    timeline: Timeline | None = None  # where this rank writes down its phases; None: nowhere
    profiles: Profiles = field(default_factory=Profiles)
    # When this job stops by itself; the main rank's counts.
    deadline: Deadline = field(default_factory=Deadline)
    board: Board = field(default_factory=Board)
    # Shows the board to people and programs; None on other ranks than the main one, and in a
    # program that nobody watches.
    monitor: Monitor | None = None

    @property
    def is_main_rank(self) -> bool:
        """Whether this is the rank that writes files and reports."""
        return self.rank == 0

    @property
    def phases(self) -> Phases:
        """The phases of this rank, and where all ranks may stop together."""
        return self.board.phases

    def groups(self, name: str, section: RoleSection) -> RoleGroups:
        """The process groups of role `name`."""
        layout = ParallelLayout.for_world(name, self.world_size, AxisSizes.of(section))
        return self.factory.role_groups(layout)

    def begin(self) -> None:
        """Change the output directory, now that all checks have passed; every rank calls it once.

        Raises:
            ConfigError: the directory cannot be written.
        """
        wait_for_all(None)  # another rank may still find a reason to refuse the start
        try:
            while self.changes:
                self.changes.pop(0)()
        except OSError as error:
            raise _unusable(self.output_dir, error) from error

        wait_for_all(None)  # an earlier run that has to go is gone, and no file of this one with it
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
        """Give the directory back, and report why the job fails, if it does.

        Raises:
            FailureReported: this rank has failed, and it or another one has reported why.
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
            own = replace(own, text=own.text + self.profiles.after(reason))
            failure = self.failures.report(own, log_failure)
            if self.monitor is not None:
                self.monitor.end("failed", failure.text)
            raise FailureReported(failure) from error
        if hang is not None:
            raise hang from error

    def require_directory(self, model: Path) -> None:
        """Make sure that the run's files are still there; the main rank calls it.

        Raises:
            CheckpointError: the output directory or the metrics file was deleted during the run;
                the trained model is in `model`.
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

    def end_step(self, step: int) -> dict[str, float]:
        """Write down the phases of training step `step`; returns the seconds of each."""
        spans = self.phases.take_spans()
        if self.timeline is not None:
            self.timeline.write(step, spans)
        return seconds_by_phase(spans)


def start(config: AnyConfig) -> Run:
    """Join the job, set the seeds, lock the output directory and plan what to do with it.

    From then on a signal is a request to stop, as is the end of the job's time
    (`trainer.save_by_minutes`, or that of Slurm). The run, as a context, gives the directory back.
    FailureReported says that the job cannot start, and that one rank has reported why.
    """
    context = _join(config)
    try:
        return _begin(config, context)
    except Exception as error:
        raise _reported(context.failures, error, context.job.rank) from error


def start_without_directory(config: AnyConfig) -> Run:
    """Join the job and set the seeds, for a program that leaves no run; a signal ends it at once.

    Raises:
        FailureReported: as `start`.
    """
    context = _join(config)
    seed_everything(config.seed)
    job = context.job
    groups = GroupFactory(config.distributed.timeout_s)
    place = (context.device, job.rank, job.world_size, groups, Path())
    return Run(*place, failures=context.failures)


def _join(config: AnyConfig) -> JobContext:
    """Choose this rank's device, and join the job."""
    began = time.time()
    distributed = config.distributed
    deadline = _deadline(config.trainer.save_by_minutes)
    launch = read_launch()
    before = Failures(
        connect_before_start(max(STORE_S, distributed.timeout_s)), launch.rank, launch.world_size
    )
    set_allocator(config.rollout.engine if isinstance(config, PPOConfig) else "native")
    try:
        device = pick_device(distributed.device, launch.local_rank)
        if device.kind == "cuda" and (fault := fault_of_compiler()) is not None:
            raise ConfigError("; ".join(fault))
        job = init_distributed(device, distributed.timeout_s, before.raise_if_reported)
    except Exception as error:
        raise _reported(before, error, launch.rank) from error

    failures = Failures(dist.PrefixStore("failures", job.store), job.rank, job.world_size)
    return JobContext(device, job, failures, began, deadline)


def _reported(failures: Failures, error: Exception, rank: int) -> FailureReported:
    if isinstance(error, FailureReported):
        return error
    return FailureReported(failures.report(explain(error, rank, at_start=True), log_failure))


@dataclass(frozen=True)
class JobContext:
    """A process that has joined the job, and the means to run and to fail in it."""

    device: Device
    job: Job
    failures: Failures
    began: float  # when it started, in seconds since 1970
    deadline: Deadline


def _begin(config: AnyConfig, context: JobContext) -> Run:
    """Set the seeds, take the output directory and watch over this rank; see `start`."""
    job = context.job
    trainer = config.trainer
    timeout_s = config.distributed.timeout_s
    configure_logging(job.rank, console_of_log(trainer.console))
    seed_everything(config.seed)

    directory = Path(trainer.output_dir)
    changes: list[Callable[[], None]] = []
    lock, resume_from = _take(config, job.rank, changes)

    stops = AgreedStop(dist.PrefixStore("stop", job.store), job.rank, job.world_size)
    bound = config.distributed.device_memory_mb
    memory = DeviceMemory(None if bound is None else int(bound * 2**20))
    phases = Phases(stops, context.device.synchronize, memory)
    board = Board(phases)
    monitor = _monitor(board, directory, job, trainer)
    if monitor is not None:
        changes.append(monitor.begin)

    def end_failed(text: str) -> None:
        """Show that the run has failed; if it has not begun, leave no trace of it."""
        if monitor is not None:
            monitor.end("failed", text)
        if lock is not None and changes:
            lock.withdraw()

    watched = (phases, context.deadline, context.failures, end_failed)
    watcher = Watcher(job.store, job.rank, job.world_size, directory, timeout_s, *watched)
    watcher.start()
    if monitor is not None:
        monitor.start()
    process = {**context.device.describe(), "ranks": job.world_size, "began": context.began}
    timeline = Timeline(directory, job.rank, trainer.timeline_freq, process)
    return Run(
        device=context.device,
        rank=job.rank,
        world_size=job.world_size,
        factory=GroupFactory(timeout_s),
        output_dir=directory,
        resume_from=resume_from,
        lock=lock,
        changes=changes,
        watcher=watcher,
        failures=context.failures,
        timeline=timeline,
        profiles=Profiles(trainer.profile, context.device.kind, job.rank, directory),
        deadline=context.deadline,
        board=board,
        monitor=monitor,
    )


def _monitor(board: Board, directory: Path, job: Job, trainer: TrainerSection) -> Monitor | None:
    """The monitor, on the main rank; if it draws a view, the lines of all ranks stand above it."""
    monitor = None
    drawn = is_drawn(trainer.console)
    if job.rank == 0:
        view = TerminalView(str(directory)) if drawn else None
        monitor = Monitor(board, directory, job.world_size, view)
    if drawn:
        # The view, which is built by now, writes to the terminal itself.
        sys.stderr = cast(TextIO, LinesAboveView(sys.stderr))
    return monitor


def _deadline(save_by_minutes: float | None) -> Deadline:
    """The moment at which a job that starts now stops by itself."""
    now = time.monotonic()
    if save_by_minutes is not None:
        return Deadline(stop_at=now + 60 * save_by_minutes)
    end = end_of_allocation()  # in seconds since 1970
    return Deadline(end=None if end is None else now + end - time.time())


def foresee(config: AnyConfig) -> str:
    """Say what a start would do with the output directory now; nothing is written."""
    directory = Path(config.trainer.output_dir)
    holder = DirectoryLock(directory, None, partial(leave, FAILED)).living_holder()
    if holder is not None:
        return f"a start would be refused: {holder} is using {directory}"
    return describe_opening(directory, _opening_options(config))


def first_day_of(config: AnyConfig) -> str:
    """`data.date`, or the day of the first start of the run that a start would go on with."""
    return config.data.date or begun_with(config).get("data.date") or date.today().isoformat()


def begun_with(config: AnyConfig) -> dict[str, Any]:
    """The keys of the run that a start would go on with; none of a new one."""
    return begun_keys(Path(config.trainer.output_dir), _opening_options(config))


def _opening_options(config: AnyConfig) -> OpeningOptions:
    trainer = config.trainer
    history = read_launch_history()
    return OpeningOptions(
        trainer.resume, trainer.overwrite, history.names, history.again, inputs_in(config)
    )


def _take(
    config: AnyConfig, rank: int, changes: list[Callable[[], None]]
) -> tuple[DirectoryLock | None, Path | None]:
    """Lock the output directory on the main rank, and plan what to do with it; every rank calls it.

    The plan goes into `changes`. Returns the lock and the checkpoint to continue from.
    """
    directory = Path(config.trainer.output_dir)
    lock = None
    outcome: Path | Exception | None = None
    if rank == 0:
        lock = DirectoryLock(directory, read_launch_history().job, partial(leave, FAILED))
        options = _opening_options(config)
        try:
            lock.acquire()
            opening = plan_opening(directory, options)
            outcome = opening.resume_from
            changes.append(partial(open_directory, directory, config, options, opening))
            changes.append(lock.remove_earlier)
        except (MrlhfError, OSError) as error:
            lock.withdraw()
            outcome = error if isinstance(error, MrlhfError) else _unusable(directory, error)

    outcome = from_first(outcome, None)
    if isinstance(outcome, Exception):
        raise outcome
    return lock, outcome


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(f"trainer.output_dir {directory} cannot be used: {error}")
