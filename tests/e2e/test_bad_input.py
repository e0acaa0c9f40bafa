"""What a user sees after a mistake: one line that says what to do, and a nonzero exit code."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from configs.recipes.data.vocabulary import train_sentencepiece
from mrlhf.commands.train import main
from mrlhf.config import PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.run.lock import DirectoryLock
from tests.e2e.programs import ROOT, run_program, succeed

DEMO = "configs/demo_cpu.yaml"
DRY = ("--dry-run", "--allow-missing")  # `make demo` writes the data and models


def _never(_: object) -> None:
    raise AssertionError("bad input must not start a run")


def _main(root: type[PPOConfig | SFTConfig | RewardModelConfig], arguments: list[str]) -> int:
    return main(root, _never, arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", DEMO, "actor.clip_rato=0.1"], "did you mean 'actor.clip_ratio'"),
        (["--config", DEMO, "actor.tp=three"], "actor.tp"),
        (["--config", "configs/none.yaml"], "configs/none.yaml"),
        (
            ["--config", DEMO, "configs/algorithms/grpo.yaml"],
            "argument 'configs/algorithms/grpo.yaml' is not of the form key.path=value; to read "
            "it as a file, write --config configs/algorithms/grpo.yaml",
        ),
        (
            ["--config", DEMO, "--dry-run", "--world-size", "6"],
            "world size 6 is not divisible by tp 2 x pp 2 = 4",
        ),
        (
            ["--config", DEMO, "rollout.tp=3", "--dry-run"],
            "rollout.tp 3 does not divide actor.tp 2 x actor.pp 2",
        ),
        (
            ["--config", DEMO, "actor.path=configs/models/demo_llama", "actor.tp=8", "--dry-run"],
            "actor.tp 8 does not fit the model's 4 attention heads; use one of 1, 2, 4",
        ),
        (["--config", DEMO], "torchrun --nproc-per-node"),
    ],
)
def test_mistakes_on_the_command_line(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert _main(PPOConfig, arguments) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert message.startswith("error: ")


@pytest.mark.parametrize("config", sorted(path.name for path in (ROOT / "configs").glob("*.yaml")))
def test_shipped_configurations_pass_a_dry_run(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    keys = yaml.safe_load((ROOT / "configs" / config).read_text(encoding="utf-8"))
    root = PPOConfig if "actor" in keys else RewardModelConfig if "_rm_" in config else SFTConfig
    assert _main(root, ["--config", f"configs/{config}", *DRY]) == 0
    assert "training steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    "preset", sorted(path.name for path in (ROOT / "configs" / "algorithms").glob("*.yaml"))
)
def test_each_algorithm_fits_the_small_task(
    preset: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    base = "configs/arithmetic_cpu.yaml"
    method = f"configs/algorithms/{preset}"
    text = (ROOT / method).read_text(encoding="utf-8")
    comment = re.search(rf"^# On {base}: (.+)$", text, re.MULTILINE)
    overrides = [] if comment is None else shlex.split(comment[1])
    arguments = ["--config", base, "--config", method, *DRY]

    assert _main(PPOConfig, [*arguments, *overrides]) == 0
    output = capsys.readouterr().out
    assert output.endswith(" fits 2 ranks\n")
    assert ("\n  critic  " in output) is (preset in ("ppo.yaml", "vapo.yaml", "sao.yaml"))

    if overrides:
        assert _main(PPOConfig, arguments) == 2  # the overrides are needed


@pytest.mark.parametrize("preset", ["grpo", "rloo", "remax"])
def test_an_algorithm_may_be_laid_over_a_run_with_a_critic(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    files = ["configs/recipes/rlhf_gsm8k/ppo.yaml", f"configs/algorithms/{preset}.yaml"]
    assert _main(PPOConfig, ["--config", files[0], "--config", files[1], *DRY]) == 0


def test_what_a_dry_run_cannot_find_is_said_first(tmp_path: Path) -> None:
    model = f"actor.path={ROOT / 'configs/models/demo_llama'}"
    keys = ["data.train_files=none.jsonl", f"trainer.output_dir={tmp_path / 'run'}", model]
    command = ["launch/train_ppo.py", "--config", DEMO, *keys, "--dry-run"]
    holder = DirectoryLock(tmp_path / "run", None, lambda _: None)
    holder.acquire()
    done = run_program(command)
    holder.release()
    assert done.returncode == 3
    assert done.stdout.startswith("not found: data.train_files none.jsonl does not exist; name an")
    assert f"\n  a start would be refused: process {os.getpid()} on host " in done.stdout
    assert done.stdout.endswith("what could be checked fits 4 ranks\n")
    assert done.stderr.startswith("error: ") and "--allow-missing" in done.stderr


def test_help_names_every_key_and_needs_no_torchrun() -> None:
    output = succeed(run_program(["launch/train_ppo.py", "--help"]))
    for key in (
        "actor.clip_ratio_high",
        "algorithm.kl_ctrl.target_kl",
        "rollout.max_num_seqs",
        "reward.timeout_s",
    ):
        assert key in output


def test_missing_data_is_the_last_line_that_a_user_reads(tmp_path: Path) -> None:
    train_sentencepiece([*"0123456789=+"], tmp_path, vocab_size=32, byte_fallback=False)
    arguments = [
        f"data.tokenizer={tmp_path}",
        "data.train_files=nowhere.jsonl",
        f"trainer.output_dir={tmp_path}/run",
    ]
    launcher = ["launch/torchrun.py", "--nproc-per-node=2", "--standalone"]
    program = ["launch/train_sft.py", "--config", "configs/demo_sft_cpu.yaml", *arguments]
    done = run_program([*launcher, *program])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: data.train_files nowhere.jsonl does not exist; ")


def test_prepare_data_says_where_gsm8k_is(tmp_path: Path) -> None:
    places = ["--source", str(tmp_path), "--out", str(tmp_path / "out")]
    done = run_program(["tools/prepare_data.py", "gsm8k", *places])
    assert done.returncode == 2
    assert "openai/gsm8k" in done.stderr
    assert "Traceback" not in done.stderr
