"""Runs the environments of many episodes, each in a process of its own, beside the trainer.

A process imports a user's file once and forks a child for each episode. So a hang, a crash or an
exit in one episode touches no other, and memory and time are limited for each. Requests do not
wait for answers: `poll` gives those that have come. This file does not know tokens or engines.
"""

from __future__ import annotations

import json
import logging
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

from mrlhf.config.user_code import UserCodeError, read_reference
from mrlhf.environments import programs
from mrlhf.environments.interface import (
    EnvironmentReference,
    Outcome,
    Program,
    ToolCall,
    ToolResult,
)
from mrlhf.errors import EnvironmentFault
from mrlhf.workers.child import SIGNALS_OF_THE_JOB
from mrlhf.workers.process import Limits, WorkerProcess

logger = logging.getLogger(__name__)
T = TypeVar("T")

_BUILT_IN = Path(__file__).with_name("built_in.py")
_FORK_S = 30.0  # for a child, besides the time of a call
_END_S = 5.0
# Held back for so long, as a job that its scheduler stops gives up the episode meanwhile, and does
# it again when it goes on.
_STOP_S = 20.0
_BY_THE_JOB = tuple(f"(signal {number.name})" for number in SIGNALS_OF_THE_JOB)
_READ_BYTES = 1 << 20
_SHOWN_FAILURE = 500  # characters


@dataclass(frozen=True)
class ToolLimits:
    """The time and memory that environments and tools may use."""

    # longest time of one call of a tool, or of another method, seconds
    timeout_s: float = 30.0
    memory_mb: int | None = None  # of each process of an episode, MB; None: no limit
    workers: int = 8  # most episodes that compute at the same time
    load_timeout_s: float = 120.0  # longest time to import a file

    @property
    def of_process(self) -> Limits:
        """The same, for the processes."""
        seconds = _FORK_S + self.timeout_s
        return Limits(seconds, self.memory_mb, "rollout.tool_memory_mb")


class _Nursery:
    """A process that has loaded one program, and forks children."""

    def __init__(self, name: str, reference: EnvironmentReference, limits: ToolLimits) -> None:
        """Load the program; EnvironmentFault if it cannot be used."""
        given = [
            None if reference.environment is None else _located(reference.environment),
            [_located(tool) for tool in reference.tools],
        ]
        title = reference.environment or ", ".join(reference.tools) or "no tools"
        self._limits = limits.of_process
        self.process = WorkerProcess(
            "mrlhf.environments.nursery",
            given,
            self._limits,
            title=f"the process of {title}",
            error=EnvironmentFault,
        )
        offer = self.process.load(limits.load_timeout_s, "an environment")
        self.program = Program(name, **{**offer, "tools": tuple(offer["tools"])})

    def fork(self) -> tuple[int, socket.socket]:
        """A new child and the socket on which it serves."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process.send(["fork"], [theirs.fileno()])
            pid = self._answer(" to begin an episode")
        return int(pid), ours

    def end(self, child: int, wait_s: float) -> str:
        """Kill a child that does not end by itself within `wait_s` seconds; how it ended."""
        if self.process.has_ended:  # the run ends with the error that said so
            return "was stopped"
        self.process.send(["end", child, wait_s])
        return str(self._answer(" to end an episode"))

    def _answer(self, when: str) -> Any:
        hint = "; if the machine is only slow, raise rollout.tool_timeout_s"
        return self.process.receive(self._limits.timeout_s, when + hint)[1]


@dataclass
class _Episode:
    """One episode: its child, and what it is asked."""

    number: int
    nursery: _Nursery
    pid: int
    connection: socket.socket
    kind: Literal["reset", "turn", "reward", "rollout"] = "reset"
    # What is not answered yet, one after the other: a method of the child and its arguments.
    requests: deque[list[Any]] = field(default_factory=deque)
    unsent: list[list[Any]] = field(default_factory=list)  # requests, or answers to its questions
    outgoing: bytes = b""  # what the child has not taken yet of those that are sent
    questions: int = 0  # of a rollout function, that have no answer yet
    asked_at: float = 0.0
    deadline: float | None = None  # set while the child computes
    received: bytes = b""
    results: list[ToolResult] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # of the answers that are no results
    ended: str = ""  # how the child ended, if it has


class EnvironmentHost:
    """The environments of all episodes of one replica."""

    def __init__(self, references: Mapping[str, EnvironmentReference], limits: ToolLimits) -> None:
        """Load the programs, by their names; EnvironmentFault if one cannot be loaded."""
        _allow_many_files()
        self._limits = limits
        self._nurseries: dict[str, _Nursery] = {}
        self._episodes: dict[int, _Episode] = {}
        self._queue: deque[_Episode] = deque()
        self._computing: dict[int, _Episode] = {}
        self._outcomes: list[Outcome] = []
        self._selector = selectors.DefaultSelector()
        try:
            for name, reference in references.items():
                self._nurseries[name] = _Nursery(name, reference, limits)
        except EnvironmentFault:
            self.close()
            raise

    @property
    def programs(self) -> dict[str, Program]:
        """What each program offers."""
        return {name: nursery.program for name, nursery in self._nurseries.items()}

    def begin(
        self,
        number: int,
        program: str,
        row: Mapping[str, Any],
        seed: int,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin an episode with a row of the data; its random numbers begin with `seed`.

        A rollout function needs `sampling`, the fields of `rollouts.Sampling`.
        """
        nursery = self._nurseries[program]
        episode = _Episode(number, nursery, *nursery.fork())
        self._episodes[number] = episode
        self._selector.register(episode.connection, selectors.EVENT_READ, episode)
        if nursery.program.is_function:
            self._ask(episode, "rollout", [["rollout", dict(row), seed, sampling]])
        else:
            self._ask(episode, "reset", [["reset", dict(row), seed]])

    def answer(self, number: int, question: int, value: Any, kind: str = "value") -> None:
        """Answer a question of a rollout function; another `kind` says why there is no value.

        "no room" and "error" raise NoRoom and ValueError there, with the text `value`.
        """
        episode = self._episodes.get(number)
        if episode is None:
            return  # it has ended without waiting for this
        episode.questions -= 1
        episode.unsent.append(["answer", question, kind, value])
        if episode not in self._queue:  # else the function went on, and has asked again
            episode.asked_at = time.monotonic()
            self._queue.append(episode)

    def turn(self, number: int, text: str, calls: Sequence[ToolCall]) -> None:
        """Run the calls of a turn; without any, let the environment reply to its text."""
        requests = [["call", call.name, dict(call.arguments)] for call in calls]
        requests = [*(requests or [["reply", text]]), ["turn_reward"]]
        self._ask(self._episodes[number], "turn", requests)

    def ask_reward(self, number: int) -> None:
        """Ask what the episode is worth; its program must have a reward."""
        self._ask(self._episodes[number], "reward", [["reward"]])

    def end(self, number: int) -> None:
        """End an episode and all that it has started."""
        episode = self._episodes.pop(number, None)
        if episode is None:
            return
        self._computing.pop(number, None)
        if episode in self._queue:
            self._queue.remove(episode)
        self._drop_child(episode)

    def poll(self, timeout_s: float) -> list[Outcome]:
        """The outcomes that have come, by episode; it waits at most this long for the first."""
        until = time.monotonic() + timeout_s
        while True:
            self._start_next()
            nearest = min(
                (e.deadline for e in self._computing.values() if e.deadline), default=until
            )
            wait = 0.0 if self._outcomes else max(0.0, min(until, nearest) - time.monotonic())
            for key, events in self._selector.select(wait):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self._read(key.data)
            self._stop_late()
            if self._outcomes or time.monotonic() >= until:
                break
        self._start_next()
        self._log_printed()
        outcomes = sorted(self._outcomes, key=lambda outcome: outcome.episode)
        self._outcomes = []
        return outcomes

    def close(self) -> None:
        """End everything."""
        for nursery in self._nurseries.values():
            nursery.process.stop()
        for episode in self._episodes.values():
            episode.connection.close()
        self._episodes.clear()
        self._queue.clear()
        self._selector.close()

    def _ask(
        self,
        episode: _Episode,
        kind: Literal["reset", "turn", "reward", "rollout"],
        requests: Sequence[list[Any]],
    ) -> None:
        assert not episode.requests, f"episode {episode.number} has not answered yet"
        episode.kind = kind
        episode.requests.extend(requests)
        episode.unsent.extend(requests)
        episode.asked_at = time.monotonic()
        episode.results = []
        episode.facts = {}
        self._queue.append(episode)

    def _start_next(self) -> None:
        """Send requests while fewer children compute than may."""
        while self._queue and len(self._computing) < self._limits.workers:
            episode = self._queue.popleft()
            self._computing[episode.number] = episode
            if episode.ended:  # since its last answer; it is given up when its time is over
                continue
            self._send(episode)
            if episode.questions:  # it waits for more answers
                self._computing.pop(episode.number, None)

    def _send(self, episode: _Episode) -> None:
        """Send all requests at once, each of which has its own time; or what it has asked for."""
        until = time.monotonic() + self._limits.timeout_s
        episode.deadline = None if episode.questions else until
        episode.outgoing += json.dumps(episode.unsent, default=str).encode() + b"\n"
        episode.unsent = []
        self._flush(episode)

    def _flush(self, episode: _Episode) -> None:
        """Send what the child takes without delay; `poll` sends the rest when it takes more."""
        if episode.connection.fileno() < 0:
            return
        with suppress(OSError):  # it takes nothing now, or has ended, which reading shows
            sent = episode.connection.send(episode.outgoing, socket.MSG_DONTWAIT)
            episode.outgoing = episode.outgoing[sent:]
        waits = selectors.EVENT_WRITE if episode.outgoing else 0
        self._selector.modify(episode.connection, selectors.EVENT_READ | waits, episode)

    def _read(self, episode: _Episode) -> None:
        """Take what a child has sent."""
        try:
            received = episode.connection.recv(_READ_BYTES)
        except ConnectionResetError:
            received = b""
        if not received:
            self._lost(episode, "")
            return
        if episode.deadline is not None:  # it has done something, such as a part of a long answer
            episode.deadline = time.monotonic() + self._limits.timeout_s
        *lines, episode.received = (episode.received + received).split(b"\n")
        for line in lines:
            try:
                self._take_message(episode, *json.loads(line))
            except (TypeError, ValueError, LookupError, RecursionError, programs.ProgramError):
                self._lost(episode, "wrote to its connection")
                return

    def _take_message(self, episode: _Episode, kind: str, value: Any) -> None:
        """Take one message; any error if it has another form than a child sends."""
        if not episode.requests:
            return
        if kind == "done":
            checks = _CHECKS[episode.requests[0][0]]
            self._take(episode, {key: checks[key](one) for key, one in dict(value).items()})
        elif kind == "ask" and episode.kind == "rollout":
            self._take_question(episode, value)
        elif kind == "failure":
            summary, trace = (_is(str, text) for text in value)
            logger.debug("episode %d: %s", episode.number, trace)
            self._report(episode, summary)
        else:
            raise ValueError(kind)

    def _take(self, episode: _Episode, answer: Mapping[str, Any]) -> None:
        """Keep the answer to the first request, and report what came of all after the last."""
        method, *arguments = episode.requests[0]
        if method == "call":
            episode.results.append(ToolResult(arguments[0], **answer))
        else:
            episode.facts |= answer
        episode.requests.popleft()
        if not episode.requests:
            self._report(episode)

    def _take_question(self, episode: _Episode, question: Mapping[str, Any]) -> None:
        """Let `poll` tell a rollout function's question; its time stands still until the answer."""
        needed = ["number", "token_ids", "max_tokens", "reads_calls"]
        itemgetter(*needed[: 4 if question["what"] == "generate" else 1])(question)
        _is(list, question.get("token_ids", []))
        seconds = 0.0 if episode.questions else time.monotonic() - episode.asked_at
        episode.questions += 1
        episode.deadline = None
        self._computing.pop(episode.number, None)
        self._outcomes.append(
            Outcome(
                episode.number,
                "ask",
                seconds,
                program=episode.nursery.program.name,
                question=question,
            )
        )

    def _report(self, episode: _Episode, failure: str | None = None) -> None:
        """Let `poll` tell what came of a request."""
        episode.requests.clear()
        episode.deadline = None
        self._computing.pop(episode.number, None)
        self._outcomes.append(
            Outcome(
                episode=episode.number,
                kind=episode.kind,
                seconds=time.monotonic() - episode.asked_at,
                failure=None if failure is None else " ".join(failure.split())[:_SHOWN_FAILURE],
                results=tuple(episode.results),
                **(episode.facts if failure is None else {}),
            )
        )

    def _stop_late(self) -> None:
        """Stop the children that have computed for too long."""
        now = time.monotonic()
        for episode in list(self._computing.values()):
            if episode.deadline is not None and now >= episode.deadline:
                if not episode.ended:
                    late = f"took more than {self._limits.timeout_s:g} s and was stopped"
                    self._lost(episode, late)
                what, episode.ended = episode.ended, ""
                self._give_up(episode, what)

    def _lost(self, episode: _Episode, what: str) -> None:
        """Go on without the child, which has ended or must be stopped; `poll` gives it up."""
        # A child that has closed its connection ends in a moment.
        status = self._drop_child(episode, wait_s=0.0 if what else _END_S)
        episode.ended = what or status
        held_s = _STOP_S if episode.ended.endswith(_BY_THE_JOB) else 0.0
        episode.deadline = time.monotonic() + held_s

    def _give_up(self, episode: _Episode, what: str) -> None:
        """Go on after a request whose child is gone, if another child is as good."""
        method, *arguments = episode.requests[0]
        is_call = method == "call"
        problem = f"{arguments[0] if is_call else method} {what}"
        if is_call and episode.nursery.program.is_stateless:
            episode.pid, episode.connection = episode.nursery.fork()
            self._selector.register(episode.connection, selectors.EVENT_READ, episode)
            self._take(episode, {"content": f"Error: {problem}", "is_error": True})
            episode.unsent = list(episode.requests)  # what follows the call
            self._send(episode)
        else:
            self._report(episode, problem)

    def _drop_child(self, episode: _Episode, wait_s: float = 0.0) -> str:
        """Kill the child, unless it ends within `wait_s` seconds; how it ended, in words."""
        if episode.ended or episode.connection.fileno() < 0:
            return episode.ended
        self._selector.unregister(episode.connection)
        episode.connection.close()
        episode.received = episode.outgoing = b""
        return episode.nursery.end(episode.pid, wait_s)

    def _log_printed(self) -> None:
        """Log what environments have printed."""
        for nursery in self._nurseries.values():
            printed = nursery.process.drain()
            if printed:
                logger.info("an environment printed: %s", printed)


def describe(
    references: Mapping[str, EnvironmentReference], limits: ToolLimits
) -> dict[str, Program]:
    """What the programs offer, each loaded in a process that ends; or EnvironmentFault."""
    host = EnvironmentHost(references, limits)
    try:
        return host.programs
    finally:
        host.close()


def _allow_many_files() -> None:
    """Let this process open as many files as it may: each episode has a socket."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems name a limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _located(reference: str) -> list[str]:
    """File and name of a tool or an environment; EnvironmentFault if there is no such file."""
    if ":" not in reference:
        return [str(_BUILT_IN), reference]
    try:
        file, name = read_reference(reference)
    except UserCodeError as error:
        raise EnvironmentFault(f"{reference}: {error}") from None
    return [str(file.resolve()), name]


def _is(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(value)
    return value


def _trajectories(value: Any) -> Any:
    for one in _is(list, value):
        _is(list, one["token_ids"])
        dict(_is(list, one["turns"]))
        _is(str, one["role"])
        for reward in _is(list, one["turn_rewards"]):
            programs.number(reward, "it")
        if one["reward"] is not None:
            programs.reward(one["reward"])
    return [value[0], *value[1:]]


# What a child answers to each request, and what returns it or raises an error. The user's code may
# have written to the connection too.
_CHECKS: Mapping[str, Mapping[str, Callable[[Any], Any]]] = {
    "reset": {"observation": partial(programs.said, method="it")},
    "reply": {"observation": partial(programs.said, method="it")},
    "call": {"content": partial(_is, str), "is_error": bool},
    "turn_reward": {"turn_reward": partial(programs.number, method="it"), "ended": bool},
    "reward": {"reward": programs.reward},
    "rollout": {"trajectories": _trajectories},
}
