"""When a checkpoint is due, which is best, and which stay on disk."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mrlhf.checkpoint.manifest import MANIFEST, with_manifest
from mrlhf.checkpoint.retention import Best, delete_old, is_due
from mrlhf.config.trainer import TrainerSection
from mrlhf.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "step", "seconds", "improved", "due"),
    [
        ({"save_freq": 3}, 3, 0.0, False, True),
        ({"save_freq": 3}, 4, 0.0, False, False),
        ({"save_freq": 3}, 10, 0.0, False, True),  # the last step
        ({}, 10, 0.0, False, False),
        ({}, 4, 1799.0, False, False),
        ({}, 4, 1800.0, False, True),
        ({"save_every_minutes": None}, 4, 1e9, False, False),
        ({"save_every_minutes": None}, 4, 0.0, True, True),
    ],
)
def test_a_checkpoint_is_due(
    keys: dict[str, float], step: int, seconds: float, improved: bool, due: bool
) -> None:
    section = TrainerSection(output_dir="out", **keys)  # type: ignore[arg-type]
    assert is_due(section, step, 10, seconds, improved) == due


def test_the_best_step_has_the_highest_finite_value() -> None:
    best = Best("trainer.keep_best", "val/acc", "max")
    values = [math.nan, 0.2, 0.1, math.inf, 0.2, 0.3]
    improved = [best.is_improved_by(step, {"val/acc": value}) for step, value in enumerate(values)]
    assert improved == [False, True, False, False, False, True]
    assert not best.is_improved_by(6, {"loss": 9.0})
    assert (best.step, best.value) == (5, 0.3)


def test_the_lowest_value_is_best_if_the_mode_says_so_and_lasts() -> None:
    best = Best("trainer.keep_best", "loss", "min")
    assert best.is_improved_by(1, {"loss": 3.0}) and not best.is_improved_by(2, {"loss": 4.0})
    resumed = Best("trainer.keep_best", "loss", "min")
    resumed.load_state_dict(best.state_dict())
    assert not resumed.is_improved_by(3, {"loss": 3.5}) and resumed.is_improved_by(4, {"loss": 1.0})

    other = Best("trainer.keep_best", "val/acc", "max")
    other.load_state_dict(best.state_dict())
    assert other.step is None


def test_a_metric_that_is_not_measured_is_refused() -> None:
    Best("trainer.keep_best", None, "max").check({"loss"})
    with pytest.raises(ConfigError, match=r"val/sums/acc, .* did you mean val/sum/acc@1\?"):
        Best("trainer.keep_best", "val/sums/acc", "max").check(
            {"val/sum/acc@1", "val/sum/reward", "loss"}
        )
    with pytest.raises(ConfigError, match=r"val/zz, which this run does not measure$"):
        Best("trainer.keep_best", "val/zz", "max").check({"val/sum/acc@1", "val/sum/reward"})


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    for name in ("step_000001", "step_000002", "step_000003_interrupted", "step_000004"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    (tmp_path / "step_000005").mkdir()  # no manifest, so no checkpoint

    delete_old(tmp_path, max_to_keep=1, best_step=1)
    assert [path.name for path in with_manifest(tmp_path)] == ["step_000004", "step_000001"]
    delete_old(tmp_path, max_to_keep=None, best_step=None)
    assert [path.name for path in with_manifest(tmp_path)] == ["step_000004", "step_000001"]
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "step_000005"


def test_an_interrupted_step_stays_while_it_is_the_newest(tmp_path: Path) -> None:
    for name in ("step_000003", "step_000003_interrupted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
    delete_old(tmp_path, max_to_keep=2, best_step=None)
    names = [path.name for path in with_manifest(tmp_path)]
    assert names == ["step_000003_interrupted", "step_000003"]
