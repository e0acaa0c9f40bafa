"""Whichever rank finds a mistake, the job says it once, and every rank ends with the same code."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults import faults, settings
from tests.faults.faults import Fault, wait_for
from tests.faults.runs import Ended, Sequel


def messages(ended: Ended) -> list[str]:
    """The errors that the job has said, of all ranks."""
    lines = ended.text.splitlines()
    assert "Traceback" not in ended.text, ended.text
    return [line for line in lines if " ERROR " in line or line.startswith("error: ")]


def test_a_mistake_that_all_ranks_see(inputs: Path, tmp_path: Path) -> None:
    run = Sequel(settings.sft(inputs), tmp_path / "run")
    ended = run.run(keys=["model.tpp=2"])
    assert ended.codes == [2, 2], ended.text
    assert messages(ended) == ["error: unknown key 'model.tpp'; did you mean 'model.tp'?"]


def test_a_bad_variable_of_the_launcher(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    ended = Sequel(settings.sft(inputs), tmp_path / "run").run()
    assert ended.codes == [2, 2], ended.text
    (line,) = messages(ended)
    assert "SLURM_JOB_END_TIME is 'soon', no number" in line


@pytest.mark.parametrize(
    "where",
    [
        faults.CHECK,
        faults.JOINING,
        faults.SUPERVISED_VALIDATION,
        faults.SUPERVISED_STEP,
    ],
)
def test_a_mistake_that_one_rank_sees(where: str, inputs: Path, tmp_path: Path) -> None:
    run = Sequel(settings.sft(inputs), tmp_path / "run")
    ended = run.run(Fault(where, 1, "DATA", rank=1))
    assert ended.codes == [2, 2], ended.text
    (line,) = messages(ended)
    assert line.endswith("rank 1 cannot read its data")


def test_mistakes_that_differ_from_rank_to_rank(inputs: Path, tmp_path: Path) -> None:
    run = Sequel(settings.sft(inputs), tmp_path / "run")
    ended = run.run(Fault(faults.SUPERVISED_STEP, 1, "DATA", rank=-1))
    assert ended.codes == [2, 2], ended.text
    (line,) = messages(ended)
    assert "cannot read its data" in line


def test_a_bug_shows_one_traceback(inputs: Path, tmp_path: Path) -> None:
    run = Sequel(settings.sft(inputs), tmp_path / "run")
    ended = run.run(Fault(faults.SUPERVISED_STEP, 2, "BUG", rank=1))
    assert ended.codes == [1, 1], ended.text
    assert ended.text.count("Traceback") == 1
    assert ended.outputs[1].endswith("KeyError: 'a bug on rank 1'\n")


def test_nobody_leaves_while_a_slow_rank_speaks(inputs: Path, tmp_path: Path) -> None:
    """The launcher asks both ranks to end while rank 0 has the word and has said nothing yet."""
    run = Sequel(settings.sft(inputs), tmp_path / "run")
    speaking = tmp_path / "speaking"
    listening = tmp_path / "listening"
    speak = tmp_path / "speak"
    job = run.start(
        Fault(faults.SUPERVISED_STEP, 1, "DATA", rank=0),
        Fault(faults.SPEAKING, 1, f"TOUCH={speaking} AWAIT={speak}", rank=0),
        Fault(faults.SUPERVISED_STEP, 1, f"AWAIT={speaking} DATA", rank=1),
        Fault(faults.LISTENING, 1, f"TOUCH={listening}", rank=1),
    )
    wait_for(listening)
    job.send(signal.SIGTERM, 0, 1)
    speak.touch()

    ended = job.wait()
    assert ended.codes == [2, 2], ended.text
    (line,) = messages(ended)
    assert line.endswith("rank 0 cannot read its data")
