"""Servers of NeMo-Gym, and the library verifiers where it is installed, lead episodes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapter_folder import Folder, calling

ASKED = {"role": "developer", "content": [{"type": "input_text", "text": "Add 2 to 3."}]}
TOOL = {"type": "function", "name": "increment", "description": "", "parameters": {}}
ROW = {"responses_create_params": {"input": [ASKED], "tools": [TOOL]}, "begin": 3}
ADD_2 = ("increment", {"by": 2})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    folder.close()


def test_a_server_of_tools_has_a_session_of_each_episode_and_verifies_its_response(folder):
    counts: dict[str, int] = {}
    outputs: list[list[Any]] = []
    verdict: dict[str, Any] = {"steps": 1, "judge": "none"}

    def answer(session: str, path: str, body: Any) -> Any:
        if path == "/seed_session":
            counts[session] = body["begin"]
            return {}
        if path == "/increment":
            counts[session] += body["by"]
            return {"count": counts[session]}
        outputs.append(body["response"]["output"])
        return {**body, "reward": float(counts[session] == 5), **verdict}

    row = folder.nemo(ROW, answer)
    assert row["prompt"] == [{"role": "system", "content": "Add 2 to 3."}]
    played = folder.play("mine", row, [calling(ADD_2, content="First I add."), "It is 5."])
    assert (played.failure, played.prompts) == (None, [row["prompt"]])
    assert played.tools[0][0]["function"]["name"] == "increment"
    assert played.told == [[{"role": "tool", "name": "increment", "content": '{"count": 5}'}]]
    assert played.reward == {"score": 1.0, "steps": 1.0}
    ((said, call, told, last),) = outputs
    assert said["content"][0]["text"] == "First I add." and call["call_id"] == told["call_id"]
    assert last["content"][0]["text"] == "It is 5."

    # Calls of a turn that was cut are not run; another episode has another session.
    played = folder.play("mine", row, [calling(ADD_2, stopped=False)])
    assert played.reward["score"] == 0.0 and not played.told and len(counts) == 2
    verdict |= {"mask_sample": True, "failure_reason": "the judge is away"}
    assert "the judge is away" in str(folder.play("mine", row, ["5"]).failure)
    assert "had no turn" in str(folder.play("mine", row, []).failure)
    assert "column nemo_gym" in str(folder.play("mine", {"prompt": "?"}, ["5"]).failure)


def test_a_server_in_the_style_of_gymnasium_pays_each_turn(folder):
    left = {"/reset": 3, "/step": 3}

    def answer(_: str, path: str, body: Any) -> Any:
        left[path] -= 1
        return {"observation": f"{left[path]} left", "reward": 0.25, "terminated": not left[path]}

    row = folder.nemo(ROW, answer, ", gymnasium=True")
    played = folder.play("mine", row, ["a", "b", "c"])
    assert played.prompts[0][-1]["content"] == "2 left"
    assert [told["content"] for (told,) in played.told] == ["2 left", "1 left"]
    assert played.reward is None and played.turn_rewards == [0.25] * 3
    assert "gymnasium=True" in str(
        folder.play("mine", folder.nemo(ROW, lambda *_: None), []).failure
    )


VERIFIERS = """
import verifiers as vf
from datasets import Dataset
from verifiers_adapter import adapt, write_rows

def add(a: int, b: int = 2) -> int:
    return a + b

right = lambda completion, answer, **_: float(completion[-1]["content"] == answer)
rows = Dataset.from_list([{"question": "What is 3 plus 2?", "answer": "5"}])
environment = vf.ToolEnv(dataset=rows, rubric=vf.Rubric(funcs=[right]), tools=[add])
sums = adapt(environment)
write_rows(environment.get_dataset(), "FOLDER/sums.jsonl")
"""
VERIFIERS_V1 = """
import verifiers.v1 as vf
from verifiers_v1_adapter import adapt, write_rows

HERE = {"harness": {"id": "verifiers_v1_adapter"}, "runtime": {"type": "subprocess"}}
config = vf.resolve_env_config({"taskset": {"id": "sums_tasks"}, "agent": HERE})
sums = adapt(vf.load_environment(config))
write_rows(vf.load_environment(config).taskset, "FOLDER/sums.jsonl")
"""
SUMS_TASKS = """
import verifiers.v1 as vf

__all__ = ["Sums"]
class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    def add(self, a: int, b: int = 2) -> str:
        return str(a + b)
class Sum(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "5")
class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        yield Sum(vf.TaskData(prompt="What is 3 plus 2?"), self.config.task)
"""


def test_an_environment_of_verifiers_has_tools_and_scores(folder, monkeypatch):
    version = pytest.importorskip("verifiers").__version__
    is_new = tuple(map(int, version.split(".")[:2])) >= (0, 4)
    monkeypatch.setenv("PYTHONPATH", str(folder.path), prepend=os.pathsep)
    (folder.path / "sums_tasks.py").write_text(SUMS_TASKS)
    text = VERIFIERS_V1 if is_new else VERIFIERS
    folder.write(text.replace("FOLDER", str(folder.path)))

    folder.load("sums")
    row = json.loads((folder.path / "sums.jsonl").read_text())
    tool = "calculator_add" if is_new else "add"
    for said, score in (("5", 1.0), ("6", 0.0)):
        played = folder.play("sums", row, [calling((tool, {"a": 3}), content="Let me see."), said])
        assert played.failure is None
        assert played.tools[0][0]["function"]["name"] == tool
        assert [told["content"] for told in played.told[0]] == ["5"]
        assert played.reward["score"] == score
    assert "column verifiers" in str(folder.play("sums", {"prompt": "?"}, []).failure)
