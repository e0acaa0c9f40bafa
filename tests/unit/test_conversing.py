"""How a replica waits for environments that take long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mrlhf.batch import Prompts
from mrlhf.environments.interface import Outcome, Program
from mrlhf.inference.base import EngineStats, Finished, Request, SamplingParams
from mrlhf.rollout.conversations import Conversations, Dialogue, TurnLimits
from mrlhf.rollout.conversing import Conversing
from mrlhf.rollout.drawing import Task
from tests.fake_engine import FakeEngine

SAMPLING = SamplingParams(temperature=1.0, max_tokens=8, seed=1)


class SilentHost:
    """Never says anything; keeps how long it was waited for."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def begin(self, *given: Any) -> None: ...

    def end(self, number: int) -> None: ...

    def poll(self, timeout_s: float) -> list[Outcome]:
        self.waits.append(timeout_s)
        return []


class IdleEngine(FakeEngine):
    def collect(self) -> Finished:
        return Finished([], EngineStats())


def test_nothing_waits_for_outcomes_once_the_run_stops() -> None:
    host: Any = SilentHost()
    groups: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    program = Program("", (), is_stateless=False, has_reward=True)
    limits = TurnLimits(4, None, 10, 10, "tell", "tell")
    dialogues: Any = {"": Dialogue(program, None)}  # type: ignore[arg-type]
    nobody: Any = None
    owner = Conversations(groups, host, dialogues, lambda source: "", nobody, nobody, limits)
    task = Task(
        Prompts([[1]], [0], [""], [""], [""], [{}]),
        SAMPLING,
        [Request(id=0, prompt=[1], uid=0, samples=range(1), sampling=SAMPLING)],
    )
    units: list[int] = []

    def may_step(unit: int, samples: int) -> bool:
        units.append(unit)
        return unit < 1000

    leading = Conversing(owner, IdleEngine(), task, None, lambda: len(units) > 2)
    assert leading.draw(may_step).trajectories == []
    # Ranks whose engines draw count many more steps meanwhile than those that wait.
    assert units == list(range(1001)) and min(host.waits[:2]) >= 0.5
    assert set(host.waits[2:]) == {0.0}
