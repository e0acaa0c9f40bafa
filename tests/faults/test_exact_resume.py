"""A run that is killed or interrupted anywhere, and started again, has the undisturbed run's numbers.

Each test is one run that goes on through one fault after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import faults, settings
from tests.faults.faults import Fault
from tests.faults.runs import QUEUE_AGAIN, Ended, Sequel, Setting, assert_same_run

pytestmark = pytest.mark.timeout(300)
Undisturbed = Callable[[Setting], Sequel]

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
    assert run.checkpoints[0] == "step_000001"
    assert "step_000002" not in run.checkpoints

    assert_killed(run.run(Fault(faults.MODEL_FILE, 2, "SIGKILL", rank=0)), rank=0)
    assert_killed(run.run(Fault(faults.MANIFEST_FILE, 1, "SIGKILL", rank=0)), rank=0)
    assert "step_000002" not in run.checkpoints
    assert run.run(Fault(faults.ACTOR_LOSS, 22, "SIGKILL", rank=-1)).codes == [-9, -9]
    run.finish()
    assert_same_run(run, undisturbed(run.setting))


def test_a_run_is_interrupted_in_each_phase(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.ppo(inputs), tmp_path / "run")

    # In the first validation: nothing is there to be saved but the start.
    assert run.run(Fault(faults.VALIDATION, 1, "SIGTERM")).codes == BOTH_STOPPED
    assert run.checkpoints == ["step_000000"]

    # In the middle of a generation: the responses that have ended are kept.
    assert run.run(Fault(faults.GENERATION, 12, "SIGUSR1", rank=0)).codes == BOTH_STOPPED
    print(run.checkpoints, run.state(run.checkpoints[-1]).get("drawn", {}).keys())

    for phase, call in (
        (faults.HAND_OVER, 1),
        (faults.SCORING, 2),
        (faults.REFERENCE, 1),
        (faults.FORWARD, 2),
        (faults.VALUES, 1),
        (faults.CRITIC_LOSS, 5),
        (faults.ACTOR_LOSS, 7),
        (faults.ACTOR_LOSS, 2),
        (faults.OPTIMIZER_STEP, 1),
        (faults.END_OF_STEP, 1),
        (faults.VALIDATION, 1),
        (faults.MODEL_FILE, 1),
    ):
        ended = run.run(Fault(phase, call, "SIGTERM"))
        print(phase, call, ended.codes, run.checkpoints)
        assert ended.codes == BOTH_STOPPED, ended.text
    run.finish()
    assert_same_run(run, undisturbed(run.setting))


def test_an_update_in_bypass_mode_is_interrupted(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(settings.bypass(inputs), tmp_path / "run")
    for call in (2, 3, 5, 9, 13):
        ended = run.run(Fault(faults.ACTOR_LOSS, call, "SIGUSR1"))
        print(call, ended.codes, run.checkpoints)
        assert ended.codes == BOTH_STOPPED, ended.text
    run.finish()
    assert_same_run(run, undisturbed(run.setting))


@pytest.mark.parametrize("make", [settings.sft, settings.reward_model])
def test_supervised_training_is_killed_and_interrupted(
    make: Callable[[Path], Setting], inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    run = Sequel(make(inputs), tmp_path / "run")
    assert_killed(run.run(Fault(faults.SUPERVISED_STEP, 2, "SIGKILL", rank=1)), rank=1)
    for phase, call in ((faults.SUPERVISED_STEP, 1), (faults.OPTIMIZER_STEP, 1)):
        ended = run.run(Fault(phase, call, "SIGUSR1"))
        print(phase, call, ended.codes, run.checkpoints)
        assert ended.codes == BOTH_STOPPED, ended.text
    run.finish()
    assert_same_run(run, undisturbed(run.setting))
