"""Requests to environments and tools, their answers, and how a line of either is written.

The process of an episode gets requests, and an `Answer` to each of its own questions. It sends
`Done` or `Failure` for a request, and `Question`s while a rollout function runs. This file knows no
process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from mrlhf.episodes.environments import programs

T = TypeVar("T")
# What a rollout function asks for: a turn behind token ids; the tokens of a prompt, of messages
# behind a turn, or of a text; or the text of tokens.
Asked = Literal["generate", "prompt", "tell", "encode", "decode"]
Said = str | list[dict[str, Any]] | None
"""What an environment says: a text, which is the user's, or chat messages; None: nothing."""


def as_messages(said: str | Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """An observation, or the text of a row, as messages; a text is the user's."""
    if said is None:
        return []
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)


@dataclass(frozen=True)
class EnvironmentReference:
    """The code that leads an episode: a class, or functions that are tools, or both."""

    environment: str | None  # path/to/file.py:Class, or :function for a rollout function
    tools: tuple[str, ...] = ()  # built-in names and path/to/file.py:function


@dataclass(frozen=True)
class Program:
    """The offer of an environment with its tools."""

    name: str
    # each as {"type": "function", "function": {"name", "description", "parameters"}}, as chat
    # templates take them
    tools: tuple[dict[str, Any], ...]
    is_stateless: bool  # whether there are functions alone, so that a new process is as good
    has_reward: bool
    is_function: bool = False  # whether it leads an episode by itself, and asks for each turn


@dataclass(frozen=True)
class Request:
    """A request to an episode; the names of the arguments are those of the method."""

    method: Literal["reset", "call", "reply", "turn_reward", "reward", "rollout"]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """The answer to a request; `_ANSWERS` has its fields."""

    answer: dict[str, Any]

    def checked(self, method: str) -> dict[str, Any]:
        """The answer; any error if it is none to `method`, as users' code may have sent it."""
        return {name: _ANSWERS[method][name](value) for name, value in dict(self.answer).items()}


@dataclass(frozen=True)
class Failure:
    """Why the episode cannot go on."""

    summary: str
    trace: str

    def __post_init__(self) -> None:
        _is(str, self.summary)  # else users' code has sent it


@dataclass(frozen=True)
class Question:
    """A rollout function's request for tokens."""

    number: int
    what: Asked
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """The answer to a question; after a problem its value is the text of the error."""

    number: int
    value: Any
    problem: Literal["", "error", "no room"] = ""  # raises ValueError or NoRoom in the function


@dataclass(frozen=True)
class ToolResult:
    """The result of a call, as the policy reads it."""

    name: str
    content: str  # the answer, or "Error: ..." on one line
    is_error: bool

    @property
    def message(self) -> Mapping[str, Any]:
        """The same as chat templates take it."""
        return {"role": "tool", "name": self.name, "content": self.content}


@dataclass(frozen=True)
class Outcome:
    """The answers to the requests that were sent to an episode together."""

    episode: int
    kind: Literal["reset", "turn", "reward", "ask", "rollout"]
    # Since the request, or the answer to a rollout function's last question, the time in the queue
    # included.
    seconds: float
    failure: str | None = None  # why the episode cannot go on, on one line
    observation: Said = None  # of reset and of reply
    results: tuple[ToolResult, ...] = ()  # of a turn with calls, one for each
    ended: bool = False  # whether the episode is over after this turn
    turn_reward: float | None = None
    reward: float | dict[str, float] | None = None  # a dict has the number "score" and others
    question: Question | None = None  # of a rollout function
    # What a rollout function returns, each with its "token_ids", "turns", "role" and "reward".
    trajectories: Sequence[Mapping[str, Any]] = ()

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """The results of tools and the observation, as the policy reads them."""
        return [result.message for result in self.results] + as_messages(self.observation)


Message = Request | Answer | Done | Failure | Question
_KINDS: Mapping[str, Callable[..., Message]] = {
    kind.__name__: kind for kind in (Request, Answer, Done, Failure, Question)
}


def encode(messages: Sequence[Message], default: Callable[[Any], Any] | None = None) -> bytes:
    """A line with the messages; `default` replaces what JSON does not have, else a TypeError."""
    parts = [[type(message).__name__, vars(message)] for message in messages]
    return json.dumps(parts, default=default).encode() + b"\n"


def decode(line: bytes) -> list[Message]:
    """The messages of a line; any error if it has none, as users' code may have written it."""
    messages: list[Message] = [_KINDS[kind](**fields) for kind, fields in json.loads(line)]
    if not messages:
        raise ValueError(line)
    return messages


def _is(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(value)
    return value


def _trajectories(value: Any) -> Any:
    for trajectory in _is(list, value):
        _is(list, trajectory["token_ids"])
        dict(_is(list, trajectory["turns"]))
        _is(str, trajectory["role"])
        for reward in _is(list, trajectory["turn_rewards"]):
            programs.number(reward, "it")
        if trajectory["reward"] is not None:
            programs.reward(trajectory["reward"])
    return [value[0], *value[1:]]


# What a child answers to each request, and what returns it or raises an error.
_ANSWERS: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "reset": {"observation": partial(programs.said, method="it")},
    "reply": {"observation": partial(programs.said, method="it")},
    "call": {"content": partial(_is, str), "is_error": bool},
    "turn_reward": {"turn_reward": partial(programs.number, method="it"), "ended": bool},
    "reward": {"reward": programs.reward},
    "rollout": {"trajectories": _trajectories},
}
