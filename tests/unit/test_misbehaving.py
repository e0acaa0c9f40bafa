"""However a user's code misbehaves, all that run it say so in a line, go on, and leave nothing.

A reward function, a tool of an environment and a rollout function run the same code.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mrlhf.episodes.environments.host import EnvironmentHost, ToolLimits
from mrlhf.episodes.environments.protocol import Answer, EnvironmentReference
from mrlhf.errors import RewardError
from mrlhf.rewards.custom import Limits, load_custom
from mrlhf.rewards.interface import RewardInput
from tests import adapter_folder
from tests.leftovers import assert_all_end, is_alive
from tests.unit.misbehaving import WAYS

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
SAMPLING = {**adapter_folder.SAMPLING, "max_tokens": 9, "max_turns": 9}
HASTY = {"timeout_s": 2.0}
SMALL = {"memory_mb": 300}
TIMES_OUT = r"took more than 2 s and was stopped"
NO_THREAD = r"RuntimeError: can't start new thread"
IN_REWARD = r"reward\.memory_mb = 300 limits its memory"


class Reward:
    """Runs a way to misbehave in a reward function."""

    def __init__(self, file: Path, timeout_s: float, memory_mb: int | None) -> None:
        """Start its process."""
        self._reward = load_custom(f"{file}:score", Limits(timeout_s, memory_mb))
        self.close = self._reward.close

    def run(self, way: str) -> str:
        """What came of it, or the error in its one line."""
        try:
            [scored] = self._reward.score([RewardInput("sums", "3+4=", way, "7", {}, 1)])
        except RewardError as error:
            assert f"on data_source 'sums', solution '{way}', prompt '3+4='" in str(error)
            assert "\n" not in str(error)
            return str(error)
        return str(scored.answer)


class Program:
    """Runs it in a tool of an environment, or in a rollout function."""

    def __init__(self, file: Path, name: str, timeout_s: float, memory_mb: int | None) -> None:
        """Start its process."""
        reference = EnvironmentReference(f"{file}:{name}")
        self._host = EnvironmentHost({"": reference}, ToolLimits(timeout_s, memory_mb))
        self.close = self._host.close

    def run(self, way: str) -> str:
        """What came of it, or why the episode failed."""
        self._host.begin(0, "", {"way": way}, seed=0, sampling=SAMPLING)
        found: Any = None
        until = time.monotonic() + 60

        while found is None and time.monotonic() < until:
            for outcome in self._host.poll(1.0):
                if outcome.failure is not None:
                    found = outcome.failure
                elif outcome.kind == "reset":
                    self._host.turn(0, "", [("misbehave", {"way": way})])
                elif outcome.kind == "turn":
                    found = outcome.results[0].content
                elif outcome.kind == "ask":
                    assert outcome.question is not None
                    turn = {"token_ids": [7], "text": "x", "stopped": True, "draw": 0}
                    self._host.answer(0, Answer(outcome.question.number, turn))
                else:
                    found = outcome.trajectories[0]["role"]

        assert self._host.poll(0.0) == []
        self._host.end(0)
        assert isinstance(found, str), found
        return found


Service = Reward | Program
Start = Callable[..., Service]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("users") / "own.py"
    path.write_text(WAYS, encoding="utf-8")
    return path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("score", marks=pytest.mark.full),
        pytest.param("Environment", marks=pytest.mark.full),
        "rollout",
    ],
)
def start(request: pytest.FixtureRequest, file: Path) -> Iterator[Start]:
    """Starts the service with limits, or hands out the one that has them."""
    started: dict[tuple[float, int | None], Service] = {}

    def start_with(timeout_s: float = 60.0, memory_mb: int | None = None) -> Service:
        limits = (timeout_s, memory_mb)
        if limits not in started and request.param == "score":
            started[limits] = Reward(file, *limits)
        elif limits not in started:
            started[limits] = Program(file, request.param, *limits)
        return started[limits]

    yield start_with
    for service in started.values():
        service.close()


# The way, the limits, and a pattern of what is said of it; of a reward function apart if it says
# more. The kernel ends the code before the trainer if memory runs out: `reads_its_place`.
TABLE: list[tuple[str, dict[str, Any], str, str | None]] = [
    ("raises", {}, r"KeyError: 'lost'", None),
    ("exits", {}, r"SystemExit: no score today", None),
    ("forks", {}, r"^fine$", None),
    ("fork_exits", {}, r"^fine$", None),
    ("loops", HASTY, TIMES_OUT, None),
    ("sleeps", HASTY, TIMES_OUT, None),
    ("hangs_in_c", HASTY, TIMES_OUT, None),
    ("ignores_signals", HASTY, TIMES_OUT, None),
    ("leaves", {}, r"ended its process \(exit code 3\)", None),
    ("leaves_a_program", {}, r"ended its process \(exit code 4\)", None),
    ("crashes", {}, r"ended its process \(signal SIGABRT\)", None),
    ("crashes", SMALL, r"ended its process \(signal SIGABRT\)", rf"signal SIGABRT; {IN_REWARD}\)"),
    ("is_killed", {}, r"signal SIGKILL\)", r"SIGKILL, which the kernel sends when"),
    ("hangs_up", {}, r"was stopped$", r"closed its connection to the trainer, and was stopped"),
    ("takes_memory", {}, r"^fine$", None),
    ("takes_memory", SMALL, r"MemoryError", rf"raised MemoryError.*; {IN_REWARD}"),
    ("starts_threads", SMALL, NO_THREAD, rf"raised {NO_THREAD}.*; {IN_REWARD}"),
    ("a_child_takes_memory", {}, r"^fine$", None),
    ("a_child_takes_memory", SMALL, r"^refused$", None),
    ("reads_its_place", {}, r"^1000$", None),
]


@needs_proc
@pytest.mark.parametrize(("way", "limits", "said", "of_reward"), TABLE)
def test_it_is_told_in_a_line_and_the_service_goes_on(
    start: Start, way: str, limits: dict[str, Any], said: str, of_reward: str | None
) -> None:
    service = start(**limits)
    wanted = of_reward if of_reward and isinstance(service, Reward) else said
    assert re.search(wanted, service.run(way))
    assert service.run("is_fine") == "fine"


@needs_proc
def test_children_end_with_a_call_that_is_stopped_and_with_the_service(
    start: Start, file: Path, tmp_path: Path
) -> None:
    for way in ("has_a_child_and_hangs", "has_a_child_and_leaves", "has_a_child"):
        service = start(**HASTY)
        found = service.run(f"{way} {tmp_path / way}")
        pid = int((tmp_path / way).read_text())
        if way == "has_a_child" and isinstance(service, Reward):
            assert found == "fine" and is_alive(pid)
            service.close()
        assert_all_end(pid)
        if isinstance(service, Reward) and way != "has_a_child":
            assert re.search(rf"it printed: (imported \| )?child {pid}$", found)
