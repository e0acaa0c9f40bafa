"""How a run starts: the job is joined, seeds are set, and the configuration is written down.

It knows no algorithm and no model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mrlhf.config.load import dump_yaml
from mrlhf.config.roots import Root
from mrlhf.config.sections import DistributedSection, RoleSection
from mrlhf.device import (
    Device,
    end_of_allocation,
    init_distributed,
    pick_device,
    read_launch,
    seed_everything,
)
from mrlhf.errors import Interrupted
from mrlhf.log import configure_logging
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.parallel.stop_points import NeverStop, StopPoints
from mrlhf.run.watcher import Watcher

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
        stops: the places where all ranks may stop together.
        watcher: watches over this rank; None in a program that nobody may interrupt.
    """

    device: Device
    rank: int
    world_size: int
    factory: GroupFactory
    output_dir: Path
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

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run the body of a `with` statement, and tell the other ranks if it fails."""
        try:
            yield
        except Interrupted:
            raise
        except BaseException:
            if self.watcher is not None:
                self.watcher.tell_failure()
            raise


def start(
    config: Root,
    distributed: DistributedSection,
    output_dir: str,
    seed: int,
    save_by_minutes: float | None = None,
) -> Run:
    """Join the job, set the seeds, and write the whole configuration into the output directory.

    From then on a signal is a request to stop, and so is the end of the job's time, which comes
    after `save_by_minutes` or, where that is None, when Slurm says.
    """
    began = time.time()
    device = pick_device(distributed.device, read_launch().local_rank)
    job = init_distributed(device, distributed.timeout_s)
    rank = job.rank
    configure_logging(rank)
    seed_everything(seed)

    directory = Path(output_dir)
    if rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        (directory / "metrics.jsonl").unlink(missing_ok=True)

    deadline = _deadline(began, save_by_minutes)
    watcher = Watcher(job.store, rank, job.world_size, deadline)
    watcher.start()
    factory = GroupFactory(distributed.timeout_s)
    return Run(device, rank, job.world_size, factory, directory, watcher.stops, watcher)


def _deadline(began: float, save_by_minutes: float | None) -> float | None:
    """When to stop, in seconds since 1970; None: never."""
    if save_by_minutes is not None:
        return began + 60 * save_by_minutes
    end = end_of_allocation()
    return None if end is None else end - _TIME_TO_SAVE_S
