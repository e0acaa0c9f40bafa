"""Full disks, bad gradients, reward functions that hang, Ctrl-C, and a killed asynchronous save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import faults, settings
from tests.faults.faults import Fault
from tests.faults.runs import QUEUE_AGAIN, Sequel, Undisturbed, assert_same_run


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_is_full_for_a_while(
    asynchronous: bool, inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.ppo(inputs), tmp_path / "run")
    full = Fault(faults.END_OF_STEP, 2, "FULL")
    room = Fault(faults.END_OF_STEP, 3, "ROOM")

    ended = run.run(full, room, keys=[f"trainer.async_save={asynchronous}"])
    assert ended.codes == [0, 0], ended.text
    (line,) = [line for line in ended.text.splitlines() if " ERROR " in line]
    file = (
        run.directory / "checkpoints" / ".step_000002.saving" / "actor" / "rank_00001.safetensors"
    )
    assert f"cannot write {file}: File too large; training goes on" in line
    assert run.checkpoints == ["step_000001", "step_000003", "step_000004"]
    assert_same_run(run, undisturbed(run.setting))


def test_a_disk_that_is_full_when_the_run_is_interrupted(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.sft(inputs), tmp_path / "run")
    ended = run.run(Fault(faults.OPTIMIZER_STEP, 3, "FULL SIGTERM", rank=-1))
    assert ended.codes == [1, 1], ended.text
    assert "CheckpointError" in ended.text and "was not saved" in ended.text
    assert run.checkpoints[-1] == "step_000002"
    run.finish()
    assert_same_run(run, undisturbed(run.setting))


def test_a_rank_is_killed_while_its_thread_writes(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.ppo(inputs), tmp_path / "run", extra=["trainer.async_save=true"])
    ended = run.run(Fault(faults.MODEL_FILE, 3, "SIGKILL"))  # the actor's file of step 2
    assert ended.codes[1] == -9, ended.text
    assert "step_000001" in run.checkpoints
    assert "step_000002" not in run.checkpoints

    ended = run.run(Fault(faults.ACTOR_LOSS, 6, "SIGUSR1"))
    assert ended.codes == [QUEUE_AGAIN, QUEUE_AGAIN], ended.text
    run.finish()
    assert_same_run(run, undisturbed(run.setting))


def test_gradients_that_are_no_numbers(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.ppo(inputs), tmp_path / "run")
    run.run(Fault(faults.END_OF_STEP, 1, "SIGTERM"))
    checkpoints = run.checkpoints
    assert checkpoints[0] == "step_000001"

    keys = ["actor.optim.max_skipped_steps=2"]
    ended = run.run(Fault(faults.ACTOR_LOSS, 4, "NAN", rank=-1), keys=keys)
    assert 1 in ended.codes and 0 not in ended.codes, ended.text
    error = "TrainingError: training step 2: 2 optimizer steps in a row had an unusable gradient"
    assert error in ended.text
    assert (run.directory / "failed_step_000002.pt").is_file()
    assert run.checkpoints == checkpoints

    run.finish()
    assert_same_run(run, undisturbed(run.setting))


def test_a_reward_function_that_hangs(inputs: Path, tmp_path: Path) -> None:
    run = Sequel(settings.ppo(inputs), tmp_path / "run")
    keys = [f'reward.terms=[{{"name": "{inputs}/rewards.py:hangs"}}]', "reward.timeout_s=0.5"]
    ended = run.run(keys=keys)
    assert 1 in ended.codes and 0 not in ended.codes, ended.text
    (error,) = [line for line in ended.text.splitlines() if " ERROR " in line]
    assert "RewardError: reward function hangs of" in error
    assert "took more than 0.5 s and was stopped" in error


def test_a_reward_function_that_raises_on_all_ranks_shows_one_traceback(
    inputs: Path, tmp_path: Path
) -> None:
    run = Sequel(settings.ppo(inputs), tmp_path / "run")
    ended = run.run(keys=[f'reward.terms=[{{"name": "{inputs}/rewards.py:fails"}}]'])
    assert ended.codes == [1, 1], ended.text

    (speaker,) = [output for output in ended.outputs if "Traceback" in output]
    shown = speaker[speaker.index("RewardError: reward function fails of") :].splitlines()
    assert "raised LookupError: no such answer (line " in shown[0]
    assert shown[-1] == "LookupError: no such answer"
    assert "lines are left out" in shown[20]
    assert len(shown) <= 40


def test_an_interrupt_from_the_keyboard(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.bypass(inputs), tmp_path / "run")
    ended = run.run(Fault(faults.SCORING, 3, "SIGINT", rank=-1))
    assert ended.codes == [QUEUE_AGAIN, QUEUE_AGAIN], ended.text

    ended = run.run(Fault(faults.SCORING, 2, "SIGINT SIGINT", rank=-1))
    assert set(ended.codes) <= {130, -15, 143} and 130 in ended.codes, ended.text
    assert "interrupted twice" in ended.text

    run.finish()
    assert_same_run(run, undisturbed(run.setting))
