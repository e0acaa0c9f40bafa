"""The whole RLHF sequence with the shipped GSM8K configurations, two steps each.

The problems are made up.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from tests.e2e.programs import read_lines, run_program, succeed, torchrun

pytestmark = pytest.mark.timeout(900)
STAGES = ("sft", "rm", "ppo")
INTERLEAVED = ("model.pp=2", "model.vpp=2")


def _problems(count: int, rng: random.Random) -> list[dict[str, str]]:
    rows = []
    for _ in range(count):
        apples = rng.randrange(2, 99)
        pears = rng.randrange(2, 99)
        total = apples + pears

        question = (
            f"Ann has {apples} apples and Bob has {pears} pears. "
            "How many pieces of fruit do they have in all?"
        )
        answer = (
            f"They have {apples}+{pears}=<<{apples}+{pears}={total}>>{total} pieces of fruit.\n"
            f"#### {total}"
        )
        rows.append({"question": question, "answer": answer})
    return rows


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the form that users get GSM8K in."""
    directory = tmp_path_factory.mktemp("source")
    rng = random.Random(0)
    test = _problems(60, rng)
    _write(directory / "train.jsonl", _problems(160, rng))
    _write(directory / "test.jsonl", test)

    pairs = []
    for row in test[:40]:
        wrong = row["answer"].replace("#### ", "#### 1")
        pairs.append({"prompt": row["question"], "chosen": row["answer"], "rejected": wrong})
    _write(directory / "preferences.jsonl", pairs)
    return directory


def test_sequence(source: Path, tmp_path: Path) -> None:
    _run_all_stages(source, tmp_path)
    _assert_summary(tmp_path)
    for stage in ("sft", "rm"):
        assert f"train/bubble/{stage}" in read_lines(tmp_path / stage / "metrics.jsonl")[-1]
    _assert_ppo(tmp_path / "ppo")
    _assert_reward_model(tmp_path / "rm" / "model")


def _run_all_stages(source: Path, root: Path) -> None:
    """Prepare the data, train the three models, and merge the summaries."""
    data = root / "data"
    prepare = ["gsm8k", "--source", str(source), "--out", str(data), "--vocab-size", "400"]
    succeed(run_program(["tools/prepare_data.py", *prepare]))

    sft = [
        f"data.train_files={data}/sft.jsonl",
        f"data.tokenizer={data}/tokenizer",
        "data.batch_size=32",
        *INTERLEAVED,
        "trainer.total_steps=2",
        "optim.lr_warmup_steps=1",
        f"trainer.output_dir={root}/sft",
    ]
    succeed(torchrun(2, ["launch/train_sft.py", "--config", "configs/gsm8k_sft_cpu.yaml", *sft]))

    reward_model = [
        f"model.path={root}/sft/model",
        f"data.train_files={data}/preferences.jsonl",
        "data.batch_size=8",
        *INTERLEAVED,
        "trainer.total_steps=2",
        "trainer.total_epochs=1",
        "optim.lr_warmup_steps=1",
        f"trainer.output_dir={root}/rm",
    ]
    config = "configs/gsm8k_rm_cpu.yaml"
    succeed(torchrun(2, ["launch/train_rm.py", "--config", config, *reward_model]))

    ppo = [
        f"actor.path={root}/sft/model",
        f"critic.path={root}/rm/model",
        f"reward_model.path={root}/rm/model",
        f"data.train_files={data}/rl_train.jsonl",
        f"data.val_files={data}/rl_test_unseen.jsonl",
        "data.train_batch_size=16",
        "data.max_response_length=24",
        "actor.ppo_mini_batch_size=8",
        "actor.optim.lr_warmup_steps=1",
        "rollout.tp=2",
        "trainer.total_steps=2",
        "trainer.critic_warmup=0",
        "trainer.trackers=[tensorboard]",
        f"trainer.output_dir={root}/ppo",
    ]
    succeed(torchrun(4, ["launch/train_ppo.py", "--config", "configs/gsm8k_cpu.yaml", *ppo]))

    stages = [str(root / stage) for stage in STAGES]
    succeed(run_program(["tools/merge_summaries.py", "--out", str(root), *stages]))


def _assert_summary(root: Path) -> None:
    summary = json.loads((root / "summary.json").read_text())
    assert summary.keys() >= {
        "sft_loss",
        "rm_pair_accuracy",
        "reward_start",
        "reward_final",
        "kl_final",
        "seconds",
    }
    assert 0.0 <= summary["rm_pair_accuracy"] <= 1.0

    seconds = 0.0
    for stage in STAGES:
        seconds += json.loads((root / stage / "summary.json").read_text())["seconds"]
    assert summary["seconds"] == pytest.approx(seconds, abs=0.1)


def _assert_ppo(directory: Path) -> None:
    records = read_lines(directory / "metrics.jsonl")
    assert all(record["actor/reward_kl_penalty_coeff"] == 0.02 for record in records[1:])
    score = records[1]["critic/score/mean"]
    assert score == pytest.approx(records[1]["reward/reward_model"], rel=1e-5)
    assert 0.0 <= records[-1]["val/openai/gsm8k/acc@1"] <= 1.0
    assert list((directory / "tensorboard").iterdir())


def _assert_reward_model(directory: Path) -> None:
    model, report = AutoModelForSequenceClassification.from_pretrained(
        directory, output_loading_info=True
    )
    assert model.config.num_labels == 1
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_merging_says_which_stage_is_missing(tmp_path: Path) -> None:
    done = run_program(["tools/merge_summaries.py", "--out", str(tmp_path), str(tmp_path / "sft")])
    assert done.returncode == 2
    assert "run that stage first" in done.stderr
