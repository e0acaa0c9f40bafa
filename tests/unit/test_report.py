"""What a run reports at its end, and the summaries of runs that follow each other."""

import json
import logging
import sys

import pytest

from mrlhf.checkpoint.output_files import write_summary
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.run.reporter import closing_report, plot_curves, ppo_achievements
from tests.e2e.programs import run_program, succeed

RECORDS = [
    {"step": 0, "val/a/acc@1": 0.25, "val/b/acc@1": 0.75, "val/a/reward_mean": 0.5},
    {
        "step": 1,
        "critic/score/mean": 0.1,
        "actor/reward_kl_penalty": 0.01,
        "timing_s/gen": 1.5,
        "timing_s/adv": 0.25,
    },
    {
        "step": 2,
        "critic/score/mean": 0.9,
        "actor/reward_kl_penalty": 0.02,
        "timing_s/gen": 2.0,
        "timing_s/adv": None,
        "val/a/acc@1": 0.5,
        "val/b/acc@1": 1.0,
        "val/a/reward_mean": 0.75,
    },
]


def summary_of(tmp_path, records):
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines)
    closing_report(tmp_path, {**ppo_achievements(tmp_path), "seconds": 12.3})
    return json.loads((tmp_path / "summary.json").read_text())


def test_time_outside_of_a_step_stands_beside_it(tmp_path, caplog):
    record = {"step": 1, "timing_s/step": 6, "timing_s/testing": 3, "timing_s/save_checkpoint": 1}
    with caplog.at_level(logging.INFO):
        summary_of(tmp_path, [record])
    assert "  time: step 60%, testing 30%, save_checkpoint 10%\n" in caplog.text


def test_the_closing_report(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        summary = summary_of(tmp_path, RECORDS)
    assert summary == {
        "start_accuracy": 0.5,
        "final_accuracy": 0.75,
        "reward_start": 0.5,
        "reward_final": 0.75,
        "kl_final": 0.02,
        "seconds": 12.3,
    }

    assert (tmp_path / "curves.png").stat().st_size > 0
    lines = caplog.messages[-1].split("\n")
    assert lines[:7] == [
        "finished",
        "  accuracy: 0.5 -> 0.75",
        "  reward: 0.5 -> 0.75",
        "  kl_final: 0.02",
        "  seconds: 12.3",
        "  time: gen 93%, adv 7%",
        f"  curves: {tmp_path / 'curves.png'}",
    ]
    assert f"mrlhf report {tmp_path} " in lines[8] and len(lines) <= 12
    assert "goes on" not in caplog.messages[-1]

    checkpoint = tmp_path / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    with caplog.at_level(logging.INFO):
        summary_of(tmp_path, RECORDS)
    assert "a larger trainer.total_steps goes on" in caplog.messages[-1]


SPOILED = [
    {"step": step, "val/a/acc@1": share, "se/val/a/acc@1": 0.03, "actor/reward_kl_penalty": 0.5}
    for step, share in ((0, 0.04), (10, 0.86), (20, 0.63), (40, 0.14))
]


@pytest.mark.parametrize(
    ("kept", "summary", "place"),
    [
        ("step_000010", {}, "checkpoints/step_000010"),
        ("step_000040", {}, "not kept; see trainer.export_best=val/a/acc@1"),
        ("step_000040", {"best_step": 10, "best_checkpoint": "o/actor_best"}, "o/actor_best"),
    ],
)
def test_a_spoiled_run_says_where_its_best_model_is_and_does_not_just_go_on(
    kept, summary, place, tmp_path, caplog
):
    checkpoint = tmp_path / "checkpoints" / kept
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SPOILED))
    with caplog.at_level(logging.INFO):
        closing_report(tmp_path, summary)
    (best,) = (line for line in caplog.text.splitlines() if line.startswith("  best: "))
    assert best.startswith("  best: val/a/acc@1 0.86 after step 10; its model: ")
    assert best.endswith(place)
    assert "change algorithm.kl_ctrl.kl_coef: held_out at step 20" in caplog.text
    assert "goes on" not in caplog.text


def test_without_validation_the_reward_is_that_of_training(tmp_path):
    summary = summary_of(tmp_path, RECORDS[1:2])
    assert (summary["reward_start"], summary["reward_final"]) == (0.1, 0.1)
    assert "start_accuracy" not in summary


def test_the_summary_is_of_the_test_prompts_if_there_are_any(tmp_path):
    ends = [
        {**RECORDS[0], "test/a/acc@1": 0.125, "test/a/reward_mean": -1.0},
        *RECORDS[1:],
        {"step": 3, "test/a/acc@1": 0.625, "test/a/reward_mean": 2.0},
    ]
    summary = summary_of(tmp_path, ends)
    assert (summary["start_accuracy"], summary["final_accuracy"]) == (0.125, 0.625)
    assert (summary["reward_start"], summary["reward_final"]) == (-1.0, 2.0)


def test_validations_that_measured_nothing_are_left_out(tmp_path):
    empty = {"step": 3, "val/a/acc@1": None, "val/b/acc@1": None}
    assert summary_of(tmp_path, [*RECORDS, empty])["final_accuracy"] == 0.75


def test_curves_that_cannot_be_drawn_do_not_fail_the_run(tmp_path, caplog):
    (tmp_path / "curves.png").mkdir()
    assert summary_of(tmp_path, RECORDS)["final_accuracy"] == 0.75
    assert "no curves are drawn" in caplog.text

    assert summary_of(tmp_path, []) == {"seconds": 12.3}  # no row could be written
    (tmp_path / "summary.json").unlink()
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot write the summary"):
        closing_report(tmp_path, {})


def test_summaries_of_runs_that_follow_each_other(tmp_path):
    stages = [tmp_path / "sft", tmp_path / "ppo"]
    for stage in stages:
        stage.mkdir()
    write_summary(stages[0], {"loss": 1.0, "checkpoint": "sft", "seconds": 10.04})
    write_summary(stages[1], {"reward": 2.0, "checkpoint": "ppo", "seconds": 5.03})
    program = ["configs/recipes/rlhf_gsm8k/summary.py", "--out", str(tmp_path), *map(str, stages)]
    combined = json.loads(succeed(run_program(program)))
    assert combined == {"loss": 1.0, "checkpoint": "ppo", "seconds": 15.1, "reward": 2.0}
    assert json.loads((tmp_path / "summary.json").read_text()) == combined
    refused = run_program([*program, str(tmp_path / "rm")])
    assert refused.returncode == 2 and "rm has no summary.json; run that" in refused.stderr


def test_curves_are_drawn_with_gaps(tmp_path):
    pytest.importorskip("matplotlib")
    records = [
        {"step": step, "critic/score/mean": 0.1 * step, "actor/ppo_kl": None, "val": 1.0}
        for step in range(1, 6)
    ]
    png = tmp_path / "curves.png"
    plot_curves(records, png, ["critic/score/mean", "actor/ppo_kl", "val", "step"])
    header = png.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width = int.from_bytes(header[16:20], "big")
    height = int.from_bytes(header[20:24], "big")
    assert (width, height) == (3 * 540, 2 * 384)  # four panels: three beside each other, two rows


def test_matplotlib_that_is_missing_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        plot_curves([{"step": 1, "a": 0.5}], tmp_path / "x.png", ["a"])
