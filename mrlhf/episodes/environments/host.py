"""Runs the environments of many episodes, each in a process of its own, beside the trainer.

A process imports a user's file once and forks a child for each episode. So a hang, a crash or an
exit in one episode touches no other, and memory and time are limited for each. Requests do not
wait for answers: `poll` gives those that have come. This file does not know tokens or engines.
"""

from __future__ import annotations

import logging
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from mrlhf.config.user_code import UserCodeError, read_reference
from mrlhf.episodes.environments import protocol
from mrlhf.episodes.environments.programs import ProgramError
from mrlhf.episodes.environments.protocol import EnvironmentReference, Outcome, Program, Request
from mrlhf.errors import EnvironmentFault
from mrlhf.workers.child import SIGNALS_OF_THE_JOB
from mrlhf.workers.process import Limits, WorkerProcess

logger = logging.getLogger(__name__)

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
        return Limits(_FORK_S + self.timeout_s, self.memory_mb, "rollout.tool_memory_mb")


class _ForkServer:
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
            "mrlhf.episodes.environments.fork_server",
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
class _Child:
    """The process of one episode, and what it is asked."""

    number: int
    server: _ForkServer
    pid: int
    connection: socket.socket
    kind: Literal["reset", "turn", "reward", "rollout"] = "reset"
    requests: deque[Request] = field(default_factory=deque)  # those that are not answered yet
    # Requests, or answers to its questions.
    unsent: list[protocol.Message] = field(default_factory=list)
    outgoing: bytes = b""  # what the child has not taken yet of those that are sent
    open_questions: int = 0  # of a rollout function, which have no answer yet
    asked_at: float = 0.0
    deadline: float | None = None  # set while the child computes
    received: bytes = b""
    results: list[protocol.ToolResult] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # from the other answers
    ended: str = ""  # how the child ended, if it has


class EnvironmentHost:
    """The environments of all episodes of one replica."""

    def __init__(self, references: Mapping[str, EnvironmentReference], limits: ToolLimits) -> None:
        """Load the programs, by their names; EnvironmentFault if one cannot be loaded."""
        _allow_many_files()
        self._limits = limits
        self._servers: dict[str, _ForkServer] = {}
        self._episodes: dict[int, _Child] = {}
        self._queue: deque[_Child] = deque()
        self._computing: dict[int, _Child] = {}
        self._outcomes: list[Outcome] = []
        self._selector = selectors.DefaultSelector()
        try:
            for name, reference in references.items():
                self._servers[name] = _ForkServer(name, reference, limits)
        except EnvironmentFault:
            self.close()
            raise

    @property
    def programs(self) -> dict[str, Program]:
        """The offer of each program."""
        return {name: server.program for name, server in self._servers.items()}

    def begin(
        self,
        number: int,
        program: str,
        row: Mapping[str, Any],
        seed: int,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin an episode with a row of the data; its random numbers begin with `seed`.

        A rollout function needs `sampling`, the fields of `api.Sampling`.
        """
        server = self._servers[program]
        episode = _Child(number, server, *server.fork())
        self._episodes[number] = episode
        self._selector.register(episode.connection, selectors.EVENT_READ, episode)
        if server.program.is_function:
            arguments = {"row": dict(row), "seed": seed, "sampling": sampling}
            self._ask(episode, "rollout", [Request("rollout", arguments)])
        else:
            self._ask(episode, "reset", [Request("reset", {"row": dict(row), "seed": seed})])

    def answer(self, number: int, answer: protocol.Answer) -> None:
        """Answer a question of a rollout function."""
        episode = self._episodes.get(number)
        if episode is None:
            return  # it has ended without waiting for this
        episode.open_questions -= 1
        episode.unsent.append(answer)
        if episode not in self._queue:  # else the function went on, and has asked again
            episode.asked_at = time.monotonic()
            self._queue.append(episode)

    def turn(self, number: int, text: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Run the calls of a turn; without any, let the environment reply to its text."""
        requests = [Request("call", {"name": name, "arguments": given}) for name, given in calls]
        requests = [*(requests or [Request("reply", {"text": text})]), Request("turn_reward")]
        self._ask(self._episodes[number], "turn", requests)

    def ask_reward(self, number: int) -> None:
        """Ask what the episode is worth; its program must have a reward."""
        self._ask(self._episodes[number], "reward", [Request("reward")])

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
        for server in self._servers.values():
            server.process.stop()
        for episode in self._episodes.values():
            episode.connection.close()
        self._episodes.clear()
        self._queue.clear()
        self._selector.close()

    def _ask(
        self,
        episode: _Child,
        kind: Literal["reset", "turn", "reward", "rollout"],
        requests: Sequence[Request],
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
            if episode.open_questions:  # it waits for more answers
                self._computing.pop(episode.number, None)

    def _send(self, episode: _Child) -> None:
        """Send all requests at once, each of which has its own time; or what it has asked for."""
        until = time.monotonic() + self._limits.timeout_s
        episode.deadline = None if episode.open_questions else until
        episode.outgoing += protocol.encode(episode.unsent, default=str)
        episode.unsent = []
        self._flush(episode)

    def _flush(self, episode: _Child) -> None:
        """Send what the child takes without delay; `poll` sends the rest when it takes more."""
        if episode.connection.fileno() < 0:
            return
        with suppress(OSError):  # its buffer is full; or it has ended, which `_read` finds
            sent = episode.connection.send(episode.outgoing, socket.MSG_DONTWAIT)
            episode.outgoing = episode.outgoing[sent:]
        waits = selectors.EVENT_WRITE if episode.outgoing else 0
        self._selector.modify(episode.connection, selectors.EVENT_READ | waits, episode)

    def _read(self, episode: _Child) -> None:
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
                for message in protocol.decode(line):
                    self._take_message(episode, message)
            except (TypeError, ValueError, LookupError, RecursionError, ProgramError):
                self._lost(episode, "wrote to its connection")
                return

    def _take_message(self, episode: _Child, message: protocol.Message) -> None:
        """Take one message; any error if it has another form than a child sends."""
        if not episode.requests:
            return
        if isinstance(message, protocol.Done):
            self._take(episode, message.checked(episode.requests[0].method))
        elif isinstance(message, protocol.Question) and episode.kind == "rollout":
            self._take_question(episode, message)
        elif isinstance(message, protocol.Failure):
            logger.debug("episode %d: %s", episode.number, message.trace)
            self._report(episode, message.summary)
        else:
            raise ValueError(message)

    def _take(self, episode: _Child, answer: Mapping[str, Any]) -> None:
        """Keep the answer to the first request, and report what came of all after the last."""
        request = episode.requests[0]
        if request.method == "call":
            episode.results.append(protocol.ToolResult(request.arguments["name"], **answer))
        else:
            episode.facts |= answer
        episode.requests.popleft()
        if not episode.requests:
            self._report(episode)

    def _take_question(self, episode: _Child, question: protocol.Question) -> None:
        """Let `poll` return a rollout function's question; its time stands still meanwhile."""
        if question.what == "generate":
            itemgetter("max_tokens", "reads_calls")(question.arguments)
            if not isinstance(question.arguments["token_ids"], list):
                raise TypeError(question)
        seconds = 0.0 if episode.open_questions else time.monotonic() - episode.asked_at
        episode.open_questions += 1
        episode.deadline = None
        self._computing.pop(episode.number, None)
        self._outcomes.append(Outcome(episode.number, "ask", seconds, question=question))

    def _report(self, episode: _Child, failure: str | None = None) -> None:
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

    def _lost(self, episode: _Child, what: str) -> None:
        """Go on without the child, which has ended or must be stopped; `poll` gives it up."""
        # A child that has closed its connection ends in a moment.
        status = self._drop_child(episode, wait_s=0.0 if what else _END_S)
        episode.ended = what or status
        held_s = _STOP_S if episode.ended.endswith(_BY_THE_JOB) else 0.0
        episode.deadline = time.monotonic() + held_s

    def _give_up(self, episode: _Child, what: str) -> None:
        """Fail the request of a child that has ended, or go on in a new child if none has state."""
        request = episode.requests[0]
        is_call = request.method == "call"
        problem = f"{request.arguments['name'] if is_call else request.method} {what}"
        if is_call and episode.server.program.is_stateless:
            episode.pid, episode.connection = episode.server.fork()
            self._selector.register(episode.connection, selectors.EVENT_READ, episode)
            self._take(episode, {"content": f"Error: {problem}", "is_error": True})
            episode.unsent = list(episode.requests)  # what follows the call
            self._send(episode)
        else:
            self._report(episode, problem)

    def _drop_child(self, episode: _Child, wait_s: float = 0.0) -> str:
        """Kill the child, unless it ends within `wait_s` seconds; how it ended, in words."""
        if episode.ended or episode.connection.fileno() < 0:
            return episode.ended
        self._selector.unregister(episode.connection)
        episode.connection.close()
        episode.received = episode.outgoing = b""
        return episode.server.end(episode.pid, wait_s)

    def _log_printed(self) -> None:
        """Log what environments have printed."""
        for server in self._servers.values():
            printed = server.process.drain()
            if printed:
                logger.info("an environment printed: %s", printed)


def describe(
    references: Mapping[str, EnvironmentReference], limits: ToolLimits
) -> dict[str, Program]:
    """The offers of the programs, each loaded in a process that ends; or EnvironmentFault."""
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
