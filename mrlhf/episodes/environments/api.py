"""The arguments of a user's rollout function: an engine that draws, and trajectories.

It runs in the process of one episode, and asks the trainer over a connection.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mrlhf.episodes.environments import programs
from mrlhf.episodes.environments.protocol import Answer, Asked, Question, decode, encode

_LONGEST_ANSWER = 2**30  # bytes


class NoRoom(Exception):
    """The trajectory has no room for another token, or the episode for another turn."""


@dataclass(slots=True)  # so that another name cannot be set
class Trajectory:
    """Tokens that the policy reads at once, some of which it has drawn.

    The engine's methods return new ones, so the same trajectory can be continued in several ways.
    Three fields are the user's to set: `reward`, `role` and `turn_rewards`.
    """

    token_ids: list[int]
    text: str = ""  # of the last turn, without the token that ended it
    stopped: bool = False  # whether the last turn ended by itself, and not at a limit
    # With tools: the calls of the last turn, each as {"name", "arguments"}, the text beside them,
    # and one line that says why a call cannot be read, or nothing.
    calls: tuple[Mapping[str, Any], ...] = ()
    content: str = ""
    problem: str = ""
    reward: float | dict[str, float] | None = None
    role: str = ""  # one with a reward of its own is compared with others of its role
    turn_rewards: Sequence[float] = ()  # of each turn, or none
    # Which draw gave each turn, and where its tokens begin.
    turns: tuple[tuple[int, int], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # that its prompt shows
    told: bool = False  # whether messages stand behind the last turn


@dataclass(frozen=True)
class Sampling:
    """How the run draws, and how far an episode may go."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int  # of prompt and response of a trajectory together
    max_turns: int  # of all trajectories of an episode


class Engine:
    """Asks the trainer's engine. Its calls may be awaited together, as with asyncio.gather."""

    NoRoom = NoRoom  # for a function that does not import this file, and so need not load torch

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def prompt(
        self,
        messages: str | Sequence[Mapping[str, str]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Trajectory:
        """A trajectory that begins with these chat messages; a text is the user's.

        Args:
            messages: each with `role` and `content`.
            tools: that the prompt shows, as chat templates take them: each as {"type": "function",
                "function": {"name", "description", "parameters"}}.

        Raises:
            ValueError: the chat template refuses the messages or ignores the tools.
        """
        asked = {"messages": _messages(messages), "tools": list(tools)}
        return Trajectory(await self._ask("prompt", asked), tools=tuple(tools))

    async def generate(
        self, context: Trajectory | Sequence[int], max_tokens: int | None = None
    ) -> Trajectory:
        """Draw a turn that follows a trajectory or these token ids, with at most `max_tokens`.

        Raises:
            NoRoom: the trajectory or the episode is as long as it may be.
        """
        begun = context if isinstance(context, Trajectory) else Trajectory(list(context))
        ids = list(begun.token_ids)
        asked = {"token_ids": ids, "max_tokens": max_tokens, "reads_calls": bool(begun.tools)}
        answer = await self._ask("generate", asked)
        drawn = answer.pop("token_ids")
        turns = (*begun.turns, (answer.pop("draw"), len(ids)))
        longer = replace(begun, token_ids=ids + drawn, turns=turns, told=False)
        return replace(longer, reward=None, turn_rewards=(), **answer)

    async def tell(
        self, trajectory: Trajectory, messages: str | Sequence[Mapping[str, str]]
    ) -> Trajectory:
        """The trajectory with messages behind its last turn, as the chat template writes them.

        ValueError if the template refuses them, or if some stand there already.
        """
        if not trajectory.turns or trajectory.told:
            raise ValueError(
                "tell needs a trajectory that ends with a turn: generate one first, and give tell "
                "all messages that follow it at once"
            )
        begin = trajectory.turns[-1][1]
        ids = list(trajectory.token_ids)
        told = {
            "drawn": ids[begin:],
            "stopped": trajectory.stopped,
            "messages": _messages(messages),
            "tools": list(trajectory.tools),
        }
        return replace(trajectory, token_ids=ids + await self._ask("tell", told), told=True)

    async def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return await self._ask("encode", {"text": text})

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, with special tokens."""
        return await self._ask("decode", {"token_ids": list(token_ids)})

    async def _ask(self, what: Asked, arguments: dict[str, Any]) -> Any:
        number = next(self._numbers)
        future = asyncio.get_running_loop().create_future()
        self._open[number] = future
        self._writer.write(encode([Question(number, what, arguments)]))
        await self._writer.drain()
        return await future

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Take the trainer's answers until it closes the connection."""
        while line := await reader.readline():
            for answer in decode(line):
                assert isinstance(answer, Answer)
                future = self._open.pop(answer.number)
                if future.cancelled():
                    continue
                if answer.problem:
                    error = NoRoom if answer.problem == "no room" else ValueError
                    future.set_exception(error(answer.value))
                else:
                    future.set_result(answer.value)


def lead(
    function: Callable[..., Awaitable[Any]],
    connection: socket.socket,
    row: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> dict[str, Any]:
    """Run a rollout function to its end; ProgramError if it returns no trajectories."""

    async def run() -> Any:
        own = connection.dup()
        reader, writer = await asyncio.open_connection(sock=own, limit=_LONGEST_ANSWER)
        writer.transport.set_write_buffer_limits(0)  # a message is sent before the next is written
        engine = Engine(writer)
        listening = asyncio.ensure_future(engine.listen(reader))
        try:
            return await function(engine, row, Sampling(**sampling))
        finally:
            listening.cancel()
            await writer.drain()  # of a question that was given up the rest would be missing

    try:
        returned = asyncio.run(run())
    finally:
        connection.setblocking(True)
    every = [returned] if isinstance(returned, Trajectory) else returned
    fits = isinstance(every, (list, tuple)) and all(isinstance(each, Trajectory) for each in every)
    if not every or not fits:
        raise programs.ProgramError(
            f"the rollout function returned {repr(returned)[:100]}; return a trajectory of the "
            "engine or a list of them"
        )
    return {"trajectories": [_as_dict(each) for each in every]}


def _as_dict(trajectory: Trajectory) -> dict[str, Any]:
    if not trajectory.turns:
        raise programs.ProgramError(
            "the rollout function returned a trajectory without a turn: generate one, or leave it "
            "out"
        )

    rewards = trajectory.turn_rewards
    if len(rewards) not in (0, len(trajectory.turns)):
        raise programs.ProgramError(
            f"turn_rewards has {len(rewards)} numbers for {len(trajectory.turns)} turns; give "
            "one for each, or none"
        )
    return {
        "turn_rewards": [programs.number(reward, "turn_rewards") for reward in rewards],
        "token_ids": trajectory.token_ids,
        "turns": trajectory.turns,
        "role": programs.as_text(str(trajectory.role)),
        "reward": None if trajectory.reward is None else programs.reward(trajectory.reward),
    }


def _messages(messages: str | Sequence[Mapping[str, str]]) -> list[Any]:
    said = programs.said(messages, "the rollout function")
    return [{"role": "user", "content": said}] if isinstance(said, str) else list(said or ())
