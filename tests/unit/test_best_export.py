"""Which steps export the best model, and that the best one is never lost."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mrlhf.checkpoint.retention import Best
from mrlhf.config.trainer import TrainerSection
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.trainers.best_export import BestExport
from mrlhf.trainers.checkpoints import Checkpoints

METRIC = "val/sums/acc@1"


@pytest.fixture(scope="module")
def world() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


class Model:
    """Exports the number of the step that it stands after, unless the disk is full."""

    def __init__(self, world: dist.ProcessGroup, directory: Path, mode: str = "max") -> None:
        self.step = 0
        self.disk_is_full = False
        self.best = BestExport(
            Best("trainer.export_best", METRIC, mode), self.export, directory, world
        )

    def export(self, directory: Path) -> None:
        if self.disk_is_full:
            raise CheckpointError("no space left")
        directory.mkdir(exist_ok=True)
        (directory / "step").write_text(str(self.step))
        (directory / "model.safetensors").write_text(f"weights of step {self.step}")

    def run(self, values: Sequence[float | None], first: int = 0) -> None:
        for step, value in enumerate(values, start=first):
            self.step = step
            self.best.after_step(step, {} if value is None else {METRIC: value})


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("max", [0.1, None, 0.5, 0.4, 0.5], 2),  # of two best steps the first one
        ("max", [0.6, 0.5], 0),  # training has made it worse
        ("min", [0.6, 0.5, float("nan"), 0.7], 1),
    ],
)
def test_the_best_step_is_exported(
    mode: str, values: list[float | None], best: int, world: dist.ProcessGroup, tmp_path: Path
) -> None:
    model = Model(world, tmp_path / "actor_best", mode)
    assert model.best.summary() == {}
    model.run(values)
    assert (tmp_path / "actor_best" / "step").read_text() == str(best)
    assert model.best.summary() == {
        "best_step": best,
        "best_value": values[best],
        "best_checkpoint": str(tmp_path / "actor_best"),
    }


def test_a_resumed_run_knows_the_best_step(world: dist.ProcessGroup, tmp_path: Path) -> None:
    first = Model(world, tmp_path / "actor_best")
    first.run([0.1, 0.5, 0.2])
    state = first.best.best.state_dict()

    resumed = Model(world, tmp_path / "actor_best")
    resumed.best.restore(state)
    resumed.run([0.4, 0.3], first=3)
    assert (tmp_path / "actor_best" / "step").read_text() == "1"

    elsewhere = Model(world, tmp_path / "other")  # the exported model did not come along
    elsewhere.best.restore(state)
    elsewhere.run([0.4, 0.3], first=3)
    assert (tmp_path / "other" / "step").read_text() == "3"


def test_a_model_of_an_abandoned_step_is_not_taken_for_the_best(
    world: dist.ProcessGroup, tmp_path: Path
) -> None:
    first = Model(world, tmp_path / "actor_best")
    first.run([0.1, 0.5, 0.2])
    state = first.best.state_dict()
    first.run([0.4, 0.6], first=3)  # and step 4 is in no checkpoint

    resumed = Model(world, tmp_path / "actor_best")
    assert not resumed.best.restore(state)
    assert resumed.best.summary() == {}
    resumed.run([0.4, 0.3], first=3)
    assert resumed.best.summary()["best_step"] == 3
    assert (tmp_path / "actor_best" / "step").read_text() == "3"

    again = Model(world, tmp_path / "actor_best")
    assert again.best.restore(resumed.best.state_dict())
    assert again.best.summary()["best_step"] == 3
    assert again.best.state_dict() == resumed.best.state_dict()


def test_a_full_disk_does_not_end_the_run(
    world: dist.ProcessGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(world, tmp_path / "actor_best")
    model.run([0.1])
    model.disk_is_full = True
    with caplog.at_level(logging.ERROR):
        model.run([0.5], first=1)
    assert "the best model so far is not exported: no space left; training goes on" in caplog.text

    model.disk_is_full = False
    model.run([0.3], first=2)  # worse than step 1, better than what is on the disk
    assert (tmp_path / "actor_best" / "step").read_text() == "2"


@pytest.mark.parametrize("key", ["keep_best", "export_best"])
def test_the_validation_before_training_shows_a_wrong_name(
    key: str, world: dist.ProcessGroup, tmp_path: Path
) -> None:
    def before_training(metric: str) -> None:
        trainer = TrainerSection.model_validate({"output_dir": str(tmp_path), key: metric})
        data = SimpleNamespace(train_files=[])
        config = SimpleNamespace(trainer=trainer, data=data, roles=dict, model_dump=dict)
        machine = SimpleNamespace(compute_on_leader=lambda compute: compute())
        factory = SimpleNamespace(machine=machine)
        run = SimpleNamespace(output_dir=tmp_path, lock=None, is_main_rank=True, factory=factory)

        checkpoints = Checkpoints(
            run,  # type: ignore[arg-type]
            config,  # type: ignore[arg-type]
            {"model": None},  # type: ignore[dict-item]
            10,
            lambda directory: None,
            has_validation=True,
        )
        checkpoints.before_training({"val/sums/reward_mean": 0.5})

    before_training("val/sums/reward_mean")
    before_training("actor/entropy")  # is measured from the first step on
    with pytest.raises(ConfigError, match=rf"^trainer\.{key} is val/sums/acc@1, which this run"):
        before_training("val/sums/acc@1")
