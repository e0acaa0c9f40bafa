"""What is asked of environments and tools, and what comes back. It knows no process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Said = str | list[dict[str, Any]] | None
"""What an environment says: a text, which is the user's, or chat messages; None: nothing."""


def as_messages(said: str | Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """What an environment or a row says, as messages; a text is the user's."""
    if said is None:
        return []
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said)


@dataclass(frozen=True)
class EnvironmentReference:
    """What leads an episode: a class, or functions that are tools, or both."""

    environment: str | None  # path/to/file.py:Class, or :function for a rollout function
    tools: tuple[str, ...] = ()  # built-in names and path/to/file.py:function


@dataclass(frozen=True)
class Program:
    """What an environment with its tools offers."""

    name: str
    # each as {"type": "function", "function": {"name", "description", "parameters"}}, as chat
    # templates take them
    tools: tuple[dict[str, Any], ...]
    is_stateless: bool  # whether there are functions alone, so that a new process is as good
    has_reward: bool
    is_function: bool = False  # whether it leads an episode by itself, and asks for each turn


@dataclass(frozen=True)
class ToolCall:
    """What the policy asks of a tool."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """What the policy is told of a call."""

    name: str
    content: str  # the answer, or "Error: ..." on one line
    is_error: bool


@dataclass(frozen=True)
class Outcome:
    """What came of one request to an episode."""

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
    program: str = ""  # the name of the episode's
    # A rollout function's question: its "number", "what" it asks for, and the arguments.
    question: Mapping[str, Any] | None = None
    # What a rollout function returns, each with its "token_ids", "turns", "role" and "reward".
    trajectories: Sequence[Mapping[str, Any]] = ()
