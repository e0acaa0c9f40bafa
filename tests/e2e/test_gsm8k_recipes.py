"""configs/recipes/rlhf_gsm8k and rlvr_gsm8k are followed: all commands of their pages run.

The problems are made up, and so few that an epoch of them would be eight steps. All runs are
shorter than a user's, but those of fine-tuning and of the reward model are far longer than that.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.programs import ROOT, read_lines, run_commands, succeed
from tests.pages import commands_of

RLHF = commands_of("configs/recipes/rlhf_gsm8k/README.md")
RLVR = commands_of("configs/recipes/rlvr_gsm8k/README.md", r"grpo\.yaml|gsm8k_chat|--dry-run")
# What the test adds to a command, by the configuration that the command names.
ADDED = {
    "sft.yaml": "trainer.min_steps=100",
    "rm.yaml": "model.pp=2 model.vpp=2 trainer.min_steps=60",
    "ppo.yaml": "trainer.total_steps=3 trainer.critic_warmup=0 data.train_batch_size=16 "
    "actor.ppo_mini_batch_size=8 rollout.tp=2 trainer.trackers=[tensorboard]",
    "grpo.yaml": "trainer.total_steps=3",
}
# The shape of the model that grpo_8_gpus.yaml names.
QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


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


def _write_source(directory: Path) -> None:
    """Few problems and preference pairs, in the form that users get GSM8K in."""
    directory.mkdir(parents=True)
    rng = random.Random(0)
    test = _problems(80, rng)
    _write(directory / "train.jsonl", _problems(128, rng))
    _write(directory / "test.jsonl", test)

    pairs = []
    for row in test[:60]:
        wrong = row["answer"].replace("#### ", "#### 1")
        pairs.append({"prompt": row["question"], "chosen": row["answer"], "rejected": wrong})
    _write(directory / "preferences.jsonl", pairs)


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the commands of both pages have run."""
    directory = tmp_path_factory.mktemp("recipes")
    for name in ("configs", "launch", "tools"):
        (directory / name).symlink_to(ROOT / name)
    _write_source(directory / "data" / "gsm8k")

    for command in [*RLHF, *RLVR]:
        if "--dry-run" in command:
            _write_instruct_model(directory)
        added = ADDED.get(re.findall(r"\w+\.yaml|$", command)[0], "")
        done = run_commands([command], *added.split(), cwd=directory)
        succeed(done)
        if "--dry-run" in command:
            (directory / "dry_run.txt").write_text(done.stdout, encoding="utf-8")
    return directory


def _write_instruct_model(directory: Path) -> None:
    """The shape of the model that the page has the reader download, with another tokenizer."""
    model = directory / "models" / "Qwen2.5-1.5B-Instruct"
    shutil.copytree(directory / "runs" / "gsm8k" / "data" / "tokenizer", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text(json.dumps(QWEN), encoding="utf-8")


def test_make_runs_what_the_page_says() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ngsm8k:")[1].split("\n\n")[0]
    lines = recipe.splitlines()[1:]
    assert len(lines) == len(RLHF) == 6
    for line, command in zip(lines, RLHF, strict=True):
        made = line.strip().replace("$(BIN)/", "").replace("'$(DATA)'", "data/gsm8k")
        assert made.removesuffix(" trainer.overwrite=true") == command


def test_few_rows_train_long_enough(followed: Path) -> None:
    """Epochs alone would be 8 steps of fine-tuning and 3 of the reward model."""
    runs = followed / "runs" / "gsm8k"
    sft = read_lines(runs / "sft" / "metrics.jsonl")
    reward_model = read_lines(runs / "rm" / "metrics.jsonl")
    assert (sft[-1]["step"], reward_model[-1]["step"]) == (100, 60)
    assert sft[-1]["sft/loss"] < 2.0
    assert reward_model[-1]["val/accuracy"] > 0.75
    assert reward_model[-1]["rm/head_lr"] == pytest.approx(50 * reward_model[-1]["rm/lr"])
    assert "train/bubble/rm" in reward_model[-1]


def test_the_reward_model_is_a_sequence_classifier(followed: Path) -> None:
    model, report = AutoModelForSequenceClassification.from_pretrained(
        followed / "runs" / "gsm8k" / "rm" / "model", output_loading_info=True
    )
    assert model.config.num_labels == 1
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


def test_ppo_takes_its_scores_from_the_reward_model(followed: Path) -> None:
    directory = followed / "runs" / "gsm8k" / "ppo"
    records = read_lines(directory / "metrics.jsonl")
    assert all(record["actor/reward_kl_penalty_coeff"] == 0.02 for record in records[1:])
    score = records[1]["critic/score/mean"]
    assert score == pytest.approx(records[1]["reward/reward_model"], rel=1e-5)
    assert 0.0 <= records[-1]["val/openai/gsm8k/acc@1"] <= 1.0
    assert list((directory / "tensorboard").iterdir())


def test_summaries_and_reports_are_joined(followed: Path) -> None:
    runs = followed / "runs" / "gsm8k"
    summary = json.loads((runs / "summary.json").read_text())
    assert summary.keys() >= {
        "sft_loss",
        "rm_pair_accuracy",
        "reward_start",
        "reward_final",
        "kl_final",
        "seconds",
    }
    assert (
        summary["rm_pair_accuracy"] == read_lines(runs / "rm" / "metrics.jsonl")[-1]["val/accuracy"]
    )

    seconds = 0.0
    for stage in ("sft", "rm", "ppo"):
        seconds += json.loads((runs / stage / "summary.json").read_text())["seconds"]
    assert summary["seconds"] == pytest.approx(seconds, abs=0.1)
    assert (runs / "report.html").stat().st_size > 100_000


def test_grpo_is_rewarded_by_rules(followed: Path) -> None:
    records = read_lines(followed / "runs" / "gsm8k" / "grpo" / "metrics.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    for record in records[1:]:
        rewards = record["reward/gsm8k"] + 0.2 * record["reward/format"]
        assert record["critic/score/mean"] == pytest.approx(rewards, rel=1e-5)


def test_the_layout_for_gpus_passes_the_dry_run(followed: Path) -> None:
    said = (followed / "dry_run.txt").read_text(encoding="utf-8")
    assert "actor        tp 1 x pp 1 x dp 8, 16384 tokens a micro-batch" in said
    assert said.endswith(" fits 8 ranks\n")
