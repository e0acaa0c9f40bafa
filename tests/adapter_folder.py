"""A user's folder with the adapters of configs/recipes/turns/adapters, and episodes with them."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

from mrlhf.episodes.environments.host import EnvironmentHost, ToolLimits
from mrlhf.episodes.environments.protocol import Answer, EnvironmentReference, Outcome
from tests.pages import ROOT

ADAPTERS = ROOT / "configs/recipes/turns/adapters"
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 50,
    "max_turns": 4,
}
LONGEST_S = 60.0  # of an episode
Turn = str | dict[str, Any]  # a text, or what else the trainer answers
Handler = Callable[[str, str, Any], Any]  # of session, path and body; None: nothing is there


def calling(*calls: tuple[str, dict[str, Any]], content: str = "", **further: Any) -> Turn:
    """A turn with calls, and a text beside them."""
    named = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return {"text": "has calls", "calls": named, "content": content, **further}


@dataclass
class Played:
    """An episode that has ended."""

    failure: str | None = None
    trajectories: Sequence[Mapping[str, Any]] = ()
    # What the policy read before each turn that it was asked for: messages of a prompt, or those
    # behind another turn.
    prompts: list[Any] = field(default_factory=list)
    told: list[Any] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)  # that each prompt shows

    @property
    def reward(self) -> Any:
        """The reward that the episode's only trajectory has."""
        (one,) = self.trajectories
        return one["reward"]

    @property
    def turn_rewards(self) -> list[float]:
        """Those of the episode's only trajectory."""
        (one,) = self.trajectories
        return one["turn_rewards"]


class Folder:
    """A user's folder: the adapters, and a file with rollout functions beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hosts: dict[str, EnvironmentHost] = {}  # importing a library takes seconds
        self._numbers = count()
        for file in ADAPTERS.glob("*.py"):
            shutil.copy(file, path)

    def write(self, text: str) -> None:
        self.close()
        (self.path / "mine.py").write_text(text)

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()

    def nemo(self, row: dict[str, Any], handler: Handler, further: str = "") -> dict[str, Any]:
        """Have `mine` speak to such a server of NeMo-Gym; returns its row for the trainer."""
        data, rows = self.path / "gym.jsonl", self.path / "out/train.jsonl"
        data.write_text(json.dumps(row) + "\n")
        self.write(
            "from nemo_gym_adapter import adapt, write_rows\n"
            f"mine = adapt('http://127.0.0.1:{_serve(handler)}'{further})\n"
            f"write_rows({str(data)!r}, {str(rows)!r})\n"
        )
        self.load("mine")
        written: dict[str, Any] = json.loads(rows.read_text())
        return written

    def load(self, name: str) -> None:
        assert self._host(name).programs["e"].is_function

    def play(self, name: str, row: dict[str, Any], turns: Sequence[Turn]) -> Played:
        """An episode whose policy says these turns, and has no room for more."""
        host = self._host(name)
        number = next(self._numbers)
        row = {"uid": 7, "data_source": "mine", "answer": None, **row}
        host.begin(number, "e", row, seed=1, sampling=SAMPLING)
        played = Played()
        left = list(turns)
        tokens = count(1)

        until = time.monotonic() + LONGEST_S
        while time.monotonic() < until:
            for outcome in host.poll(1.0):
                if outcome.kind == "ask":
                    _answer(host, outcome, played, left, tokens)
                    continue
                host.end(number)
                played.failure = outcome.failure
                played.trajectories = outcome.trajectories
                return played

        raise AssertionError(f"the episode has not ended after {LONGEST_S:g} s")

    def _host(self, name: str) -> EnvironmentHost:
        if name not in self._hosts:
            reference = EnvironmentReference(f"{self.path}/mine.py:{name}")
            limits = ToolLimits(timeout_s=LONGEST_S)
            self._hosts[name] = EnvironmentHost({"e": reference}, limits)
        return self._hosts[name]


def _serve(handler: Handler) -> int:
    """The port of a server that tells sessions apart by a cookie, as those of NeMo-Gym do."""
    sessions = count()

    class Requests(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            cookie = self.headers.get("Cookie") or f"session=s{next(sessions)}"
            answer = handler(cookie, self.path, body)
            text = json.dumps(answer).encode()

            self.send_response(404 if answer is None else 200)
            self.send_header("Set-Cookie", f"{cookie}; Path=/")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def _answer(
    host: EnvironmentHost, outcome: Outcome, played: Played, left: list[Turn], tokens: count[int]
) -> None:
    """What a trainer answers; each answer has a token of its own."""
    question = outcome.question
    assert question is not None
    what, asked = question.what, question.arguments
    value: Any = [next(tokens)]

    if what == "generate":
        if not left:
            refusal = Answer(question.number, "there is no room", "no room")
            host.answer(outcome.episode, refusal)
            return
        turn = left.pop(0)
        given = {"text": turn, "content": turn} if isinstance(turn, str) else turn
        reads = asked["reads_calls"]
        parsed = {"calls": [], "content": "", "problem": ""}
        value = {"token_ids": value, "draw": value[0], "stopped": True}
        value |= {**(parsed if reads else {}), "text": given["text"]}
        value |= {key: given[key] for key in given if reads or key not in parsed}
    elif what == "prompt":
        played.prompts.append(asked["messages"])
        played.tools.append(asked["tools"])
    elif what == "tell":
        played.told.append(asked["messages"])

    host.answer(outcome.episode, Answer(question.number, value))
