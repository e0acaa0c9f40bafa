"""A small server that speaks OpenAI's protocol, and judges by a rule of the test."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

Reply = str | bytes | tuple[int, dict[str, str]] | float
"""A text that is the judge's answer; the bytes of a body; a status with headers; or the seconds
that each byte of an answer takes."""


class JudgeServer:
    """Remembers what it was asked."""

    def __init__(self, rule: Callable[[str, int], Reply], address: str) -> None:
        self.rule = rule  # from the message and the number of the request to the reply
        self.address = address
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models_status = 200
        self._lock = Lock()

    def take(self, body: Mapping[str, Any], key: str | None) -> Reply:
        """The reply to a request."""
        with self._lock:
            self.asked.append(dict(body))
            self.keys.append(key)
            number = len(self.asked)
        return self.rule(body["messages"][0]["content"], number)


def completion(texts: list[str]) -> bytes:
    """A chat completion of these answers."""
    choices = [{"message": {"role": "assistant", "content": text}} for text in texts]
    usage = {"prompt_tokens": 7, "completion_tokens": 3 * len(texts)}
    return json.dumps({"choices": choices, "usage": usage}).encode()


@contextmanager
def judge_server(rule: Callable[[str, int], Reply]) -> Iterator[JudgeServer]:
    """A server at a port that the kernel chooses."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(server.models_status, {}, b'{"data": []}')

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = server.take(body, self.headers["Authorization"])
            if isinstance(reply, tuple):
                self._send(*reply, b"not now")
            elif isinstance(reply, float):
                self.send_response(200)
                self.end_headers()
                for byte in completion(["Rating: 1"]):
                    time.sleep(reply)
                    self.wfile.write(bytes([byte]))
            else:
                n = body.get("n", 1)
                is_text = isinstance(reply, str)
                self._send(200, {}, completion([reply] * n) if is_text else reply)

        def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def handle(self) -> None:
            with suppress(OSError):  # whoever asked may have left
                super().handle()

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = JudgeServer(rule, f"http://127.0.0.1:{http.server_port}/v1")
    thread = Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
