"""How a run starts: the job is joined, seeds are set, and the configuration is written down.

It knows no algorithm and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mrlhf.config.load import dump_yaml
from mrlhf.config.roots import Root
from mrlhf.config.sections import DistributedSection, RoleSection
from mrlhf.device import Device, init_distributed, pick_device, read_launch, seed_everything
from mrlhf.log import configure_logging
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class Run:
    """This process's part in the job.

    Attributes:
        device: where it computes.
        rank: its number.
        world_size: processes of the job.
        factory: creates the process groups, in the same order on every rank.
        output_dir: where the run writes.
    """

    device: Device
    rank: int
    world_size: int
    factory: GroupFactory
    output_dir: Path

    @property
    def is_main_rank(self) -> bool:
        """Whether this is the rank that writes files and reports."""
        return self.rank == 0

    def groups(self, name: str, section: RoleSection) -> RoleGroups:
        """The process groups of role `name`."""
        layout = ParallelLayout.for_world(name, self.world_size, section.tp, section.pp)
        return self.factory.role_groups(layout)


def start(config: Root, distributed: DistributedSection, output_dir: str, seed: int) -> Run:
    """Join the job, set the seeds, and write the whole configuration into the output directory."""
    device = pick_device(distributed.device, read_launch().local_rank)
    rank, world_size = init_distributed(device, distributed.timeout_s)
    configure_logging(rank)
    seed_everything(seed)

    directory = Path(output_dir)
    if rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        (directory / "metrics.jsonl").unlink(missing_ok=True)

    return Run(device, rank, world_size, GroupFactory(distributed.timeout_s), directory)
