"""Makes a resources server of NeMo-Gym an environment for `rollout.environment`.

The server runs beside the trainer, started as NeMo-Gym starts it. This file speaks to it over HTTP
as NeMo-Gym's own agents do, and needs no package of NeMo-Gym. A server of tools is asked for
`/seed_session`, for each call for the tool's own path, and in the end for `/verify`; one in the
style of Gymnasium for `/reset` and for `/step` after each turn. A file of yours beside this one
names the server and its data:

    from nemo_gym_adapter import adapt, write_rows

    DATA = "resources_servers/example_session_state_mgmt/data/example.jsonl"
    Counter = adapt("http://127.0.0.1:8000", DATA)

    if __name__ == "__main__":
        write_rows(DATA, "runs/counter/train.jsonl")
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

from tool_methods import tool_method

COLUMN = "nemo_gym"  # of a row of the data: the row of NeMo-Gym's data
TIMEOUT_S = 600.0  # rollout.tool_timeout_s ends a call earlier
Item = dict[str, Any]


def adapt(url: str, data: str | Path, *, gymnasium: bool = False) -> type:
    """A class for `rollout.environment`.

    Args:
        url: of the resources server.
        data: NeMo-Gym's data, whose rows name the tools.
        gymnasium: whether the server has /reset and /step.

    Raises:
        ValueError: the rows cannot be trained on; the message says why.
    """
    rows = _read(data)
    tools = rows[0]["responses_create_params"].get("tools") or []
    for number, row in enumerate(rows, start=1):
        if (row["responses_create_params"].get("tools") or []) != tools:
            raise ValueError(
                f"row {number} of {data} has other tools than the first; write rows with the same "
                "tools into one file, and name an environment for each file by data_source"
            )
    kind = _GymnasiumEpisode if gymnasium else _ToolsEpisode
    methods: dict[str, Any] = {"_url": url.rstrip("/"), "_tools": tools}
    for tool in tools:
        if tool.get("type") != "function":
            raise ValueError(f"{data} has a tool of type {tool.get('type')}; only functions run")
        name = tool["name"]
        schema = tool.get("parameters") or {}
        methods[name] = tool_method(name, tool.get("description") or "", schema, kind._run)
    return type("NeMoGym", (kind,), methods)


def write_rows(data: str | Path, path: str | Path) -> None:
    """Write NeMo-Gym's data as data for `data.train_files`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", encoding="utf-8") as file:
        for row in _read(data):
            file.write(json.dumps({"prompt": _prompt(row), COLUMN: row}) + "\n")


class _Episode:
    """A session with the server, and the items of the response as it grows."""

    _url: str
    _tools: list[Item]
    done = False

    def _open(self, row: dict[str, Any], path: str) -> dict[str, Any]:
        """Begin the session."""
        if COLUMN not in row:
            raise ValueError(f"the row has no column {COLUMN}; write the data with write_rows")
        self._row = row[COLUMN]
        self._items: list[Item] = []
        # The cookie of the session is all that tells the server one episode from another.
        cookies = urllib.request.HTTPCookieProcessor()
        self._opener = urllib.request.build_opener(cookies, urllib.request.ProxyHandler({}))
        return self._ask(path, self._row)

    def _post(self, path: str, body: Any) -> tuple[int, str]:
        """Status and text of an answer."""
        request = urllib.request.Request(
            f"{self._url}/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except urllib.error.URLError as error:
            raise ConnectionError(f"no server answers at {self._url}: {error.reason}") from None

    def _ask(self, path: str, body: Any) -> dict[str, Any]:
        """What the server answers; RuntimeError if it refuses."""
        status, text = self._post(path, body)
        if status >= 400:
            hint = ""
            if path in ("seed_session", "reset") and status == 404:
                hint = "; adapt needs gymnasium=True for servers with /reset and /step alone"
            raise RuntimeError(f"/{path} answered with status {status}: {text[:200]}{hint}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _response(self, items: list[Item]) -> Item:
        """Items as the response of a model."""
        params = self._row["responses_create_params"]
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": time.time(),
            "model": "policy",
            "status": "completed",
            "output": items,
            "parallel_tool_calls": params.get("parallel_tool_calls", True),
            "tool_choice": params.get("tool_choice", "auto"),
            "tools": self._tools,
        }


class _ToolsEpisode(_Episode):
    """An episode with a server of tools, which scores the whole of it."""

    def reset(self, row: dict[str, Any]) -> None:
        """Seed the session."""
        if self._open(row, "seed_session").get("mcp") and not self._tools:
            raise ValueError(
                "the server offers its tools by MCP alone; name them in responses_create_params"
            )

    def reply(self, text: str) -> None:
        """Keep the turn without calls that ends an episode."""
        self._items.append(_message(text))

    def reward(self) -> dict[str, float]:
        """Have the server verify the response; further numbers that it names stand beside."""
        body = self._row | {"response": self._response(self._items)}
        verdict = self._ask("verify", body)
        if verdict.get("mask_sample"):
            raise RuntimeError(f"the server masks the sample: {verdict.get('failure_reason')}")
        numbers = {
            key: float(value)
            for key, value in verdict.items()
            if isinstance(value, (int, float)) and key not in {*self._row, "mask_sample"}
        }
        score = numbers.pop("reward")
        return {**numbers, "score": score}

    def _run(self, name: str, arguments: dict[str, Any]) -> str:
        """Post a call to the path of its tool; an error of the server is an answer too."""
        call = _call(name, arguments)
        _, text = self._post(name, arguments)
        self._items += [call, _output(call["call_id"], text)]
        return text


class _GymnasiumEpisode(_Episode):
    """An episode with a server in the style of Gymnasium, which pays each turn."""

    def reset(self, row: dict[str, Any]) -> str | None:
        """Reset the environment."""
        self._earned = 0.0
        return self._open(row, "reset").get("observation") or None

    def reply(self, text: str) -> str | None:
        """Take a step with a turn without calls."""
        observation = self._step(_message(text)).get("observation")
        if not self.done and not observation:
            raise ValueError("the server goes on after a turn, but says nothing to go on with")
        return None if self.done else observation

    def turn_reward(self) -> float:
        """What the steps of the turn have earned."""
        earned = self._earned
        self._earned = 0.0
        return earned

    def reward(self) -> float:
        """Turns have been paid for already."""
        return 0.0

    def _run(self, name: str, arguments: dict[str, Any]) -> str:
        """Take a step with one call."""
        if self.done:
            return "The episode is over."
        answer = self._step(_call(name, arguments))
        told = [output["output"] for output in answer.get("info", {}).get("tool_outputs", [])]
        observation = answer.get("observation")
        return "\n\n".join(told + ([observation] if observation else []))

    def _step(self, item: Item) -> dict[str, Any]:
        answer = self._ask("step", self._row | {"response": self._response([item])})
        self._earned += answer.get("reward", 0.0)
        self.done = bool(answer.get("terminated") or answer.get("truncated"))
        return answer


def _read(data: str | Path) -> list[dict[str, Any]]:
    lines = Path(data).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    if not rows:
        raise ValueError(f"{data} has no rows")
    return rows


def _prompt(row: dict[str, Any]) -> list[dict[str, str]]:
    """The input of a row as chat messages; ValueError if it has more than messages of text."""
    params = row["responses_create_params"]
    items = params["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if params.get("instructions"):
        items = [{"role": "system", "content": params["instructions"]}, *items]
    messages = []
    for item in items:
        parts = item.get("content")
        if isinstance(parts, str):
            parts = [{"type": "input_text", "text": parts}]
        if item.get("type", "message") != "message" or any("text" not in part for part in parts):
            raise ValueError("an input has calls, images or sounds; only messages of text train")
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": "".join(part["text"] for part in parts)})
    return messages


def _message(text: str) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    own = {"type": "message", "role": "assistant", "status": "completed"}
    return {**own, "id": f"msg_{uuid.uuid4().hex}", "content": content}


def _call(name: str, arguments: dict[str, Any]) -> Item:
    number = f"call_{uuid.uuid4().hex}"
    return {
        "type": "function_call",
        "id": number,
        "call_id": number,
        "name": name,
        "arguments": json.dumps(arguments),
        "status": "completed",
    }


def _output(call_id: str, text: str) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": text}
