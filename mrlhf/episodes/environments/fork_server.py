"""Forks a child for each episode, in the process that `workers/start.py` begins.

It answers ["fork"], which comes with a socket, by ["pid", number of the child that serves on this
socket]; and ["end", pid, wait_s] by ["status", how it ended]: it kills the child with all that it
has started, unless it ends by itself within `wait_s` seconds. A child gets lines of requests, and
drops the rest of a line after a failure.
"""

from __future__ import annotations

import inspect
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from mrlhf.config import user_code
from mrlhf.episodes.environments import api, programs
from mrlhf.episodes.environments.protocol import Done, Failure, Request, decode, encode
from mrlhf.workers import child


def load(
    environment: list[str] | None, tools: list[list[str]]
) -> tuple[dict[str, Any], Callable[..., None]]:
    """Load the program of these files and names; UserCodeError if it cannot be used."""
    kind: Any = None
    rollout = None
    if environment is not None:
        file, name = environment
        kind = user_code.load_member(Path(file), name, "class or async function")
        if inspect.iscoroutinefunction(kind):
            kind, rollout = None, kind
        elif not isinstance(kind, type):
            raise user_code.UserCodeError(
                f"{name} in {file} is neither a class nor an async function; name one, or put a "
                "function into rollout.tools"
            )

    functions = []
    for file, name in tools:
        function = user_code.load_member(Path(file), name)
        if isinstance(function, type):
            raise user_code.UserCodeError(f"{name} in {file} is no function; name one")
        with _naming([file, name]):
            functions.append(programs.Tool(name, function, is_method=False))
    with _naming(environment):
        offer = programs.Offer(kind, functions, rollout)
    return offer.describe(), partial(_serve, offer)


@contextmanager
def _naming(reference: list[str] | None) -> Iterator[None]:
    """Let the error of what cannot be used name the user's file, and its class or function."""
    try:
        yield
    except programs.ProgramError as error:
        where = f"{reference[1]} in {reference[0]}: " if reference else ""
        raise user_code.UserCodeError(f"{where}{error}") from None


def _serve(
    offer: programs.Offer,
    messages: Iterator[child.Message],
    control: socket.socket,
    lifeline: int,
) -> None:
    """Fork and end children."""
    for (kind, *arguments), descriptors in messages:
        if kind == "end":
            child.send(control, "status", _end(*arguments))
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            # What the user's code starts must not keep it open when the child has ended.
            os.set_inheritable(descriptors[0], False)
            connection = socket.socket(fileno=descriptors[0])
            child.keep_from_forks(connection)
            _run_child(connection, lifeline, offer)
        os.close(descriptors[0])
        child.send(control, "pid", pid)


def _end(pid: int, wait_s: float) -> str:
    """Kill a child with its group; how it ended, if it did so by itself."""
    until = time.monotonic() + wait_s
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < until:
        time.sleep(0.005)
        ended, status = os.waitpid(pid, os.WNOHANG)

    if not ended:
        os.kill(pid, signal.SIGKILL)  # it may have no group yet
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
        return "was stopped"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended its process (exit code {code})"
    return f"ended its process (signal {signal.Signals(-code).name})"


def _run_child(connection: socket.socket, lifeline: int, offer: programs.Offer) -> None:
    """Answer until the connection closes, and end the process."""
    code = 1
    try:
        os.setsid()
        child.end_by_signals()
        # A fork shares the open file, and with it the process that the kernel kills: open another.
        child.end_with_trainer(os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK))
        with suppress(BrokenPipeError, ConnectionResetError):
            _answer_requests(connection, _Service(offer, connection))
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _answer_requests(connection: socket.socket, episode: _Service) -> None:
    for line in connection.makefile("rb"):
        for request in decode(line):
            assert isinstance(request, Request)
            try:
                answer = getattr(episode, request.method)(**request.arguments)
                child.send_line(connection, encode([Done(answer)]))
            except BaseException as error:  # also SystemExit
                summary = str(error)
                if not isinstance(error, programs.ProgramError):
                    summary = f"{request.method} raised {_summary(error)}"
                failure = Failure(summary, child.without_own_frames(error))
                child.send_line(connection, encode([failure]))
                break


class _Service:
    """Answers requests, each by its method."""

    def __init__(self, offer: programs.Offer, connection: socket.socket) -> None:
        self._offer = offer
        self._connection = connection
        self._environment: Any = None
        self._is_over = False

    def rollout(
        self, row: Mapping[str, Any], seed: int, sampling: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The trajectories of a rollout function, which asks the trainer on the way."""
        assert self._offer.rollout is not None
        _begin_random_numbers(seed)
        return api.lead(self._offer.rollout, self._connection, row, sampling)

    def reset(self, row: Mapping[str, Any], seed: int) -> dict[str, Any]:
        _begin_random_numbers(seed)
        self._environment = self._offer.environment() if self._offer.environment else None
        return {"observation": programs.said(self._ask("reset", row), "reset")}

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a tool, or why there is none."""
        tool = self._offer.tools.get(name)
        if tool is None:
            known = ", ".join(self._offer.tools) or "none"
            problem = f"Error: there is no tool {name!r}; there is {known}"
            return {"content": problem, "is_error": True}
        try:
            owner = self._environment if tool.is_method else None
            return {"content": tool.call(owner, arguments), "is_error": False}
        except BaseException as error:  # also SystemExit
            return {"content": f"Error: {_summary(error)}", "is_error": True}

    def reply(self, text: str) -> dict[str, Any]:
        said = programs.said(self._ask("reply", text), "reply")
        self._is_over = said is None
        return {"observation": said}

    def turn_reward(self) -> dict[str, Any]:
        """The reward of a turn, if there is one, and whether the episode is over after it."""
        answer: dict[str, Any] = {}
        if "turn_reward" in self._offer.methods:
            value = self._environment.turn_reward()
            answer["turn_reward"] = programs.number(value, "turn_reward")
        answer["ended"] = self._is_over or bool(getattr(self._environment, "done", False))
        return answer

    def reward(self) -> dict[str, Any]:
        return {"reward": programs.reward(self._ask("reward"))}

    def _ask(self, method: str, *arguments: Any) -> Any:
        """The result of a method of the environment; None if it has no such method."""
        if method not in self._offer.methods:
            return None
        return getattr(self._environment, method)(*arguments)


def _begin_random_numbers(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _summary(error: BaseException) -> str:
    """Type and message of an error, on one line."""
    return programs.as_text(user_code.summarise_error(error, Path()))
