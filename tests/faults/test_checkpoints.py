"""Which checkpoints a run leaves, what else can read them, and on which layouts it goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults import faults, settings
from tests.faults.faults import Fault
from tests.faults.runs import QUEUE_AGAIN, Sequel, Undisturbed
from tests.oracle import plain_models
from tests.ranks import run_ranks


def test_the_newest_and_the_best_checkpoint_stay(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    whole = undisturbed(settings.ppo(inputs))
    scores = {row["step"]: row["critic/score/mean"] for row in whole.rows() if row["step"]}
    best = min(scores, key=lambda step: (scores[step], step))
    assert best < settings.STEPS, "choose another mode: the newest checkpoint must not be the best"

    run = Sequel(whole.setting, tmp_path / "run")
    keys = ["max_to_keep=1", "keep_best=critic/score/mean", "keep_best_mode=min", "save_hf=true"]
    run.finish(keys=[f"trainer.{key}" for key in keys])
    assert run.checkpoints == [f"step_{best:06d}", f"step_{settings.STEPS:06d}"]

    newest = run.directory / "checkpoints" / run.checkpoints[-1] / "hf"
    assert (newest / "model.safetensors").read_bytes() == run.weights()["actor/model.safetensors"]
    assert (newest / "tokenizer.json").is_file()
    run_ranks(1, _loads_in_transformers, str(newest))


def test_the_best_model_of_abandoned_steps_is_set_aside(inputs: Path, tmp_path: Path) -> None:
    run = Sequel(settings.sft(inputs), tmp_path / "run")
    best = ["trainer.export_best=val/loss", "trainer.export_best_mode=min", "trainer.test_freq=1"]
    run.finish(keys=[*best, "trainer.save_hf=true"])
    weights = run.directory / "model_best" / "model.safetensors"
    abandoned = weights.read_bytes()
    rows = (run.directory / "metrics.jsonl").read_text()
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["best_step"] > 1, "choose another rate: the best step must be a later one"

    # Nothing is learned from step 1 on, so that no later step is better.
    first = run.directory / "checkpoints" / "step_000001"
    run.finish(
        keys=[*best, "optim.lr=0", "optim.lr_decay_style=constant", f"trainer.resume={first}"]
    )
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["best_step"] == 1
    assert weights.read_bytes() == (first / "hf" / "model.safetensors").read_bytes()
    assert summary["best_value"] == run.rows()[0]["val/loss"]

    kept = run.directory / "model_best.before_1" / "model.safetensors"
    assert kept.read_bytes() == abandoned
    assert (run.directory / "metrics.before_1.jsonl").read_text() == rows
    assert (run.directory / "checkpoints" / f"before_1.step_{settings.STEPS:06d}").is_dir()


def test_held_out_rows_are_validated_on_at_the_end_alone(inputs: Path, tmp_path: Path) -> None:
    run = Sequel(settings.reward_model(inputs), tmp_path / "run")
    run.finish(keys=["trainer.keep_best=val/accuracy", "trainer.test_freq=0"])
    rows = {row["step"]: row for row in run.rows()}
    assert [step for step, row in rows.items() if "val/accuracy" in row] == [settings.STEPS]

    # This run has nothing left to train, and its last step had no validation.
    before = settings.STEPS - 1
    checkpoint = run.directory / "checkpoints" / f"step_{before:06d}"
    other = Sequel(settings.reward_model(inputs), tmp_path / "other")
    keys = [f"trainer.resume={checkpoint}", f"trainer.total_steps={before}", "trainer.test_freq=0"]
    other.finish(keys=keys)
    summary = json.loads((other.directory / "summary.json").read_text())
    assert summary["steps"] == before and 0 <= summary["rm_pair_accuracy"] <= 1


def test_a_rank_is_killed_while_it_deletes_a_checkpoint(inputs: Path, tmp_path: Path) -> None:
    run = Sequel(settings.sft(inputs), tmp_path / "run", extra=["trainer.max_to_keep=1"])
    # Each save calls it once, and each deletion twice.
    ended = run.run(Fault(faults.DELETION, 4, "SIGKILL", rank=0))
    assert ended.codes[0] == -9, ended.text
    assert run.checkpoints == ["step_000002"]
    assert (run.directory / "checkpoints" / ".step_000001.deleted").is_dir()

    run.finish()
    assert run.checkpoints == [f"step_{settings.STEPS:06d}"]


def _loads_in_transformers(rank: int, world_size: int, directory: str) -> None:
    model = plain_models.load(Path(directory))
    stored = load_file(Path(directory) / "model.safetensors")
    weights = model.state_dict()
    assert weights.keys() == stored.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, stored[name]), name


@pytest.mark.parametrize(
    ("world_size", "keys"),
    [
        (2, ["actor.tp=1"]),
        (1, ["actor.tp=1", "actor.optim.use_distributed_optimizer=false"]),
    ],
)
def test_a_run_goes_on_in_another_layout(
    world_size: int, keys: list[str], inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    whole = undisturbed(settings.ppo(inputs))
    run = Sequel(replace(whole.setting, world_size=world_size), tmp_path / "run")
    checkpoint = whole.directory / "checkpoints" / "step_000002"
    run.finish(keys=[*keys, f"trainer.resume={checkpoint}"])

    assert [row["step"] for row in run.rows()] == [2, 3, 4]
    assert_agree(run, whole, steps=(3, 4))


def test_an_update_goes_on_in_another_layout(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    whole = undisturbed(settings.ppo(inputs))
    run = Sequel(whole.setting, tmp_path / "run")
    checkpoint = whole.directory / "checkpoints" / "step_000001"
    ended = run.run(Fault(faults.ACTOR_LOSS, 5, "SIGTERM"), keys=[f"trainer.resume={checkpoint}"])
    assert ended.codes == [QUEUE_AGAIN, QUEUE_AGAIN], ended.text
    assert run.checkpoints == ["step_000001_interrupted"]

    ended = run.finish(keys=["actor.tp=1", "critic.tp=2"])
    assert "the configuration has changed" in ended.text
    assert_agree(run, whole, steps=(2, 3))


def assert_agree(run: Sequel, whole: Sequel, steps: Sequence[int]) -> None:
    """The numbers of these steps are equal up to rounding."""
    rows = {row["step"]: row for row in run.rows()}
    wanted = {row["step"]: row for row in whole.rows()}
    for step in steps:
        common = rows[step].keys() & wanted[step].keys()
        assert "actor/pg_loss" in common and "critic/vf_loss" in common
        for name in common:
            if name.startswith(("reshard/", "train/")):
                continue
            value = rows[step][name]
            expected = wanted[step][name]
            same = math.isclose(value, expected, rel_tol=1e-3, abs_tol=2e-5)
            assert same, f"step {step}, {name}: {value}, not {expected}"
