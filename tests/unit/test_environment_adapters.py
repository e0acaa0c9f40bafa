"""Servers that follow the protocol of NeMo-Gym lead episodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mrlhf.errors import EnvironmentFault
from tests.adapter_folder import Folder, calling


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    folder.close()


Answer = tuple[int, Any]
Handler = Callable[[str, str, Any], Answer]  # of session, path and body


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    """Starts servers that tell sessions apart by a cookie, as those of NeMo-Gym do."""
    servers = []
    sessions = count()

    def start(handler: Handler) -> str:
        class Requests(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                cookie = self.headers.get("Cookie") or f"session=s{next(sessions)}"
                status, answer = handler(cookie, self.path, body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Set-Cookie", f"{cookie}; Path=/")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


INCREMENT = {
    "type": "function",
    "name": "increment",
    "description": "Add to the counter.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {
            "by": {"type": "integer", "description": "how much"},
            "kind": {"anyOf": [{"enum": ["up", "down"], "type": "string"}, {"type": "null"}]},
        },
        "required": ["by"],
    },
}
PARAMS = {
    "input": [
        {"role": "developer", "content": "Count."},
        {"role": "user", "content": [{"type": "input_text", "text": "Add 2 to 3."}]},
    ],
    "tools": [INCREMENT],
}
ROW = {"responses_create_params": PARAMS, "initial_count": 3, "expected_count": 5}


class Counters:
    """A resources server with a counter for each session, which records what it is asked."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.asked: list[tuple[str, Any]] = []
        self.further: dict[str, Any] = {"steps": 1, "judge": "none", "passed": True}

    def __call__(self, session: str, path: str, body: Any) -> Answer:
        self.asked.append((path, body))
        if path == "/seed_session":
            self.counts[session] = body["initial_count"]
            return 200, {}
        if path == "/increment":
            if body["by"] > 100:
                return 422, {"detail": "too much"}
            self.counts[session] += body["by"]
            return 200, {"count": self.counts[session]}
        if path == "/verify":
            reward = float(self.counts[session] == body["expected_count"])
            return 200, {**body, "reward": reward, **self.further}
        return 404, {"detail": "Not Found"}


def nemo(url: str, row: dict[str, Any], folder: Folder, arguments: str = "") -> dict[str, Any]:
    """Write a user's file and data; the row for the trainer."""
    data = folder.path / "gym.jsonl"
    data.write_text(json.dumps(row) + "\n")
    folder.write(
        "from nemo_gym_adapter import adapt, write_rows\n"
        f"mine = adapt({url!r}{arguments})\n"
        f"write_rows({str(data)!r}, {str(folder.path / 'out/train.jsonl')!r})\n"
    )
    folder.load("mine")
    return json.loads((folder.path / "out/train.jsonl").read_text())


def test_a_server_of_tools_has_a_session_of_each_episode_and_verifies_its_response(folder, serve):
    server = Counters()
    row = nemo(serve(server), ROW, folder)
    prompt = [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "Add 2 to 3."},
    ]
    assert row["prompt"] == prompt

    up = {"by": 2, "kind": "up"}
    calls = calling(("increment", {"by": 101}), ("increment", up), content="First I add.")
    played = folder.play("mine", row, [calls, "It is 5."])
    assert played.failure is None
    assert played.reward == {"score": 1.0, "steps": 1.0, "passed": 1.0}
    assert played.prompts == [prompt]
    keys = ("name", "description", "parameters")
    function = {key: INCREMENT[key] for key in keys}
    assert played.tools == [[{"type": "function", "function": function}]]
    assert played.told == [
        [
            {"role": "tool", "name": "increment", "content": '{"detail": "too much"}'},
            {"role": "tool", "name": "increment", "content": '{"count": 5}'},
        ]
    ]

    asked = [(path, body) for path, body in server.asked if path != "/verify"]
    assert asked == [("/seed_session", ROW), ("/increment", {"by": 101}), ("/increment", up)]
    path, body = server.asked[-1]
    assert path == "/verify" and {key: body[key] for key in ROW} == ROW
    response = body["response"]
    assert response["object"] == "response" and response["tools"] == [INCREMENT]
    beside, first, second, told, told_too, message = response["output"]
    assert beside["content"][0]["text"] == "First I add."
    assert (first["type"], told["type"]) == ("function_call", "function_call_output")
    assert (first["name"], json.loads(first["arguments"])) == ("increment", {"by": 101})
    assert first["call_id"] == told["call_id"] != second["call_id"] == told_too["call_id"]
    assert told_too["output"] == '{"count": 5}'
    assert message["role"] == "assistant" and message["content"][0]["text"] == "It is 5."

    # Another episode has another session, and is verified without a last turn, too.
    played = folder.play("mine", row, [calling(("increment", {"by": 1}))])
    assert played.told[0][0]["content"] == '{"count": 4}'
    assert played.reward == {"score": 0.0, "steps": 1.0, "passed": 1.0}
    assert len(server.counts) == 2

    # Calls of a turn that was cut are not run.
    played = folder.play("mine", row, [calling(("increment", {"by": 2}), stopped=False), "5"])
    assert played.reward["score"] == 0.0 and not played.told


def test_what_a_server_cannot_score_fails_the_episode(folder, serve):
    server = Counters()
    row = nemo(serve(server), ROW, folder)
    server.further = {"mask_sample": True, "failure_reason": "the judge is away"}
    assert "the judge is away" in str(folder.play("mine", row, ["5"]).failure)
    assert "had no turn" in str(folder.play("mine", row, []).failure)

    failure = str(folder.play("mine", {"prompt": "?"}, ["5"]).failure)
    assert "column nemo_gym" in failure and "write_rows" in failure

    def offers_mcp(session: str, path: str, body: Any) -> Answer:
        return 200, {"mcp": {"url_path": "/mcp"}}

    bare = {"responses_create_params": {"input": "Hello"}}
    row = nemo(serve(offers_mcp), bare, folder)
    assert row["prompt"] == [{"role": "user", "content": "Hello"}]
    assert "MCP alone" in str(folder.play("mine", row, ["5"]).failure)

    row = nemo("http://127.0.0.1:9", bare, folder)
    assert "no server answers at http://127.0.0.1:9" in str(folder.play("mine", row, []).failure)

    searches = {"responses_create_params": {"input": "1", "tools": [{"type": "web_search"}]}}
    row = nemo("http://127.0.0.1:9", searches, folder)
    assert "no function" in str(folder.play("mine", row, []).failure)


def test_an_input_has_calls_and_no_images(folder):
    call = {"type": "function_call", "call_id": "c", "name": "increment", "arguments": '{"by": 2}'}
    said = [
        {"role": "user", "content": "Add."},
        {"type": "reasoning", "summary": []},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ]
    row = nemo("http://127.0.0.1:9", {"responses_create_params": {"input": said}}, folder)
    function = {"name": "increment", "arguments": {"by": 2}}
    assert row["prompt"] == [
        {"role": "user", "content": "Add."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "name": "increment", "content": "5"},
    ]

    image = [{"role": "user", "content": [{"type": "input_image"}]}]
    with pytest.raises(EnvironmentFault, match="only text"):
        nemo("http://127.0.0.1:9", {"responses_create_params": {"input": image}}, folder)


class Steps:
    """A server in the style of Gymnasium, which counts down with each step."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}

    def __call__(self, session: str, path: str, body: Any) -> Answer:
        if path == "/reset":
            self.left[session] = body["steps"]
            return 200, {"observation": f"{body['steps']} left", "info": {}}
        if path != "/step":
            return 404, {"detail": "Not Found"}
        items = body["response"]["output"]
        self.left[session] -= 1
        left = self.left[session]
        answer = {"reward": 0.25, "terminated": left == 0, "truncated": False, "info": {}}
        calls = [item["call_id"] for item in items if item["type"] == "function_call"]
        if calls:
            outputs = [{"call_id": call, "output": f"counted {call == calls[0]}"} for call in calls]
            return 200, {**answer, "info": {"tool_outputs": outputs}}
        return 200, {**answer, "observation": f"{items[0]['content'][0]['text']}: {left} left"}


def test_a_server_in_the_style_of_gymnasium_pays_each_turn(folder, serve):
    row = {"responses_create_params": PARAMS, "steps": 4}
    url = serve(Steps())
    row = nemo(url, row, folder, ", gymnasium=True")
    call = ("increment", {"by": 1})
    played = folder.play("mine", row, ["a", calling(call, call), "b", "c", "d"])
    assert played.prompts[0][-1] == {"role": "user", "content": "4 left"}
    counted = [
        {"role": "tool", "name": "increment", "content": f"counted {first}"}
        for first in (True, False)
    ]
    assert played.told == [
        [{"role": "user", "content": "a: 3 left"}],
        counted,
        [{"role": "user", "content": "b: 1 left"}],
    ]
    assert played.reward is None and played.turn_rewards == [0.25] * 4
    assert folder.play("mine", row, ["a"]).turn_rewards == [0.25]

    row = nemo(url, row["nemo_gym"], folder)
    failure = str(folder.play("mine", row, []).failure)
    assert "status 404" in failure and "gymnasium=True" in failure
