"""How a replica waits for environments that take long, and what it takes of what they say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mrlhf.batch import Prompts
from mrlhf.episodes.environments.protocol import Outcome, Program
from mrlhf.episodes.limits import TurnLimits
from mrlhf.episodes.read import EnvironmentInputs
from mrlhf.episodes.replica import ReplicaEpisodes
from mrlhf.episodes.runner import EpisodeRunner
from mrlhf.inference.base import EngineStats, Finished, Request, SamplingParams
from mrlhf.rollout.drawing import RequestId, Task
from tests.fake_engine import FakeEngine
from tests.models.chat import chat_tokenizer

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
    limits = TurnLimits(4, None, 10, 10, 8, "tell", "tell")
    nobody: Any = None
    environments = EnvironmentInputs({}, {"": program}, {"": nobody}, nobody, nobody)
    replica = ReplicaEpisodes(groups, host, environments, nobody, limits)
    task = Task(
        Prompts([[1]], [0], [""], [""], [""], [{}]),
        SAMPLING,
        [Request(id=RequestId(0, 0), prompt=[1], uid=0, samples=range(1), sampling=SAMPLING)],
    )
    units: list[int] = []

    def may_step(unit: int, samples: int) -> bool:
        units.append(unit)
        return unit < 1000

    runner = EpisodeRunner(replica, IdleEngine(), task, None, lambda: len(units) > 2)
    assert runner.draw(may_step).samples == []
    # Ranks whose engines draw count many more steps meanwhile than those that wait.
    assert units == list(range(1001)) and min(host.waits[:2]) >= 0.5
    assert set(host.waits[2:]) == {0.0}


@pytest.mark.parametrize("name", ["qwen3", "mistral_v3"])
def test_no_text_becomes_a_special_token_when_others_are_left_out(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    limits = TurnLimits(4, None, 1000, 1000, 8, "tell", "tell")
    nobody: Any = None
    replica = ReplicaEpisodes(nobody, None, nobody, tokenizer, limits)
    special = tokenizer.decode([tokenizer.eos_id], False)
    nested = special[:3] + special + special[3:]
    for text in (f"a{special}b", f"a{nested}b", f"a{special[:3]}{nested}{special[3:]}b"):
        said = replica.cut(text)
        assert all(map(tokenizer.is_ordinary, tokenizer.encode(said)))
        assert said[0] + said[-1] == "ab"
    assert replica.cut(f"a{special}b") == "ab"
    assert replica.cut("plain  text\n") == "plain  text\n"
