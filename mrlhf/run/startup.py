"""How a run starts: the job is joined, seeds are set, and the output directory is taken.

It knows no algorithm and no model.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from mrlhf.config.roots import Root
from mrlhf.config.sections import DistributedSection, RoleSection, TrainerSection
from mrlhf.device import (
    Device,
    end_of_allocation,
    init_distributed,
    pick_device,
    read_launch,
    read_starts,
    seed_everything,
)
from mrlhf.errors import ConfigError, Interrupted, MrlhfError
from mrlhf.log import configure_logging
from mrlhf.metrics import PhaseTimer
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.parallel.stop_points import NeverStop, StopPoints
from mrlhf.run.directory import Wishes, inputs_in, open_directory
from mrlhf.run.hangs import is_time_out
from mrlhf.run.lock import DirectoryLock
from mrlhf.run.watcher import Watcher

logger = logging.getLogger(__name__)

_TIME_TO_SAVE_S = 120.0


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
        stops: the places where all ranks may stop together.
        watcher: watches over this rank; None in a program that nobody may interrupt.
    """

    device: Device
    rank: int
    world_size: int
    factory: GroupFactory
    output_dir: Path
    resume_from: Path | None = None
    lock: DirectoryLock | None = None
    stops: StopPoints = field(default_factory=NeverStop)
    watcher: Watcher | None = None

    @property
    def is_main_rank(self) -> bool:
        """Whether this is the rank that writes files and reports."""
        return self.rank == 0

    def groups(self, name: str, section: RoleSection) -> RoleGroups:
        """The process groups of role `name`."""
        layout = ParallelLayout.for_world(name, self.world_size, section.tp, section.pp)
        return self.factory.role_groups(layout)

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the other ranks if this one fails, and give the directory back."""
        failed = error is not None and not isinstance(error, Interrupted)
        hang = None
        if failed and self.watcher is not None:
            if is_time_out(error):
                hang = self.watcher.explain_time_out()
            self.watcher.tell_failure()
        if self.lock is not None:
            self.lock.release()
        if hang is not None:
            raise hang from error

    def timer(self) -> PhaseTimer:
        """Measures the phases of one step, and lets other ranks know in which phase this one is."""
        current = None if self.watcher is None else self.watcher.phase
        return PhaseTimer(self.device.synchronize, current)


def start(
    config: Root,
    distributed: DistributedSection,
    trainer: TrainerSection,
    seed: int,
) -> Run:
    """Join the job, set the seeds, take the output directory and write the configuration into it.

    From then on a signal is a request to stop, and so is the end of the job's time, which comes
    after `trainer.save_by_minutes` or, where that is null, when Slurm says. The run gives the
    directory back when it is left as a context.

    Raises:
        ConfigError: on every rank: another job holds the directory, or it holds a run that must not
            be touched.
    """
    began = time.time()
    device = pick_device(distributed.device, read_launch().local_rank)
    job = init_distributed(device, distributed.timeout_s)
    rank = job.rank
    configure_logging(rank)
    seed_everything(seed)

    directory = Path(trainer.output_dir)
    lock = None
    outcome: list[Path | MrlhfError | None] = [None]
    if rank == 0:
        lock = DirectoryLock(directory, read_starts().job, _end_at_once)
        outcome = [_take(directory, lock, config, trainer)]

    dist.broadcast_object_list(outcome, src=0)
    resume_from = outcome[0]
    if isinstance(resume_from, MrlhfError):
        raise resume_from

    watcher = Watcher(
        job.store,
        rank,
        job.world_size,
        directory,
        distributed.timeout_s,
        _deadline(began, trainer.save_by_minutes),
    )
    watcher.start()
    return Run(
        device=device,
        rank=rank,
        world_size=job.world_size,
        factory=GroupFactory(distributed.timeout_s),
        output_dir=directory,
        resume_from=resume_from,
        lock=lock,
        stops=watcher.stops,
        watcher=watcher,
    )


def _deadline(began: float, save_by_minutes: float | None) -> float | None:
    """When to stop, in seconds since 1970; None: never."""
    if save_by_minutes is not None:
        return began + 60 * save_by_minutes
    end = end_of_allocation()
    return None if end is None else end - _TIME_TO_SAVE_S


def _take(
    directory: Path,
    lock: DirectoryLock,
    config: Root,
    trainer: TrainerSection,
) -> Path | MrlhfError | None:
    """Lock and open the output directory; returns what to go on from, or the error."""
    starts = read_starts()
    inputs = inputs_in(config)
    wishes = Wishes(trainer.resume, trainer.overwrite, starts.names, starts.again, inputs)
    try:
        lock.acquire()
        return open_directory(directory, config, wishes)
    except MrlhfError as error:
        lock.release()
        return error
    except OSError as error:
        lock.release()
        return ConfigError(f"trainer.output_dir {directory} cannot be used: {error}")


def _end_at_once(message: str) -> None:
    """End the process, whatever it is doing, before it writes what is no longer its own."""
    logger.error("%s", message)
    logging.shutdown()
    os._exit(1)
