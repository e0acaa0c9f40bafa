"""Makes trajectories of the chats that a library leads.

A library asks for each turn with all messages so far. Where they begin with an earlier turn and all
before it, the trajectory of that turn goes on. Other messages begin another one: a history that was
rewritten, another agent's, a question aside. This file knows no library.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass
class _Turn:
    trajectory: Any
    messages: list[Message]  # this turn, and all before it
    goes_on: bool = False


class Chats:
    """The chats of one episode."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._turns: list[_Turn] = []

    @property
    def trajectories(self) -> list[Any]:
        """Each as far as it went; ValueError if there is none."""
        if not self._turns:
            raise ValueError("the policy had no turn: none was asked for, or none had room")
        return [turn.trajectory for turn in self._turns if not turn.goes_on]

    async def answer(self, messages: Any, tools: Iterable[Any] | None) -> tuple[Message, str]:
        """The policy's next turn, and why it ended: stop, tool_calls or length.

        What cannot be read as a call is part of the turn's text.

        Args:
            messages: with `role`, `content`, `tool_calls`, as mappings or models of pydantic.
            tools: with `name`, `description`, `parameters`, as mappings or models of pydantic.

        Raises:
            engine.NoRoom: there is no room for the turn.
            ValueError: a message is more than text, or the chat template refuses it.
        """
        asked = plain(messages)
        shown = [{"type": "function", "function": _about(tool)} for tool in tools or ()]
        before = self._before(asked, shown)
        if before is None:
            begun = await self._engine.prompt(asked, shown)
        else:
            begun = await self._engine.tell(before.trajectory, asked[len(before.messages) :])
        drawn = await self._engine.generate(begun)

        said: Message = {"role": "assistant", "content": drawn.content if shown else drawn.text}
        reason = "stop" if drawn.stopped else "length"
        if drawn.calls:
            reason = "tool_calls" if drawn.stopped else "length"
            said["tool_calls"] = [
                {"id": uuid.uuid4().hex, **call, "arguments": json.dumps(call["arguments"])}
                for call in drawn.calls
            ]
        if before is not None:
            before.goes_on = True
        self._turns.append(_Turn(drawn, [*asked, *plain([said])]))
        return said, reason

    def _before(self, asked: list[Message], shown: list[Any]) -> _Turn | None:
        """The turn that the last messages answer."""
        for turn in reversed(self._turns):
            new = asked[len(turn.messages) :]
            is_same = turn.messages + new == asked and list(turn.trajectory.tools) == shown
            if is_same and new and all(message["role"] != "assistant" for message in new):
                return turn
        return None


def plain(messages: Any) -> list[Message]:
    """Messages as chat templates take them; ValueError if they are more than text."""
    if isinstance(messages, str):
        raise ValueError("a prompt is a text to be completed; only chats can be trained here")
    names: dict[str, str] = {}
    found = []
    for fields in map(_fields, messages):
        content = fields.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        if any("text" not in part for part in parts):
            raise ValueError("a message has an image or a sound; only text can be trained here")
        message = {"role": fields["role"], "content": "".join(part["text"] for part in parts)}
        if message["role"] == "tool":
            message["name"] = names.get(fields.get("tool_call_id", ""), "")
        for call in fields.get("tool_calls") or ():
            names[call["id"]] = call["name"]
            function = {"name": call["name"], "arguments": json.loads(call["arguments"])}
            calls = message.setdefault("tool_calls", [])
            calls.append({"type": "function", "function": function})
        found.append(message)
    return found


def _fields(one: Any) -> Mapping[str, Any]:
    return one if isinstance(one, Mapping) else one.model_dump()


def _about(tool: Any) -> dict[str, Any]:
    fields = _fields(tool)
    empty = {"name": "", "description": "", "parameters": {}}
    return {key: fields.get(key) or value for key, value in empty.items()}
