"""The process that imports a user's environment once, and forks a child for each episode.

It is started by its path as `nursery.py FD LIFELINE MEMORY_MB`, not imported. It answers each line
of JSON on the socket FD by one:

1. {"path", "environment", "tools"}: loads the program; ["ready", what it offers] or
   ["error", [summary, traceback]].
2. ["fork"], with a socket: ["pid", number of the child that serves on this socket].
3. ["end", pid, wait_s]: kills the child with all that it has started, unless it ends by itself
   within so many seconds; ["status", how it ended].

A child answers on its own socket, see `_serve`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent


def _loaded(file: Path) -> ModuleType:
    """A file of the package, loaded by its path, since importing the package would import torch."""
    spec = importlib.util.spec_from_file_location(f"mrlhf_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


child = _loaded(_HERE.parent / "workers" / "child.py")
programs = _loaded(_HERE / "programs.py")
user_code = child.user_code


def main() -> None:
    """Serve until the trainer closes its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    lifeline = int(sys.argv[2])
    child.end_with_trainer(lifeline)
    child.ignore_signals_of_the_job()
    os.set_inheritable(control.fileno(), False)
    child.limit_resources(int(sys.argv[3]))
    with suppress(BrokenPipeError, ConnectionResetError):
        _tend(control, lifeline)
    os.killpg(0, signal.SIGKILL)


def _tend(control: socket.socket, lifeline: int) -> None:
    """Load the program, then fork and end children."""
    request, _ = _receive(control)
    if request is None:
        return
    sys.path[:] = request["path"]
    try:
        offer = _load(request["environment"], request["tools"])
    except (user_code.UserCodeError, programs.ProgramError) as error:
        trace = "" if error.__cause__ is None else child.without_own_frames(error.__cause__)
        child.send(control, "error", [str(error), trace])
        return
    child.send(control, "ready", offer.describe())

    while True:
        request, descriptors = _receive(control)
        if request is None:
            return
        if request[0] == "fork":
            pid = os.fork()
            if pid == 0:
                control.close()
                _live(socket.socket(fileno=descriptors[0]), lifeline, offer)
            os.close(descriptors[0])
            child.send(control, "pid", pid)
        else:
            child.send(control, "status", _end(*request[1:]))


def _receive(control: socket.socket) -> tuple[Any, list[int]]:
    """The next request and the descriptors that came with it; None at the end."""
    line = b""
    descriptors: list[int] = []
    while not line.endswith(b"\n"):
        part, some, _, _ = socket.recv_fds(control, 65536, 1)
        if not part:
            return None, descriptors
        line += part
        descriptors += some
    return json.loads(line), descriptors


def _load(environment: list[str] | None, tools: list[list[str]]) -> Any:
    """The program of these files and names."""
    kind = None
    if environment is not None:
        file, name = environment
        kind = user_code.load_member(Path(file), name)
        if not isinstance(kind, type):
            raise user_code.UserCodeError(
                f"{name} in {file} is no class; name a class, or put a function into rollout.tools"
            )
    functions = {}
    for file, name in tools:
        function = user_code.load_member(Path(file), name)
        if isinstance(function, type) or not callable(function):
            raise user_code.UserCodeError(f"{name} in {file} is no function; name one")
        if name in functions:
            raise programs.ProgramError(f"two tools have the name {name}; rename one")
        functions[name] = function
    return programs.Offer(kind, functions)


def _end(pid: int, wait_s: float) -> str:
    """Kill a child with its group; how it ended, if it did so by itself."""
    until = time.monotonic() + wait_s
    ended, status = os.waitpid(pid, os.WNOHANG)
    while not ended and time.monotonic() < until:
        time.sleep(0.005)
        ended, status = os.waitpid(pid, os.WNOHANG)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
        return "was stopped"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended its process (exit code {code})"
    return f"ended its process (signal {signal.Signals(-code).name})"


def _live(connection: socket.socket, lifeline: int, offer: Any) -> None:
    """The life of a child, which ends here."""
    code = 1
    try:
        os.setsid()
        # Whom the kernel tells belongs to the open file, which the fork shares.
        child.end_with_trainer(os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_NONBLOCK))
        with suppress(BrokenPipeError, ConnectionResetError):
            _serve(connection, offer)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def _serve(connection: socket.socket, offer: Any) -> None:
    """Answer the requests for one episode.

    ["reset", row, seed], ["turn", text, calls] and ["reward"] are answered by ["done", {...}] or
    ["failure", [summary, traceback]]; before that, each call of a turn by ["result", {...}].
    """
    environment: Any = None
    for line in connection.makefile("rb"):
        kind, *arguments = json.loads(line)
        try:
            if kind == "reset":
                row, seed = arguments
                random.seed(seed)
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(seed % 2**32)
                environment = offer.environment() if offer.environment else None
                value = environment.reset(row) if "reset" in offer.methods else None
                answer = {"observation": programs.said(value, "reset")}
            elif kind == "turn":
                answer = _turn(connection, offer, environment, *arguments)
            else:
                answer = {"reward": programs.reward(environment.reward())}
            child.send(connection, "done", answer)
        except BaseException as error:  # also SystemExit
            member = {"turn": "reply or turn_reward"}.get(kind, kind)
            summary = str(error)
            if not isinstance(error, programs.ProgramError):
                summary = f"{member} raised {_summary(error)}"
            child.send(connection, "failure", [summary, child.without_own_frames(error)])


def _turn(
    connection: socket.socket, offer: Any, environment: Any, text: str, calls: list[Any]
) -> dict[str, Any]:
    """Run the calls of a turn, or have the environment reply to its text."""
    for name, arguments in calls:
        child.send(connection, "result", _result(offer, environment, name, arguments))
    answer: dict[str, Any] = {"ended": False}
    if not calls:
        said = None
        if "reply" in offer.methods:
            said = programs.said(environment.reply(text), "reply")
        answer = {"observation": said, "ended": said is None}
    if "turn_reward" in offer.methods:
        answer["turn_reward"] = programs.number(environment.turn_reward(), "turn_reward")
    answer["ended"] = answer["ended"] or getattr(environment, "done", False) is True
    return answer


def _result(offer: Any, environment: Any, name: str, arguments: Any) -> dict[str, Any]:
    """What a tool says, or why it could not."""
    tool = offer.tools.get(name)
    if tool is None:
        known = ", ".join(offer.tools) or "none"
        return {"content": f"Error: there is no tool {name!r}; there is {known}", "is_error": True}
    try:
        answer = tool.call(environment if tool.is_method else None, arguments)
        return {"content": answer, "is_error": False}
    except BaseException as error:  # also SystemExit
        return {"content": f"Error: {_summary(error)}", "is_error": True}


def _summary(error: BaseException) -> str:
    """Type and message of an error, on one line."""
    return str(programs.as_text(user_code.summarise_error(error, Path())))


if __name__ == "__main__":
    main()
