"""Makes a resources server of NeMo-Gym a rollout function.

The server runs beside the trainer, started as NeMo-Gym starts it. This file speaks to it over HTTP
as NeMo-Gym's own agents do, and needs no package of NeMo-Gym. A server of tools is asked for
`/seed_session`, for each call for the tool's own path, and in the end for `/verify`; one in the
style of Gymnasium for `/reset` and for `/step` after each turn. A file of yours beside this one
names the server:

    from nemo_gym_adapter import adapt, write_rows

    counter = adapt("http://127.0.0.1:8000")

    if __name__ == "__main__":
        data = "resources_servers/example_session_state_mgmt/data/example.jsonl"
        write_rows(data, "runs/counter/train.jsonl")
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from chats import Chats, plain

COLUMN = "nemo_gym"  # of a row of the data: the row of NeMo-Gym's data
TIMEOUT_S = 600.0  # rollout.tool_timeout_s ends a call earlier
Item = dict[str, Any]


def adapt(url: str, *, gymnasium: bool = False) -> Callable[..., Any]:
    """A function for `rollout.environment`; `gymnasium` if the server has /reset and /step."""

    async def rollout(engine: Any, row: dict[str, Any], sampling: Any) -> list[Any]:
        if COLUMN not in row:
            raise ValueError(f"the row has no column {COLUMN}; write the data with write_rows")
        chats = Chats(engine)
        session = (_Gymnasium if gymnasium else _Tools)(url, row[COLUMN])
        messages = _messages(row[COLUMN]) + session.begin()
        with suppress(engine.NoRoom):  # the server scores what was said
            told = messages
            while told:
                said, reason = await chats.answer(messages, session.tools)
                told = session.answer(said, reason)
                messages = [*messages, said, *told]
        trajectories = chats.trajectories
        trajectories[-1].reward = session.reward()
        trajectories[-1].turn_rewards = session.paid
        return trajectories

    return rollout


def write_rows(data: str | Path, path: str | Path) -> None:
    """Write NeMo-Gym's data as data for `data.train_files`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", encoding="utf-8") as file:
        for line in Path(data).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            file.write(json.dumps({"prompt": plain(_messages(row)), COLUMN: row}) + "\n")


class _Session:
    """A session with the server."""

    def __init__(self, url: str, row: Item) -> None:
        self._url = url.rstrip("/")
        self._row = row
        self.paid: list[float] = []  # for each turn, if the server pays turns
        self.tools = row["responses_create_params"].get("tools") or []
        if any(tool.get("type") != "function" for tool in self.tools):
            raise ValueError("the row has a tool that is no function; only functions run here")
        # The cookie of the session is all that tells the server one episode from another.
        cookies = urllib.request.HTTPCookieProcessor()
        self._opener = urllib.request.build_opener(cookies, urllib.request.ProxyHandler({}))

    def _post(self, path: str, body: Any) -> tuple[int, str]:
        """Status and text of an answer."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except urllib.error.URLError as error:
            raise ConnectionError(f"no server answers at {self._url}: {error.reason}") from None

    def _ask(self, path: str, items: list[Item] | None = None) -> Item:
        """What the server answers to the row, and to items of a response if there are any."""
        body = self._row
        if items is not None:
            params = body["responses_create_params"]
            response = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "model": "policy"}
            response |= {"created_at": time.time(), "status": "completed", "output": items}
            response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": self.tools}
            body = {
                **body,
                "response": {**response, **{k: params[k] for k in response if k in params}},
            }
        status, text = self._post(path, body)
        if status >= 400:
            hint = "; adapt needs gymnasium=True for servers with /reset and /step alone"
            hint = hint if (path, status) == ("seed_session", 404) else ""
            raise RuntimeError(f"/{path} answered with status {status}: {text[:200]}{hint}")
        answer: Item = json.loads(text)
        return answer


class _Tools(_Session):
    """With a server of tools, which scores the whole response."""

    def begin(self) -> list[Item]:
        self._items: list[Item] = []
        if self._ask("seed_session").get("mcp") and not self.tools:
            raise ValueError(
                "the server offers its tools by MCP alone; name them in responses_create_params"
            )
        return []

    def answer(self, said: Item, reason: str) -> list[Item]:
        """Post each call to the path of its tool; an error of the server is an answer, too."""
        self._items += _items(said)
        told = []
        for call in said.get("tool_calls", ()) if reason == "tool_calls" else ():
            _, text = self._post(call["name"], json.loads(call["arguments"]))
            output = {"type": "function_call_output", "call_id": call["id"], "output": text}
            self._items.append(output)
            told.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return told

    def reward(self) -> dict[str, float]:
        """Have the server verify the response; further numbers that it names stand beside."""
        verdict = self._ask("verify", self._items)
        if verdict.get("mask_sample"):
            raise RuntimeError(f"the server masks the sample: {verdict.get('failure_reason')}")
        numbers = {
            key: float(value)
            for key, value in verdict.items()
            if isinstance(value, (int, float)) and key not in {*self._row, "mask_sample"}
        }
        score = numbers.pop("reward")
        return {**numbers, "score": score}


class _Gymnasium(_Session):
    """With a server in the style of Gymnasium, which pays each turn."""

    def begin(self) -> list[Item]:
        return _observed(self._ask("reset"))

    def answer(self, said: Item, reason: str) -> list[Item]:
        step = self._ask("step", _items(said))
        self.paid.append(step.get("reward", 0.0))
        if step.get("terminated") or step.get("truncated"):
            return []
        told = [
            {"role": "tool", "tool_call_id": output["call_id"], "content": output["output"]}
            for output in step.get("info", {}).get("tool_outputs", [])
        ] + _observed(step)
        if not told:
            raise ValueError("the server goes on after a turn, but says nothing to go on with")
        return told

    def reward(self) -> None:
        """Turns have been paid."""


def _observed(answer: Item) -> list[Item]:
    said = answer.get("observation")
    return [{"role": "user", "content": said}] if said else []


def _items(said: Item) -> list[Item]:
    """A turn as items of a response: its text, if it has any, and its calls."""
    content = [{"type": "output_text", "text": said["content"], "annotations": []}]
    items: list[Item] = []
    if said["content"] or "tool_calls" not in said:
        about = {"id": f"msg_{uuid.uuid4().hex}", "status": "completed", "content": content}
        items.append({"type": "message", "role": "assistant", **about})
    for call in said.get("tool_calls", ()):
        items.append(
            {"type": "function_call", "call_id": call["id"], "status": "completed", **call}
        )
    return items


def _messages(row: Item) -> list[Item]:
    """The input of a row as chat messages."""
    params = row["responses_create_params"]
    items = params["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages: list[Item] = []
    if params.get("instructions"):
        messages.append({"role": "system", "content": params["instructions"]})
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": item["content"]})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append(
                {"id": item["call_id"], **{key: item[key] for key in ("name", "arguments")}}
            )
        elif kind == "function_call_output":
            told = {"tool_call_id": item["call_id"], "content": item["output"]}
            messages.append({"role": "tool", **told})
    return messages  # thoughts are left out
