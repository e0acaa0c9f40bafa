"""What a user sees who makes a mistake: one line that says what to do, and an exit code that is not 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.e2e.programs import ROOT, run_program, succeed, torchrun

DEMO = "configs/demo_cpu.yaml"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", DEMO, "actor.clip_rato=0.1"], "did you mean 'actor.clip_ratio'"),
        (["--config", DEMO, "actor.tp=three"], "actor.tp"),
        (["--config", "configs/none.yaml"], "configs/none.yaml"),
        (["--config", DEMO, "--dry-run", "--world-size", "6"], "6"),
        (["--config", DEMO, "rollout.tp=3", "--dry-run"], "rollout.tp 3 does not divide actor.tp 2 x actor.pp 2"),
        (["--config", DEMO, "actor.path=configs/models/demo_llama", "actor.tp=4", "--dry-run"], "heads"),
        (["--config", DEMO], "torchrun --nproc-per-node"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], expected: str) -> None:
    done = run_program(["launch/train_ppo.py", *arguments])
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("error: ") == 1


@pytest.mark.parametrize("config", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_shipped_configurations_pass_a_dry_run(config: str) -> None:
    root = yaml.safe_load((ROOT / "configs" / config).read_text(encoding="utf-8"))
    launcher = "ppo" if "actor" in root else "rm" if "preferences" in str(root["data"]["train_files"]) else "sft"
    output = succeed(run_program([f"launch/train_{launcher}.py", "--config", f"configs/{config}", "--dry-run"]))
    assert "ranks" in output or "rank" in output
    assert "training steps" in output


def test_help_names_every_key() -> None:
    output = succeed(run_program(["launch/train_ppo.py", "--help"]))
    for key in ("actor.clip_ratio_high", "algorithm.kl_ctrl.target_kl", "rollout.max_num_seqs", "reward.timeout_s"):
        assert key in output


def test_missing_data_ends_every_rank(tmp_path: Path) -> None:
    arguments = ["--config", DEMO, "actor.path=configs/models/demo_llama", "data.train_files=nowhere.jsonl"]
    done = torchrun(4, ["launch/train_ppo.py", *arguments, f"trainer.output_dir={tmp_path}"], timeout=120)
    assert done.returncode != 0
    assert "nowhere.jsonl" in done.stderr


def test_prepare_data_says_where_gsm8k_is(tmp_path: Path) -> None:
    done = run_program(["tools/prepare_data.py", "gsm8k", "--source", str(tmp_path), "--out", str(tmp_path / "out")])
    assert done.returncode == 1
    assert "openai/gsm8k" in done.stderr
    assert "Traceback" not in done.stderr
