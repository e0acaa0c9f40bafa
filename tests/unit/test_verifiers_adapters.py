"""Environments of the library verifiers lead episodes, where it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrlhf.environments.interface import ToolCall
from tests.adapter_folder import Folder, Turn


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    folder.close()


CLASSIC = """
import verifiers as vf
from datasets import Dataset
from verifiers_adapter import adapt, write_rows

ROWS = [{"question": "What is 3 plus 2?", "answer": "5", "info": {"parts": [3, 2]}}]


def right(completion, answer, info, **_):
    assert info == {"parts": [3, 2]}
    return float(bool(completion) and completion[-1]["content"] == answer)


def length(completion):
    return len(completion)


def add(a: int, b: int = 2) -> int:
    '''Add two numbers.

    Args:
        a: the first
    '''
    if a > 100:
        raise ValueError("too large")
    return a + b


class Asking(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["asked"] = 0
        state["prompt"] = [*state["prompt"], {"role": "user", "content": "Ready?"}]
        return state

    @vf.stop
    async def has_asked_twice(self, state):
        return state["asked"] == 2

    async def env_response(self, messages, state, **_):
        state["asked"] += 1
        return [{"role": "user", "content": f"Sure? {messages[-1]['content']}"}]


class Forgetting(Asking):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:] if state["trajectory"] else messages


class Failing(Asking):
    async def env_response(self, messages, state, **_):
        raise vf.ToolError("the sandbox is gone")


def made(kind, function=right, **further):
    rubric = vf.Rubric(funcs=[function, length], weights=[0.5, 0.0])
    return kind(dataset=Dataset.from_list(ROWS), rubric=rubric, **further)


def together(completions):
    return [0.0 for _ in completions]


tools = made(vf.ToolEnv, tools=[add], max_turns=3, system_prompt="Calculate.", timeout_seconds=0.01)
Tools = adapt(tools)
Single = adapt(made(vf.SingleTurnEnv))
Several = adapt(made(Asking))
Rewriting = adapt(made(Forgetting))
Broken = adapt(made(Failing))
write_rows(tools.get_dataset(), "FOLDER/rows.jsonl")
write_rows(made(Asking).get_dataset(), "FOLDER/plain.jsonl")
"""
COMPARING = CLASSIC + "\nComparing = adapt(made(Asking, together))\n"
GROUP = CLASSIC + '\nGroup = adapt(vf.EnvGroup([tools], env_names=["sums"]))\n'
COMPLETING = CLASSIC + '\nwrite_rows([{"prompt": "3+2="}], "FOLDER/text.jsonl")\n'


def verifiers(folder: Folder, text: str, at_least: tuple[int, ...], below: tuple[int, ...]) -> None:
    """Write a user's file; skip the test where no such version of the library is installed."""
    version = pytest.importorskip("verifiers").__version__
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not at_least <= numbers < below:
        pytest.skip(f"verifiers {version} is another library")
    folder.write(text.replace("FOLDER", str(folder.path)))


def rows_of(folder: Folder, name: str) -> dict[str, Any]:
    return json.loads((folder.path / f"{name}.jsonl").read_text().splitlines()[0])


def test_the_loop_of_verifiers_leads_tools_turns_and_scores(folder):
    verifiers(folder, CLASSIC, (0, 1), (0, 4))
    (tool,) = folder.program("Tools").tools
    assert tool["function"]["name"] == "add"
    assert tool["function"]["description"] == "Add two numbers."
    assert tool["function"]["parameters"]["required"] == ["a"]
    properties = tool["function"]["parameters"]["properties"]
    assert properties["a"] == {"type": "integer", "description": "the first"}
    assert properties["b"] == {"type": "integer", "default": 2}

    row = rows_of(folder, "rows")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    turns: list[Turn] = [[ToolCall("add", {"a": 3})], "5"]
    begun, called, said, paid = folder.play("Tools", row, turns)
    assert (begun.failure, begun.observation) == (None, None)
    assert called.results[0].content == "5" and not called.ended
    assert said.ended
    assert paid.reward is not None
    expected = {"right": 1.0, "length": 3.0, "num_turns": 2.0, "add_calls": 1.0, "score": 0.5}
    assert {key: paid.reward[key] for key in expected} == expected

    # Each call is a turn of the library, of which there may be three.
    calls = [ToolCall("add", {"a": a}) for a in (101, 3, 4, 5)]
    outcomes = folder.play("Tools", row, [calls])
    told = [result.content for result in outcomes[1].results]
    assert told == ["too large", "5", "", "The episode is over."]
    assert outcomes[1].ended and outcomes[2].reward["num_turns"] == 3.0

    begun, said, paid = folder.play("Single", rows_of(folder, "plain"), ["5"])
    assert said.ended and paid.reward["score"] == 0.5


def test_an_environment_of_verifiers_speaks_first_and_between_turns(folder):
    verifiers(folder, CLASSIC, (0, 1), (0, 4))
    folder.program("Several")
    row = rows_of(folder, "plain")
    begun, first, second, third, paid = folder.play("Several", row, ["5", "6", "5"])
    assert begun.observation == [{"role": "user", "content": "Ready?"}]
    assert first.observation == [{"role": "user", "content": "Sure? 5"}]
    assert second.observation == [{"role": "user", "content": "Sure? 6"}]
    assert third.ended and paid.reward["score"] == 0.5 and paid.reward["length"] == 5.0

    # The trainer has no room for the answer to the first question.
    outcomes = folder.play("Several", row, ["5"])
    assert outcomes[-1].reward["length"] == 1.0 and outcomes[-1].reward["score"] == 0.5


def test_what_verifiers_cannot_be_trained_on_is_refused_in_a_line(folder):
    verifiers(folder, CLASSIC, (0, 1), (0, 4))
    folder.program("Tools")
    row = rows_of(folder, "plain")
    assert "rewrites earlier messages" in str(folder.play("Rewriting", row, ["5"])[1].failure)
    assert "the sandbox is gone" in str(folder.play("Broken", row, ["5", "5"])[-1].failure)
    assert "column verifiers" in str(folder.play("Single", {"prompt": "?"}, [])[0].failure)
    tools = [{"name": "cut", "description": "", "parameters": {}}]
    info = {"parts": [3, 2], "tool_defs": tools}
    other = {**row, "verifiers": {**row["verifiers"], "info": info}}
    assert "other tools" in str(folder.play("Single", other, [])[0].failure)

    for text, name, words in (
        (COMPARING, "Comparing", "compares the rollouts"),
        (GROUP, "Group", "EnvGroup is no MultiTurnEnv"),
        (COMPLETING, "Tools", "to be completed"),
    ):
        folder.write(text.replace("FOLDER", str(folder.path)))
        assert words in folder.refusal(name)


NEWER = """
import verifiers.v1 as vf
from verifiers_v1_adapter import adapt, write_rows


def load(taskset, **further):
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset}, **further}))


sums = load("sums_tasks", agent={"max_turns": 3})
talk = load("talk_tasks")
Sums = adapt(sums)
Talk = adapt(talk)
write_rows(sums.taskset, "FOLDER/sums.jsonl")
write_rows(talk.taskset.take(1), "FOLDER/talk.jsonl")
"""
SUMS_TASKS = '''
import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.TaskData):
    answer: str


class Calls(vf.State):
    calls: int = 0


class Calculator(vf.Toolset[vf.ToolsetConfig, Calls]):
    @vf.tool
    def add(self, a: int, b: int = 2) -> str:
        """Add two numbers."""
        self.state.calls += 1
        if a > 100:
            raise ValueError("too large")
        return str(a + b)


class SumTask(vf.Task[Sum, Calls, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def calls(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        printed = await runtime.run(["echo", str(trace.state.calls)], {})
        return float(printed.stdout)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        task = Sum(prompt="What is 3 plus 2?", system_prompt="Calculate.", answer="5")
        yield SumTask(task, self.config.task)
'''
TALK_TASKS = """
import itertools

import verifiers.v1 as vf

__all__ = ["Talk", "TalkEnv"]


class TalkTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.stop
    async def says_bye(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "bye"


class TalkConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class TalkEnv(vf.Env[TalkConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                segment = await interaction.turn(f"You say {segment.last_reply}?")
        interaction.trace.record_reward("turns", interaction.trace.num_turns)


class Talk(vf.Taskset[TalkTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield TalkTask(vf.TaskData(prompt=f"Hello {number}"), self.config.task)
"""
TWO_AGENTS = NEWER + '\nTwo = adapt(load("talk_tasks", id="user-sim"))\n'
CONTAINER = NEWER + "\nsums.taskset.task_type().NEEDS_CONTAINER = True\nBox = adapt(sums)\n"


def newer(folder: Folder, text: str) -> None:
    verifiers(folder, text, (0, 4), (0, 5))
    (folder.path / "sums_tasks.py").write_text(SUMS_TASKS)
    (folder.path / "talk_tasks.py").write_text(TALK_TASKS)


def test_the_policy_plays_the_agent_of_the_newer_verifiers(folder):
    newer(folder, NEWER)
    (tool,) = folder.program("Sums").tools
    assert tool["function"]["name"] == "calculator_add"
    assert tool["function"]["parameters"]["required"] == ["a"]
    row = rows_of(folder, "sums")
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    turns: list[Turn] = [[ToolCall("calculator_add", {"a": 3})], "5"]
    begun, called, said, paid = folder.play("Sums", row, turns)
    assert (begun.failure, begun.observation) == (None, None)
    assert called.results[0].content == "5" and not called.ended
    assert said.ended and paid.reward == {"calls": 1.0, "right": 1.0, "score": 0.5}

    calls = [ToolCall("calculator_add", {"a": a}) for a in (101, 3, 4, 5)]
    outcomes = folder.play("Sums", row, [calls])
    told = [result.content for result in outcomes[1].results]
    assert "too large" in told[0] and told[1] == "5" and told[3] == "The episode is over."
    assert outcomes[1].ended and outcomes[2].reward == {"calls": 3.0, "right": 0.0, "score": 0.0}

    row = rows_of(folder, "talk")
    begun, first, second, paid = folder.play("Talk", row, ["hi", "bye", "hi"])
    assert first.observation == [{"role": "user", "content": "You say hi?"}]
    assert second.ended and paid.reward == {"turns": 2.0, "score": 2.0}
    assert folder.play("Talk", row, ["hi"])[-1].reward == {"turns": 1.0, "score": 1.0}


def test_what_the_newer_verifiers_cannot_be_trained_on_is_refused_in_a_line(folder):
    newer(folder, TWO_AGENTS)
    assert "one policy can play one" in folder.refusal("Two")
    newer(folder, CONTAINER)
    assert "needs a container" in folder.refusal("Box")
