"""Makes an environment of the library verifiers one for `rollout.environment`.

The library's own loop leads the episode: it asks the client of a model for each turn, and here the
trainer answers in the place of that client. So state, tools, stop conditions and rubrics are the
library's. A file of yours beside this one names the environment:

    import verifiers as vf
    from verifiers_adapter import adapt, write_rows

    environment = vf.load_environment("wordle")
    Wordle = adapt(environment)

    if __name__ == "__main__":
        write_rows(environment.get_dataset(), "runs/wordle/train.jsonl")
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import verifiers as vf
from tool_methods import tool_method

COLUMN = "verifiers"  # of a row of the data: the row of the library's data set
Message = dict[str, str]


def adapt(environment: vf.Environment) -> type:
    """A class for `rollout.environment`; ValueError if the environment cannot be one."""
    if not isinstance(environment, vf.MultiTurnEnv):
        raise ValueError(
            f"{type(environment).__name__} is no MultiTurnEnv, ToolEnv or SingleTurnEnv; adapt the "
            "environments of a group one by one, and name them by data_source"
        )
    if environment.rubric.has_group_rewards:
        raise ValueError(
            "its rubric compares the rollouts of a group, but an episode here knows no other; use "
            "reward functions of one rollout"
        )
    environment.timeout_seconds = None  # the policy's time would count; rollout.tool_timeout_s does
    methods = {
        tool.name: tool_method(tool.name, tool.description, tool.parameters, _VerifiersEpisode._run)
        for tool in environment.tool_defs or ()
    }
    return type(type(environment).__name__, (_VerifiersEpisode,), methods | {"_env": environment})


def write_rows(dataset: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Write a data set of the library as data for `data.train_files`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", encoding="utf-8") as file:
        for row in dataset:
            line = {"prompt": _plain_messages(row["prompt"]), COLUMN: dict(row)}
            file.write(json.dumps(line, default=str) + "\n")


@vf.Client.register
class _Trainer:
    """Stands where the library expects the client of a model."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tools: set[str]) -> None:
        self._loop = loop
        self._tools = tools
        self._renew()

    def _renew(self) -> None:
        self.asked: asyncio.Future[Any] = self._loop.create_future()  # the messages of a turn
        self._answer: asyncio.Future[vf.Response] = self._loop.create_future()

    def take_answer(self) -> asyncio.Future[vf.Response]:
        """The answer for which the library waits; what it asks next has another."""
        answer = self._answer
        self._renew()
        return answer

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> vf.Response:
        """What the library calls for a turn."""
        if self.asked.done():
            raise ValueError("the environment asks the model twice at once")
        if {tool.name for tool in tools or ()} != self._tools:
            raise ValueError(
                "the environment gives a row other tools than it has at the start; name those of "
                "all rows when it is made"
            )
        self.asked.set_result(prompt)
        return await self._answer


class _VerifiersEpisode:
    """One rollout of the library, from one question for a turn to the next."""

    _env: vf.MultiTurnEnv

    def reset(self, row: dict[str, Any]) -> list[Message] | None:
        """Run the library's loop to the first turn; what it adds to the prompt is said first."""
        if COLUMN not in row:
            raise ValueError(f"the row has no column {COLUMN}; write the data with write_rows")
        self._loop = asyncio.new_event_loop()
        self._trainer = _Trainer(self._loop, {tool.name for tool in self._env.tool_defs or ()})
        self._seen = _plain_messages(row["prompt"])
        return self._loop.run_until_complete(self._begin(row[COLUMN])) or None

    def reply(self, text: str) -> list[Message] | None:
        """Give the library a turn without calls; None once its loop has ended."""
        told = self._answer(text)
        if not self.done and not told:
            raise ValueError("the environment goes on after a turn, but says nothing to go on with")
        return None if self.done else told

    @property
    def done(self) -> bool:
        """Whether the library's loop has ended."""
        return self._rollout.done()

    def reward(self) -> dict[str, float]:
        """Let the library's rubric score the rollout; its metrics stand beside the score."""
        if not self.done:  # as the library ends a rollout without room for another turn
            self._trainer.take_answer().set_exception(vf.OverlongPromptError("no room"))
            self._loop.run_until_complete(self._go_on())
        state = self._rollout.result()
        if state["error"] is not None:
            raise state["error"]
        self._loop.run_until_complete(self._score(state))
        return {**(state["metrics"] or {}), "score": state["reward"]}

    def _run(self, name: str, arguments: dict[str, Any]) -> str:
        """Give the library a turn with one call, and return what its tool says."""
        if self.done:
            return "The episode is over."
        call = vf.ToolCall(id=uuid.uuid4().hex, name=name, arguments=json.dumps(arguments))
        return "\n\n".join(message["content"] for message in self._answer("", [call]))

    async def _begin(self, row: Mapping[str, Any]) -> list[Message]:
        start = self._env.rollout(dict(row), self._trainer, "policy", {})
        self._rollout = asyncio.ensure_future(start)
        return await self._go_on()

    def _answer(self, text: str, calls: list[vf.ToolCall] | None = None) -> list[Message]:
        """Let the library go on with a turn; the messages that it has for the next."""
        message = vf.ResponseMessage(
            content=text,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "stop",
            is_truncated=False,
        )
        self._seen.append({"role": "assistant", "content": text})
        response = vf.Response(id=uuid.uuid4().hex, created=0, model="policy", message=message)
        self._trainer.take_answer().set_result(response)
        return self._loop.run_until_complete(self._go_on())

    async def _go_on(self) -> list[Message]:
        """Wait until the library asks for a turn or ends; the messages that are new since."""
        asked = self._trainer.asked
        await asyncio.wait({self._rollout, asked}, return_when=asyncio.FIRST_COMPLETED)
        if self._rollout.done():
            self._rollout.result()  # raises what the loop has raised
            return []
        messages = _plain_messages(asked.result())
        known = len(self._seen)
        if messages[:known] != self._seen:
            raise ValueError(
                f"{type(self._env).__name__} rewrites earlier messages, or asks the model for "
                "something else than the next turn; only turns that follow each other can train"
            )
        self._seen = messages
        return messages[known:]

    async def _score(self, state: vf.State) -> None:
        await self._env.rubric.score_rollout(state)
        await self._env.rubric.cleanup(state)


def _plain_messages(messages: Any) -> list[Message]:
    """Messages of the library as chat messages of text; ValueError if they are more than text."""
    if isinstance(messages, str):
        raise ValueError("a prompt is a text to be completed; only chats can be trained here")
    plain = []
    for message in messages:
        fields = message if isinstance(message, Mapping) else message.model_dump()
        content = fields.get("content") or ""
        if not isinstance(content, str):
            if any(part.get("type") != "text" for part in content):
                raise ValueError("a message has an image or a sound; only text can be trained here")
            content = "".join(part["text"] for part in content)
        plain.append({"role": fields["role"], "content": content})
    return plain
