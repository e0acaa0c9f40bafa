"""A resumed run's rows and curves are those of a run that was never interrupted."""

import json
import os
from contextlib import closing

import pytest

from mrlhf.config.roots import SFTConfig
from mrlhf.log import read_metrics
from mrlhf.run.reporter import NoReporter, Reporter, ResumePoint, rewind_metrics


def report(directory, steps, resumed=None, trackers=(), offset=0.0):
    config = SFTConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train_files": ["t"]},
            "trainer": {"output_dir": str(directory), "trackers": list(trackers)},
        }
    )
    with closing(Reporter(config, 10, resumed)) as reporter:
        for step in steps:
            reporter.report(step, row(step, offset))


def row(step, offset=0.0):
    return {"loss": 1 / (step + 1) + offset, "none": float("nan")}


def test_rows_after_the_checkpoint_are_dropped_and_the_file_is_as_if_undisturbed(tmp_path):
    report(tmp_path / "whole", range(6))
    report(tmp_path / "run", range(5), offset=0.0)
    report(tmp_path / "run", range(3, 6), ResumePoint(2, row(2)))
    wanted = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == wanted


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_line_and_the_missing_row_of_the_checkpoint(tmp_path, cut):
    report(tmp_path / "whole", range(4))
    report(tmp_path / "run", range(3))
    file = tmp_path / "run" / "metrics.jsonl"
    os.truncate(file, file.stat().st_size - cut)

    report(tmp_path / "run", [3], ResumePoint(2, row(2)))
    assert file.read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_a_row_from_a_manifest_is_the_row_that_was_written(tmp_path):
    report(tmp_path / "whole", range(3))
    last = read_metrics(tmp_path / "whole" / "metrics.jsonl")[2]
    assert last.pop("step") == 2 and last["none"] is None

    report(tmp_path / "run", range(2))
    report(tmp_path / "run", [], ResumePoint(2, last))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (
        tmp_path / "whole" / "metrics.jsonl"
    ).read_bytes()


def test_the_checkpoint_of_another_directory_brings_its_row(tmp_path):
    report(tmp_path, [5], ResumePoint(4, row(4)))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [4, 5]


def test_a_step_that_is_measured_again_has_one_row(tmp_path):
    report(tmp_path / "whole", range(2))
    report(tmp_path / "run", range(3))
    report(tmp_path / "run", [0, 1], ResumePoint(0, {}))
    wanted = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == wanted


def test_a_file_that_needs_nothing_is_not_written(tmp_path):
    report(tmp_path, range(3))
    before = (tmp_path / "metrics.jsonl").stat()
    rewind_metrics(tmp_path / "metrics.jsonl", ResumePoint(2, row(2)))
    after = (tmp_path / "metrics.jsonl").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_broken_line_is_left_out_and_the_file_is_kept(tmp_path, caplog):
    file = tmp_path / "metrics.jsonl"
    damaged = b'{"step": 1}\n{"step": 2, "x\xff\n{"step": 3}\n'
    file.write_bytes(damaged)
    rewind_metrics(file, ResumePoint(3, {"x": 0.5}))
    assert [record["step"] for record in read_metrics(file)] == [1, 3]
    assert (tmp_path / "metrics.damaged_1.jsonl").read_bytes() == damaged
    assert "damaged lines are left out: 2; " in caplog.text

    file.write_bytes(damaged)
    report(tmp_path, [4], ResumePoint(3, row(3)))
    assert [record["step"] for record in read_metrics(file)] == [1, 3, 4]
    assert (tmp_path / "metrics.damaged_2.jsonl").read_bytes() == damaged


def test_tensorboard_shows_each_step_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    report(tmp_path, range(5), trackers=["tensorboard"], offset=10.0)
    report(tmp_path, [3, 4], ResumePoint(2, row(2)), trackers=["tensorboard"])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(scalar.step, scalar.value) for scalar in events.Scalars("loss")]
    wanted = [row(0, 10.0), row(1, 10.0), row(2), row(3), row(4)]
    assert found == [(step, pytest.approx(w["loss"])) for step, w in enumerate(wanted)]


def test_progress_counts_from_the_checkpoint(tmp_path, caplog):
    caplog.set_level("INFO", logger="mrlhf")
    report(tmp_path, [8], ResumePoint(7, row(7)))
    assert "step 8/10" in caplog.text


def test_another_rank_touches_no_file(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"step": 9}) + "\n")
    with closing(NoReporter()) as reporter:
        reporter.report(3, row(3))
    assert json.loads(file.read_text()) == {"step": 9}
