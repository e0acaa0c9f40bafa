"""A run that was killed or interrupted anywhere, and started again, has the numbers of one that was
not.

Each test is one run that goes on through one fault after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from mrlhf.commands import convert_checkpoint
from mrlhf.models.families import load_spec
from mrlhf.models.weight_files import check_weight_files
from tests.faults import faults, settings
from tests.faults.faults import Fault
from tests.faults.runs import (
    FREE_WITH_ADAPTERS,
    QUEUE_AGAIN,
    Ended,
    Sequel,
    Setting,
    Undisturbed,
    assert_same_run,
)
from tests.models.checkpoints import assert_same_tensors, read_tensors

BOTH_STOPPED = [QUEUE_AGAIN, QUEUE_AGAIN]


def assert_killed(ended: Ended, rank: int) -> None:
    assert ended.codes[rank] == -9, ended.text
    assert ended.codes[1 - rank] not in (0, QUEUE_AGAIN), ended.text


def test_a_rank_is_killed_in_each_phase(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.ppo(inputs), tmp_path / "run")
    killed = [
        Fault(faults.GENERATION, 2, "SIGKILL", rank=1),  # in the first validation
        Fault(faults.HAND_OVER, 3, "SIGKILL", rank=1),  # of step 2
        Fault(faults.GENERATION, 3, "SIGKILL", rank=0),
        Fault(faults.SCORING, 2, "SIGKILL", rank=1),
        Fault(faults.REFERENCE, 1, "SIGKILL", rank=0),
        Fault(faults.FORWARD, 2, "SIGKILL", rank=1),
        Fault(faults.VALUES, 1, "SIGKILL", rank=0),
        Fault(faults.CRITIC_LOSS, 3, "SIGKILL", rank=0),
        Fault(faults.ACTOR_LOSS, 5, "SIGKILL", rank=1),
        Fault(faults.VALIDATION, 1, "SIGKILL", rank=0),  # of step 2
        Fault(faults.FILE, 1, "SIGKILL", rank=1),  # the first file of the checkpoint of step 2
    ]
    for fault in killed:
        assert_killed(run.run(fault), fault.rank)
    assert run.checkpoints == ["step_000001"]

    assert_killed(run.run(Fault(faults.MODEL_FILE, 2, "SIGKILL", rank=0)), rank=0)
    assert_killed(run.run(Fault(faults.MANIFEST_FILE, 1, "SIGKILL", rank=0)), rank=0)
    assert run.checkpoints == ["step_000001"]
    assert run.run(Fault(faults.ACTOR_LOSS, 22, "SIGKILL", rank=-1)).codes == [-9, -9]
    run.finish()
    assert_same_run(run, undisturbed(run.setting))


def interrupt(run: Sequel, where: str, call: int, action: str = "SIGTERM", rank: int = 1) -> str:
    """Interrupt the run there; returns the name of its newest checkpoint."""
    ended = run.run(Fault(where, call, action, rank))
    assert ended.codes == BOTH_STOPPED, ended.text
    return run.checkpoints[-1]


@pytest.mark.full
def test_a_run_is_interrupted_in_each_phase(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.ppo(inputs), tmp_path / "run")
    assert interrupt(run, faults.VALIDATION, 1) == "step_000000"
    start = "step_000000_interrupted"
    # Both ranks get the signal: each is a replica, and one that had not heard of it for a moment
    # would have drawn all of its responses.
    assert interrupt(run, faults.HAND_OVER, 2, "SIGUSR1", -1) in ("step_000000", start)
    assert interrupt(run, faults.GENERATION, 11, "SIGUSR1", -1) == start
    drawn = run.state(start)["drawn"]["train 1"]
    assert 0 < len(drawn["rows"]) < 16, "some of the responses to the first 8 prompts had ended"

    # In step 2. Until the update begins, what lasts are the responses.
    # A rank may have begun the next phase before it hears of the signal.
    part = "step_000001_interrupted"
    assert interrupt(run, faults.END_OF_STEP, 1) in ("step_000001", part)
    assert interrupt(run, faults.HAND_OVER, 1, "SIGUSR1") in ("step_000001", part)
    for where, call in ((faults.SCORING, 2), (faults.FORWARD, 2), (faults.VALUES, 1)):
        assert interrupt(run, where, call, "ALL=SIGTERM", rank=-1) == part
        assert len(run.state(part)["drawn"]["train 2"]["rows"]) == 16

    # In the update, its mini-batches are counted: 4 of the critic, then 4 of the actor.
    assert interrupt(run, faults.CRITIC_LOSS, 2, rank=0) == part
    progress = run.state(part)["progress"]
    assert progress["updated"] == []
    assert 1 <= progress["critic"]["mini_batches"] <= 3
    assert interrupt(run, faults.ACTOR_LOSS, 5) == part
    progress = run.state(part)["progress"]
    assert progress["updated"] == ["critic"]
    assert 1 <= progress["actor"]["mini_batches"] <= 2
    assert interrupt(run, faults.OPTIMIZER_STEP, 1, "SIGUSR1") == part
    assert run.state(part)["progress"]["actor"]["mini_batches"] > progress["actor"]["mini_batches"]

    # In the validation that ends step 2, and while its checkpoint is saved.
    assert interrupt(run, faults.VALIDATION, 1) == part
    assert run.state(part)["progress"]["updated"] == ["critic", "actor"]
    assert interrupt(run, faults.MODEL_FILE, 1) in ("step_000002", "step_000002_interrupted")
    run.finish()
    assert_same_run(run, undisturbed(run.setting))


@pytest.mark.full
def test_episodes_of_several_turns(inputs: Path, undisturbed: Undisturbed, tmp_path: Path) -> None:
    run = Sequel(settings.episodes(inputs), tmp_path / "run")
    assert_killed(run.run(Fault(faults.EPISODE, 9, "SIGKILL", rank=1)), rank=1)
    part = "step_000000_interrupted"
    assert interrupt(run, faults.EPISODE, 10, "ALL=SIGUSR1", -1) == part
    drawn = run.state(part)["drawn"]["train 1"]
    assert len(drawn["episodes"]) == len(drawn["rows"]) > 2
    assert interrupt(run, faults.ACTOR_LOSS, 2) == part
    assert len(run.state(part)["progress"]["experience"]["rollout"]["episodes"]) == 16
    run.finish()
    assert max(row.get("episodes/turns/max", 0) for row in run.rows()) == 3
    assert max(row.get("episodes/contexts/mean", 0) for row in run.rows()) > 1
    assert_same_run(run, undisturbed(run.setting))


@pytest.mark.full
def test_episodes_that_several_steps_draw(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    # The undisturbed run scores when all is drawn.
    run = Sequel(settings.partial(inputs), tmp_path / "run", ["rollout.overlap=true"])
    # In step 2: those that began in step 1 go on, with environments that are played again.
    assert_killed(run.run(Fault(faults.HAND_OVER, 3, "SIGKILL", rank=0)), rank=0)
    assert run.checkpoints == ["step_000001"]

    begun = run.state("step_000001")["begun"]
    assert begun["samples"]["ended"].tolist().count(0) > 2
    assert begun["samples"]["masks"].any()  # which tokens could be drawn, and the likeliest
    assert begun["head"] == 5
    part = "step_000001_interrupted"
    assert interrupt(run, faults.EPISODE, 3, "ALL=SIGUSR1", -1) == part

    drawn = run.state(part)["drawn"]["train 2"]
    assert 0 < drawn["ended"].tolist().count(0) < len(drawn["rows"])
    assert interrupt(run, faults.ACTOR_LOSS, 2) == part
    run.finish()
    assert max(row.get("staleness/max", 0) for row in run.rows()) >= 1
    assert max(row.get("perf/scored_early", 0) for row in run.rows(free=["timing"])) > 0

    assert_same_run(run, undisturbed(run.setting))


@pytest.mark.full
def test_an_update_in_bypass_mode_is_interrupted(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.bypass(inputs), tmp_path / "run")
    done = []
    # In the middle of the second mini-batch, and of the third, with the first one done before.
    for call in (9, 8):
        # The checkpoint of the second interrupt replaces the first; a rank is killed in between.
        if done:
            again = Fault(faults.ACTOR_LOSS, 2, "SIGUSR1")
            assert_killed(run.run(again, Fault(faults.RENAMING, 2, "SIGKILL", rank=0)), rank=0)
            assert run.checkpoints == []
        assert interrupt(run, faults.ACTOR_LOSS, call, "SIGUSR1") == "step_000000_interrupted"
        progress = run.state("step_000000_interrupted")["progress"]
        done.append(progress["actor"]["mini_batches"])
    assert done == [1, 2]

    run.finish()
    stopped = [row["actor/kl_stopped"] for row in run.rows() if row["step"]]
    assert 1.0 in stopped, "choose a lower target_kl_stop"
    assert_same_run(run, undisturbed(run.setting))
    _check_critic(run, inputs, tmp_path)


def _check_critic(run: Sequel, inputs: Path, out: Path) -> None:
    """It took its own number of optimizer steps, and its export holds what it has become."""
    rows = [row for row in run.rows() if row["step"]]
    assert [row["critic/optimizer_steps"] for row in rows] == [3.0] * 4
    # Schedules count training steps: two of warm-up, and the decay ends after the fourth.
    rates = [5e-4, 1e-3, 2e-3 / 3, 1e-3 / 3]
    assert [row["critic/lr"] for row in rows] == pytest.approx(rates)
    assert [row["critic/head_lr"] for row in rows] == pytest.approx([5 * rate for rate in rates])
    assert [row["actor/lr"] for row in rows] == pytest.approx([8e-4, 6e-4, 4e-4, 2e-4])

    words = [str(run.directory), "--role", "critic", "--to", "huggingface", "--out"]
    assert convert_checkpoint.main([*words, str(out / "critic")]) == 0
    exported = run.directory / "critic"
    assert_same_tensors(out / "critic", exported)
    before = read_tensors(inputs / "llama-critic")
    for name, tensor in read_tensors(exported).items():
        assert torch.equal(tensor, before[name]) == (".self_attn." in name), name

    auto = transformers.AutoModelForSequenceClassification
    critic, told = auto.from_pretrained(exported, output_loading_info=True)
    assert not any(told.values()) and critic.config.num_labels == 1
    check_weight_files(exported, load_spec(exported, "scalar"), needs_head=True)


@pytest.mark.full
def test_models_that_are_off_the_device(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.offloaded(inputs), tmp_path / "run")
    assert_killed(run.run(Fault(faults.VALUES, 1, "SIGKILL", rank=0)), rank=0)
    assert_killed(run.run(Fault(faults.MODEL_FILE, 2, "SIGKILL", rank=0)), rank=0)
    assert_killed(run.run(Fault(faults.ACTOR_LOSS, 22, "SIGKILL", rank=1)), rank=1)
    part = f"{run.checkpoints[-1]}_interrupted"
    assert interrupt(run, faults.ACTOR_LOSS, 5) == part
    run.finish()
    assert_same_run(run, undisturbed(settings.ppo(inputs)))


@pytest.mark.full
def test_an_update_of_adapters_is_killed_and_interrupted(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.lora(inputs), tmp_path / "run")
    assert_killed(run.run(Fault(faults.REFERENCE, 1, "SIGKILL", rank=0)), rank=0)
    assert_killed(run.run(Fault(faults.ACTOR_LOSS, 22, "SIGKILL", rank=1)), rank=1)
    part = f"{run.checkpoints[-1]}_interrupted"
    assert interrupt(run, faults.ACTOR_LOSS, 5) == part
    assert run.state(part)["progress"]["updated"] == ["critic"]
    interrupt(run, faults.GENERATION, 4)  # some responses of the step were given
    run.finish()
    assert_same_run(run, undisturbed(run.setting), free=FREE_WITH_ADAPTERS)

    # Merged, the adapters in the last checkpoint are those of the export; the critic has some too.
    checkpoint = run.directory / "checkpoints" / run.checkpoints[-1]
    for name, words in (
        ("checkpoint", [str(checkpoint), "--merge"]),
        ("export", [str(run.directory / "actor"), "--merge"]),
        ("critic_adapter", [str(checkpoint), "--role", "critic", "--verify"]),
        ("critic", [str(checkpoint), "--role", "critic", "--verify", "--merge"]),
    ):
        out = ["--to", "huggingface", "--out", str(tmp_path / name)]
        assert convert_checkpoint.main([*words, *out]) == 0
    assert_same_tensors(tmp_path / "checkpoint", tmp_path / "export")


@pytest.mark.parametrize(
    "make",
    [
        settings.sft,
        pytest.param(settings.reward_model, marks=pytest.mark.full),
        pytest.param(settings.critic, marks=pytest.mark.full),
        pytest.param(settings.dpo, marks=pytest.mark.full),
    ],
)
def test_supervised_training_is_killed_and_interrupted(
    make: Callable[[Path], Setting], inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(make(inputs), tmp_path / "run")
    assert_killed(run.run(Fault(faults.SUPERVISED_STEP, 2, "SIGKILL", rank=1)), rank=1)
    for where, action, newest in (
        (faults.SUPERVISED_VALIDATION, "SIGTERM", ("step_000001_interrupted", "step_000002")),
        (faults.SUPERVISED_STEP, "SIGUSR1", ("step_000002", "step_000003")),
        (faults.OPTIMIZER_STEP, "SIGINT", ("step_000003", "step_000003_interrupted")),
    ):
        assert interrupt(run, where, 1, action) in newest
    run.finish()
    assert_same_run(run, undisturbed(run.setting))

    # The summary has the seconds of all starts, as the rows of steps have.
    summary = json.loads((run.directory / "summary.json").read_text())
    in_steps = sum(row.get("timing_s/step", 0.0) for row in run.rows(free=()))
    assert summary["seconds"] >= in_steps - 0.1
