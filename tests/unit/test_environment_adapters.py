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

from mrlhf.environments.interface import ToolCall
from mrlhf.errors import EnvironmentFault
from tests.adapter_folder import Folder


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


def nemo(url: str, *rows: dict[str, Any], folder: Folder, arguments: str = "") -> dict[str, Any]:
    """Write a user's file and data; the first row for the trainer."""
    data = folder.path / "gym.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.write(
        "from nemo_gym_adapter import adapt, write_rows\n"
        f"Mine = adapt({url!r}, {str(data)!r}{arguments})\n"
        f"write_rows({str(data)!r}, {str(folder.path / 'out/train.jsonl')!r})\n"
    )
    folder.program("Mine")
    return json.loads((folder.path / "out/train.jsonl").read_text().splitlines()[0])


def test_a_server_of_tools_has_a_session_of_each_episode_and_verifies_its_response(folder, serve):
    server = Counters()
    row = nemo(serve(server), ROW, folder=folder)
    assert row["prompt"] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "Add 2 to 3."},
    ]
    (tool,) = folder.program("Mine").tools
    assert tool["function"]["description"] == "Add to the counter."
    parameters = tool["function"]["parameters"]
    assert parameters["required"] == ["by"]
    assert parameters["properties"] == INCREMENT["parameters"]["properties"]

    calls = [ToolCall("increment", {"by": 101}), ToolCall("increment", {"by": 2, "kind": "up"})]
    begun, called, said, paid = folder.play("Mine", row, [calls, "It is 5."])
    assert (begun.failure, begun.observation) == (None, None)
    assert [result.content for result in called.results] == [
        '{"detail": "too much"}',
        '{"count": 5}',
    ]
    assert said.ended
    assert paid.reward == {"score": 1.0, "steps": 1.0, "passed": 1.0}

    asked = [(path, body) for path, body in server.asked if path != "/verify"]
    assert asked == [
        ("/seed_session", ROW),
        ("/increment", {"by": 101}),
        ("/increment", {"by": 2, "kind": "up"}),
    ]
    path, body = server.asked[-1]
    assert path == "/verify" and {key: body[key] for key in ROW} == ROW
    response = body["response"]
    assert response["object"] == "response" and response["tools"] == [INCREMENT]
    first, told, second, told_too, message = response["output"]
    assert [first["type"], told["type"]] == ["function_call", "function_call_output"]
    assert (first["name"], json.loads(first["arguments"])) == ("increment", {"by": 101})
    assert first["call_id"] == told["call_id"] != second["call_id"] == told_too["call_id"]
    assert told_too["output"] == '{"count": 5}'
    assert message["role"] == "assistant" and message["content"][0]["text"] == "It is 5."

    # Another episode has another session, and is verified without a last turn too.
    outcomes = folder.play("Mine", row, [[ToolCall("increment", {"by": 1})]])
    assert outcomes[1].results[0].content == '{"count": 4}'
    assert outcomes[-1].reward == {"score": 0.0, "steps": 1.0, "passed": 1.0}
    assert len(server.counts) == 2


def test_what_a_server_cannot_score_fails_the_episode(folder, serve):
    server = Counters()
    row = nemo(serve(server), ROW, folder=folder)
    server.further = {"mask_sample": True, "failure_reason": "the judge is away"}
    assert "the judge is away" in str(folder.play("Mine", row, ["5"])[-1].failure)

    (begun,) = folder.play("Mine", {"prompt": "?"}, ["5"])
    assert "column nemo_gym" in str(begun.failure) and "write_rows" in str(begun.failure)

    def offers_mcp(session: str, path: str, body: Any) -> Answer:
        return 200, {"mcp": {"url_path": "/mcp"}}

    bare = {"responses_create_params": {"input": "Hello"}}
    row = nemo(serve(offers_mcp), bare, folder=folder)
    assert row["prompt"] == [{"role": "user", "content": "Hello"}]
    assert "MCP alone" in str(folder.play("Mine", row, [])[0].failure)

    row = nemo("http://127.0.0.1:9", bare, folder=folder)
    assert "no server answers at http://127.0.0.1:9" in str(folder.play("Mine", row, [])[0].failure)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"input": "1", "tools": []}, "row 2 of"),
        ({"input": [{"type": "function_call"}], "tools": [INCREMENT]}, "of text train"),
        (
            {
                "input": [{"role": "user", "content": [{"type": "input_image"}]}],
                "tools": [INCREMENT],
            },
            "of text train",
        ),
    ],
)
def test_rows_of_a_server_that_cannot_train_are_refused(folder, second, words):
    with pytest.raises(EnvironmentFault, match=words):
        nemo("http://127.0.0.1:9", ROW, {"responses_create_params": second}, folder=folder)


def test_a_tool_that_the_policy_cannot_be_shown_is_refused(folder):
    for tool, words in (
        ({"type": "web_search"}, "web_search"),
        ({**INCREMENT, "name": "reset"}, "'reset'"),
        ({**INCREMENT, "parameters": {"$defs": {}, "properties": {}}}, r"\$defs"),
    ):
        row = {"responses_create_params": {"input": "1", "tools": [tool]}}
        with pytest.raises(EnvironmentFault, match=words):
            nemo("http://127.0.0.1:9", row, folder=folder)


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
        (item,) = body["response"]["output"]
        self.left[session] -= 1
        left = self.left[session]
        answer = {"reward": 0.25, "terminated": left == 0, "truncated": False, "info": {}}
        if item["type"] == "function_call":
            answer["info"] = {"tool_outputs": [{"call_id": item["call_id"], "output": "counted"}]}
            return 200, answer
        return 200, {**answer, "observation": f"{item['content'][0]['text']}: {left} left"}


def test_a_server_in_the_style_of_gymnasium_pays_each_turn(folder, serve):
    row = {"responses_create_params": PARAMS, "steps": 4}
    url = serve(Steps())
    row = nemo(url, row, folder=folder, arguments=", gymnasium=True")
    call = ToolCall("increment", {"by": 1})
    begun, said, called, ended, paid = folder.play("Mine", row, ["a", [call, call], "b", "c"])
    assert begun.observation == "4 left"
    assert (said.observation, said.turn_reward) == ("a: 3 left", 0.25)
    assert [result.content for result in called.results] == ["counted"] * 2
    assert called.turn_reward == 0.5 and not called.ended
    assert (ended.ended, ended.turn_reward, paid.reward) == (True, 0.25, 0.0)

    row = nemo(url, row["nemo_gym"], folder=folder)
    failure = str(folder.play("Mine", row, [])[0].failure)
    assert "status 404" in failure and "gymnasium=True" in failure
