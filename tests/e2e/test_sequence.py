"""The whole RLHF sequence with the shipped GSM8K files, two steps each, on made-up problems."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from tests.e2e.programs import run_program, succeed, torchrun

pytestmark = pytest.mark.timeout(900)


def _problems(count: int, rng: random.Random) -> list[dict[str, str]]:
    rows = []
    for _ in range(count):
        apples = rng.randrange(2, 99)
        pears = rng.randrange(2, 99)
        total = apples + pears
        question = (
            f"Ann has {apples} apples and Bob has {pears} pears. How many pieces of fruit do they "
            "have in all?"
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
    rng = random.Random(0)
    directory = tmp_path_factory.mktemp("source")
    test = _problems(60, rng)
    _write(directory / "train.jsonl", _problems(160, rng))
    _write(directory / "test.jsonl", test)
    pairs = [
        {
            "prompt": row["question"],
            "chosen": row["answer"],
            "rejected": row["answer"].replace("#### ", "#### 1"),
        }
        for row in test[:40]
    ]
    _write(directory / "preferences.jsonl", pairs)
    return directory


def test_sequence(source: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare = ["gsm8k", "--source", str(source), "--out", str(data), "--vocab-size", "400"]
    succeed(run_program(["tools/prepare_data.py", *prepare]))

    sft = [
        f"data.train_files={data}/sft.jsonl",
        f"data.tokenizer={data}/tokenizer",
        "data.batch_size=32",
    ]
    sft += [
        "trainer.total_steps=2",
        "optim.lr_warmup_steps=1",
        f"trainer.output_dir={tmp_path}/sft",
    ]
    succeed(torchrun(2, ["launch/train_sft.py", "--config", "configs/gsm8k_sft_cpu.yaml", *sft]))

    rm = [
        f"model.path={tmp_path}/sft/model",
        f"data.train_files={data}/preferences.jsonl",
        "data.batch_size=8",
    ]
    rm += ["trainer.total_steps=2", "trainer.total_epochs=1", "optim.lr_warmup_steps=1"]
    rm += [f"trainer.output_dir={tmp_path}/rm"]
    succeed(torchrun(2, ["launch/train_rm.py", "--config", "configs/gsm8k_rm_cpu.yaml", *rm]))

    ppo = [f"actor.path={tmp_path}/sft/model", f"critic.path={tmp_path}/rm/model"]
    ppo += [f"reward_model.path={tmp_path}/rm/model", f"data.train_files={data}/rl_train.jsonl"]
    ppo += [
        f"data.val_files={data}/rl_test_unseen.jsonl",
        "data.train_batch_size=16",
        "data.max_response_length=24",
    ]
    ppo += ["actor.ppo_mini_batch_size=8", "trainer.total_steps=2", "trainer.critic_warmup=0"]
    ppo += ["actor.optim.lr_warmup_steps=1", "rollout.tp=2", "trainer.tensorboard=true"]
    ppo += [f"trainer.output_dir={tmp_path}/ppo"]
    succeed(torchrun(4, ["launch/train_ppo.py", "--config", "configs/gsm8k_cpu.yaml", *ppo]))

    stages = [str(tmp_path / stage) for stage in ("sft", "rm", "ppo")]
    succeed(run_program(["tools/report.py", "--out", str(tmp_path), *stages]))

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() >= {
        "sft_loss",
        "rm_pair_accuracy",
        "reward_start",
        "reward_final",
        "kl_final",
        "seconds",
    }
    assert 0.0 <= summary["rm_pair_accuracy"] <= 1.0

    parts = [json.loads(Path(stage, "summary.json").read_text())["seconds"] for stage in stages]
    assert summary["seconds"] == pytest.approx(sum(parts), abs=0.1)

    records = [
        json.loads(line) for line in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(record["actor/reward_kl_penalty_coeff"] == 0.02 for record in records[1:])
    assert records[1]["critic/score/mean"] == pytest.approx(
        records[1]["reward/reward_model"], rel=1e-5
    )
    assert 0.0 <= records[-1]["val/openai/gsm8k/acc@1"] <= 1.0
    assert list((tmp_path / "ppo" / "tensorboard").iterdir())

    scorer, report = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "rm" / "model", output_loading_info=True
    )
    assert scorer.config.num_labels == 1
    assert not report["missing_keys"] and not report["unexpected_keys"]


def test_report_says_which_stage_is_missing(tmp_path: Path) -> None:
    done = run_program(["tools/report.py", "--out", str(tmp_path), str(tmp_path / "sft")])
    assert done.returncode == 2
    assert "run that stage first" in done.stderr
