"""Environments of the library verifiers lead episodes, where it is installed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapter_folder import Folder, calling


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
    assert info["parts"] == [3, 2]
    return float(bool(completion) and completion[-1]["content"] == answer)


def length(completion):
    return len(completion)


def add(a: int, b: int = 2) -> int:
    '''Add two numbers.'''
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
    # It shows the policy the last message alone, and asks it for a verdict, too.
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        if state["asked"] == 1:
            aside = [{"role": "user", "content": "Was that good?"}]
            verdict = await self.get_model_response(state, aside)
            state["verdict"] = verdict.message.content
        return messages[-1:] if state["trajectory"] else messages


class Failing(Asking):
    async def env_response(self, messages, state, **_):
        raise vf.ToolError("the sandbox is gone")


def made(kind, function=right, **further):
    rubric = vf.Rubric(funcs=[function, length], weights=[0.5, 0.0])
    return kind(dataset=Dataset.from_list(ROWS), rubric=rubric, **further)


def together(completions):
    return [0.0 for _ in completions]


tools = made(vf.ToolEnv, tools=[add], max_turns=3, system_prompt="Calculate.")
group = vf.EnvGroup([tools, made(Asking)], env_names=["sums", "asking"])
calculates = adapt(tools)
single = adapt(made(vf.SingleTurnEnv))
several = adapt(made(Asking))
rewriting = adapt(made(Forgetting))
broken = adapt(made(Failing))
either = adapt(group)
write_rows(tools.get_dataset(), "FOLDER/rows.jsonl")
write_rows(made(Asking).get_dataset(), "FOLDER/plain.jsonl")
write_rows(group.get_dataset(), "FOLDER/either.jsonl")
"""
COMPARING = CLASSIC + "\ncomparing = adapt(made(Asking, together))\n"
COMPLETING = CLASSIC + '\nwrite_rows([{"prompt": "3+2="}], "FOLDER/text.jsonl")\n'


def verifiers(folder: Folder, text: str, at_least: tuple[int, ...], below: tuple[int, ...]) -> None:
    """Write a user's file; skip the test where no such version of the library is installed."""
    version = pytest.importorskip("verifiers").__version__
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not at_least <= numbers < below:
        pytest.skip(f"verifiers {version} is another library")
    folder.write(text.replace("FOLDER", str(folder.path)))


def rows_of(folder: Folder, name: str) -> list[dict[str, Any]]:
    lines = (folder.path / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_loop_of_verifiers_leads_tools_turns_and_scores(folder):
    verifiers(folder, CLASSIC, (0, 1), (0, 4))
    folder.load("calculates")
    (row,) = rows_of(folder, "rows")
    system, asked = row["prompt"]
    assert (system["role"], asked["role"]) == ("system", "user")
    calls = calling(("add", {"a": 3}), ("add", {"a": 101}), content="Let me see.")
    played = folder.play("calculates", row, [calls, "5", "6"])
    assert played.failure is None
    assert played.prompts == [row["prompt"]]
    told = [{"role": "tool", "name": "add", "content": text} for text in ("5", "too large")]
    assert played.told == [told]
    ((tool,),) = played.tools
    assert tool["function"]["name"] == "add"
    assert tool["function"]["description"] == "Add two numbers."
    assert tool["function"]["parameters"]["properties"]["a"]["type"] == "integer"
    expected = {"right": 1.0, "length": 4.0, "num_turns": 2.0, "add_calls": 2.0, "score": 0.5}
    assert {key: played.reward[key] for key in expected} == expected

    # A call that cannot be read is text to the library, which ends the episode.
    unread = {"text": "{add", "content": "{add", "problem": "is no JSON"}
    played = folder.play("calculates", row, [calls, unread, "5"])
    assert played.reward["num_turns"] == 2.0 and played.reward["add_calls"] == 2.0

    (plain,) = rows_of(folder, "plain")
    assert folder.play("single", plain, ["5"]).reward["score"] == 0.5
    # A row may have tools of its own.
    cut = {"name": "cut", "description": "", "parameters": {}}
    plain["verifiers"]["info"]["tool_defs"] = [cut]
    played = folder.play("single", plain, ["5"])
    assert played.tools == [[{"type": "function", "function": cut}]]


def test_an_environment_of_verifiers_speaks_first_and_between_turns(folder):
    verifiers(folder, CLASSIC, (0, 1), (0, 4))
    folder.load("several")
    (row,) = rows_of(folder, "plain")
    played = folder.play("several", row, ["5", "6", "5", "7"])
    assert played.prompts == [[*row["prompt"], {"role": "user", "content": "Ready?"}]]
    sure = [[{"role": "user", "content": f"Sure? {said}"}] for said in "56"]
    assert played.told == sure
    assert played.reward["score"] == 0.5 and played.reward["length"] == 5.0

    # There is no room for the answer to the first question.
    played = folder.play("several", row, ["5"])
    assert played.reward["length"] == 1.0 and played.reward["score"] == 0.5

    # Each member of a group has its own tools and questions.
    calculates, asks = rows_of(folder, "either")
    played = folder.play("either", calculates, [calling(("add", {"a": 3})), "5"])
    assert played.told[0][0]["content"] == "5" and played.reward["score"] == 0.5
    assert folder.play("either", asks, ["5", "6", "5"]).told == sure


def test_messages_that_follow_no_turn_begin_another_trajectory(folder):
    verifiers(folder, CLASSIC, (0, 1), (0, 4))
    folder.load("rewriting")
    (row,) = rows_of(folder, "plain")
    played = folder.play("rewriting", row, ["5", "good", "6", "5"])
    assert [prompt[-1]["content"] for prompt in played.prompts] == [
        "Ready?",
        "Was that good?",
        "Sure? 5",
        "Sure? 6",
    ]
    assert not played.told
    rewards = [one["reward"] for one in played.trajectories]
    assert rewards[:3] == [None] * 3 and rewards[3]["num_turns"] == 3.0  # all share it


def test_what_verifiers_cannot_be_trained_on_is_refused_in_a_line(folder):
    verifiers(folder, CLASSIC, (0, 1), (0, 4))
    folder.load("broken")
    (row,) = rows_of(folder, "plain")
    assert "the sandbox is gone" in str(folder.play("broken", row, ["5", "5"]).failure)
    assert "column verifiers" in str(folder.play("single", {"prompt": "?"}, []).failure)
    assert "had no turn" in str(folder.play("single", row, []).failure)

    for text, name, words in (
        (COMPARING, "comparing", "compares the rollouts"),
        (COMPLETING, "single", "to be completed"),
    ):
        folder.write(text.replace("FOLDER", str(folder.path)))
        assert words in folder.refusal(name)


NEWER = """
import verifiers.v1 as vf
from verifiers_v1_adapter import adapt, write_rows

HERE = {"harness": {"id": "verifiers_v1_adapter"}, "runtime": {"type": "subprocess"}}


def load(taskset, **further):
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": taskset}, **further}))


environment = load("sums_tasks", agent={"max_turns": 3, **HERE})
sums = adapt(environment)
talk = adapt(load("talk_tasks", asker=HERE, answerer=HERE))
asks = adapt(load("talk_tasks", asker=HERE, answerer=HERE, only_asker=True))
write_rows(environment.taskset, "FOLDER/sums.jsonl")
write_rows(load("talk_tasks").taskset.take(1), "FOLDER/talk.jsonl")
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
    async def calls(self, trace: vf.Trace) -> float:
        return float(trace.state.calls)


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
    asker: vf.AgentConfig = vf.AgentConfig()
    answerer: vf.AgentConfig = vf.AgentConfig()
    only_asker: bool = False


class TalkEnv(vf.Env[TalkConfig]):
    async def setup(self, agents):
        agents.answerer.trainable = not self.config.only_asker

    async def run(self, task, agents):
        if task.data.prompt == "fail":
            raise ValueError("nobody talks")
        opened = TalkTask(task.data.model_copy(update={"prompt": None}), task.config)
        async with (
            agents.asker.interaction(task) as asker,
            agents.answerer.interaction(opened) as answerer,
        ):
            question = await asker.turn()
            while not question.terminated:
                answer = await answerer.turn(question.last_reply)
                question = await asker.turn(answer.last_reply)
        asker.trace.record_reward("turns", asker.trace.num_turns)


class Talk(vf.Taskset[TalkTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield TalkTask(vf.TaskData(prompt=f"Hello {number}"), self.config.task)
"""


def newer(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder.path), prepend=os.pathsep)
    (folder.path / "sums_tasks.py").write_text(SUMS_TASKS)
    (folder.path / "talk_tasks.py").write_text(TALK_TASKS)
    verifiers(folder, NEWER, (0, 4), (0, 5))


def test_the_policy_plays_the_agent_of_the_newer_verifiers(folder, monkeypatch):
    newer(folder, monkeypatch)
    folder.load("sums")
    (row,) = rows_of(folder, "sums")
    assert row["prompt"] == "What is 3 plus 2?"
    calls = calling(
        ("calculator_add", {"a": 3}), ("calculator_add", {"a": 101}), content="Let me see."
    )
    played = folder.play("sums", row, [calls, "5", "6"])
    assert played.failure is None
    ((system, asked),) = played.prompts
    assert system == {"role": "system", "content": "Calculate."}
    assert asked == {"role": "user", "content": row["prompt"]}
    ((tool,),) = played.tools
    assert tool["function"]["name"] == "calculator_add"
    assert tool["function"]["parameters"]["required"] == ["a"]
    ((told, refused),) = played.told
    assert told == {"role": "tool", "name": "calculator_add", "content": "5"}
    assert "too large" in refused["content"]
    assert played.reward == {"calls": 1.0, "right": 1.0, "score": 0.5}

    # The library ends the first episode after three turns; the second has no room for more.
    calls = calling(("calculator_add", {"a": 3}))
    played = folder.play("sums", row, [calls] * 4)
    assert played.reward["calls"] == 3.0 and len(played.told) == 2
    assert folder.play("sums", row, [calls]).reward == {"calls": 1.0, "right": 0.0, "score": 0.0}
    assert "column verifiers" in str(folder.play("sums", {"prompt": "?"}, []).failure)


def test_the_policy_plays_all_agents_of_the_newer_verifiers(folder, monkeypatch):
    newer(folder, monkeypatch)
    folder.load("talk")
    (row,) = rows_of(folder, "talk")
    played = folder.play("talk", row, ["hi", "you, too", "bye", "well"])
    assert played.failure is None
    assert [prompt[0]["content"] for prompt in played.prompts] == ["Hello 0", "hi"]
    told = [message["content"] for (message,) in played.told]
    assert told == ["you, too", "bye"]
    rewarded = {one["role"]: one["reward"] for one in played.trajectories}
    assert rewarded == {"asker": 2.0, "answerer": 0.0}

    # An agent that shall not train, and an episode that fails.
    (asker,) = folder.play("asks", row, ["hi", "you, too", "bye", "well"]).trajectories
    assert (asker["role"], asker["reward"]) == ("asker", 2.0)
    row["verifiers"]["prompt"] = "fail"
    assert "nobody talks" in str(folder.play("talk", row, []).failure)
