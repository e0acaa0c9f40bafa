"""The demo as shipped, SFT and PPO on arithmetic at TP=2 x PP=2: it learns and says what it did."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.e2e.exported import greedy_accuracy
from tests.e2e.programs import read_lines, run_commands, succeed
from tests.pages import commands_of


@pytest.fixture(scope="module")
def demo(start_policy: Path) -> dict[str, Any]:
    """What the run of `make demo` leaves, in another directory."""
    root = start_policy
    places = [
        f"actor.path={root}/sft/model",
        f"data.train_files={root}/data/train.jsonl",
        f"data.val_files={root}/data/validation.jsonl",
        f"data.test_files={root}/data/held_out.jsonl",
        f"trainer.output_dir={root}",
        "trainer.export_best=val_sampled/arithmetic/acc@1",
        "trainer.log_freq=20",
    ]
    train = commands_of("README.md", r"train-ppo -n 4 --config configs/demo_cpu.yaml")
    log = succeed(run_commands(train, *places))

    return {
        "root": root,
        "log": log,
        "records": read_lines(root / "metrics.jsonl"),
        "summary": json.loads((root / "summary.json").read_text()),
    }


def test_it_learns(demo: dict[str, Any]) -> None:
    """Half of what the start policy learned from is wrong; at the end it seldom is (seen: 3 %)."""
    summary = demo["summary"]
    assert 0.3 <= summary["start_sampled_accuracy"] <= 0.7
    assert summary["final_sampled_accuracy"] >= 0.85
    assert summary["final_accuracy"] >= 0.9
    assert summary["steps"] == 60
    assert summary["seconds"] > 0


def test_it_tells_what_it_did(demo: dict[str, Any]) -> None:
    root = demo["root"]
    for phrase in (
        "accuracy: 0.",
        " -> ",
        "time: ",
        "update_actor",
        "mrlhf report",
        str(root / "actor"),
    ):
        assert phrase in demo["log"]
    for stage in (root, root / "sft"):
        assert (stage / "curves.png").read_bytes().startswith(b"\x89PNG")

    log = demo["log"]
    assert "validation before training: val/arithmetic/acc@1 0." in log
    assert [number for number in range(1, 61) if f"step {number}/60, reward" in log] == [20, 40, 60]
    assert log.count("samples of held-out prompts") == log.count(": validation ")

    file = root / "rollouts" / "step_000020.parquet"
    rows = pyarrow.parquet.read_table(file).to_pylist()
    assert len(rows) == 256
    assert {row["score"] for row in rows} == {0.0, 1.0}
    assert all((row["response"] == row["ground_truth"]) == (row["score"] == 1.0) for row in rows)


def test_offloaded_it_keeps_below_a_bound(demo: dict[str, Any], tmp_path: Path) -> None:
    root = demo["root"]
    (train,) = commands_of("docs/memory.md", "device_memory_mb")
    train = train.replace("runs/demo-offloaded", str(tmp_path / "run"))
    files = {"train_files": "train", "val_files": "validation", "test_files": "held_out"}
    places = [f"data.{key}={root}/data/{name}.jsonl" for key, name in files.items()]
    short = ["trainer.total_steps=2", f"actor.path={root}/sft/model"]
    succeed(run_commands([train], *places, *short))
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3


def test_the_report_shows_the_run(demo: dict[str, Any]) -> None:
    root = demo["root"]
    (command,) = commands_of("docs/report.md", "runs/demo$")
    said = succeed(run_commands([command.replace("runs/demo", str(root))]))
    assert f"report: {root}/report.html" in said

    page = (root / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page)
    assert found is not None
    (run,) = json.loads(found.group(1))["runs"]
    assert run["steps"] == list(range(61))
    assert sorted(set(run["samples"]["step"])) == [10, 20, 30, 40, 50, 60]
    assert len(run["samples"]["step"]) == 6 * 256
    assert {"advantage", "value", "entropy", "ratio after update"} <= set(run["quantities"])
    assert [process["ranks"] for process in run["processes"].values()] == [4] * 4

    found = re.search(r'id="phases-0">(.*?)</script>', page)
    assert found is not None
    phases = json.loads(found.group(1))
    assert list(phases) == [str(step) for step in range(1, 61)]
    for spans in phases["10"].values():
        names = [span[0] for span in spans]
        assert {"step", "gen", "update_actor", "testing", "dump"} <= set(names)


def test_metrics_of_every_step(demo: dict[str, Any]) -> None:
    steps = [record for record in demo["records"] if record["step"] > 0]
    assert [record["step"] for record in steps] == list(range(1, 61))

    for record in steps:
        assert record["training/rollout_probs_diff_max"] < 5e-5
        assert record["reshard/bytes_moved"] == record["reshard/bytes_had_to_move"] > 0
        assert record["critic/score/mean"] == record["reward/exact_match"]
        for name in (
            "actor/pg_loss",
            "actor/entropy",
            "critic/vf_loss",
            "timing_s/step",
            "perf/throughput",
        ):
            assert isinstance(record[name], float), name


def test_the_figures_of_the_summary_are_those_of_the_test_prompts(demo: dict[str, Any]) -> None:
    """They are asked at both ends alone; the validation has other prompts."""
    name = "test_sampled/arithmetic/acc@1"
    tested = {record["step"]: record[name] for record in demo["records"] if name in record}
    summary = demo["summary"]
    assert list(tested) == [0, summary["steps"]]
    ends = [summary["start_sampled_accuracy"], summary["final_sampled_accuracy"]]
    assert list(tested.values()) == ends


def test_the_best_policy_is_exported_too(demo: dict[str, Any]) -> None:
    metric = "val_sampled/arithmetic/acc@1"
    measured = [record for record in demo["records"] if metric in record]
    best = max(measured, key=lambda record: record[metric])
    summary = demo["summary"]
    assert (summary["best_step"], summary["best_value"]) == (best["step"], best[metric])
    assert _accuracy(demo["root"], "actor_best", "validation") == best["val/arithmetic/acc@1"]


def test_checkpoint_reproduces_the_accuracy(demo: dict[str, Any]) -> None:
    accuracy = _accuracy(demo["root"], "actor", "held_out")
    assert accuracy == demo["summary"]["final_accuracy"]


def _accuracy(root: Path, policy: str, rows: str) -> float:
    return greedy_accuracy(root / policy, root / "data" / f"{rows}.jsonl")
