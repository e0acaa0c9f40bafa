"""A judge behind an OpenAI-compatible address: requests, tries, and answers that are kept.

This is the one file that speaks HTTP with a judge. It does not know what a message means.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from mrlhf.config.reward import JudgeSection
from mrlhf.errors import ConfigError, RewardError
from mrlhf.rewards.interface import RewardInput, Scored
from mrlhf.rewards.judge import Judge

_BUSY = (408, 425, 429, 500, 502, 503, 504)
_COUNTS = ("prompt_tokens", "completion_tokens")


class ChatJudge:
    """Asks a server, and keeps answers under what was asked, so that none is paid for twice."""

    def __init__(self, section: JudgeSection) -> None:
        """Ask nothing yet; ConfigError if a key cannot be used."""
        self.rows_at_once = section.requests_at_once
        self._section = section
        self._judge = Judge(section)
        self._headers = {"Content-Type": "application/json"}
        variable = section.api_key_variable
        if variable is not None:
            key = os.environ.get(variable, "").strip()
            if not (key and key.isascii() and key.isprintable()):
                raise ConfigError(f"judge.api_key_variable {variable} is not set to a key")
            self._headers["Authorization"] = f"Bearer {key}"
        self._answers: dict[str, list[Any]] = {}  # texts, and two counts, by what was asked
        self._file: Path | None = None
        self._writing = Lock()

    def reach(self) -> None:
        """Ask the server for its models; ConfigError if it does not answer, or refuses the key."""
        try:
            self._request("/models")
        except (OSError, HTTPException) as error:
            # A server need not list its models.
            if not isinstance(error, HTTPError) or error.code in (401, 403):
                raise ConfigError(
                    f"judge.address {self._section.address} cannot be used ({error}); start the "
                    "server, or correct the address or the API key"
                ) from None

    def keep_answers(self, file: Path) -> None:
        """Take the answers of all files beside `file`, and at last its own; write others there."""
        self._file = file
        for each in [*sorted(file.parent.glob("*.jsonl")), *([file] if file.exists() else [])]:
            for line in each.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):  # the last line of a job that was killed
                    self._answers |= json.loads(line)

    def score(self, inputs: Sequence[RewardInput]) -> list[Scored]:
        """The score of each response, and the tokens; RewardError if one gets no answer."""
        bodies = [self._body(self._judge.message(row)) for row in inputs]
        keys = [
            hashlib.sha256((self._section.address or "").encode() + body).hexdigest()
            for body in bodies
        ]
        asked = dict(zip(keys, bodies, strict=True))
        fresh = {key: asked[key] for key in asked if key not in self._answers}
        with ThreadPoolExecutor(self.rows_at_once) as threads:
            list(threads.map(self._ask, fresh, fresh.values()))

        scored = []
        for key, row in zip(keys, inputs, strict=True):
            texts, *counts = self._answers[key]
            result = self._judge.read(texts, row)
            is_paid = fresh.pop(key, None) is not None
            result.further["cache_hits"] = float(not is_paid)
            result.further.update(zip(_COUNTS, (count * is_paid for count in counts), strict=True))
            scored.append(result)
        return scored

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _body(self, message: str) -> bytes:
        """The request for all answers to a message."""
        section = self._section
        body = {
            "model": section.model,
            "messages": [{"role": "user", "content": message}],
            "temperature": section.temperature,
            "max_tokens": section.max_tokens,
        }
        return json.dumps(body if section.n == 1 else body | {"n": section.n}).encode()

    def _ask(self, key: str, body: bytes) -> None:
        """Ask until there are answers, and keep them; RewardError if no try succeeds."""
        section = self._section
        raw = b""
        for number in range(section.retries + 1):
            wait_s = 0.5 * 2**number
            try:
                raw = self._request("/chat/completions", body)
                reply = json.loads(raw)
                texts = [reply["choices"][vote]["message"]["content"] for vote in range(section.n)]
                usage = reply.get("usage") or {}
                counts = [float(usage.get(name) or 0) for name in _COUNTS]
                return self._keep(key, [[str(text or "") for text in texts], *counts])
            except HTTPError as error:
                problem = str(error)
                with suppress(OSError, HTTPException):
                    problem += f": {error.read(200)!r}"
                if error.code not in _BUSY:
                    break
                asked = error.headers.get("Retry-After", "")
                wait_s = float(asked) if asked.isdecimal() else wait_s
            except (OSError, HTTPException) as error:
                problem = str(error)
            except (ValueError, TypeError, LookupError, AttributeError):
                problem = f"{section.n} chat completions are not in {raw[:200]!r}"
            if number < section.retries:
                time.sleep(min(wait_s, section.timeout_s))
        raise RewardError(
            f"judge.address {section.address} gave no answer in {number + 1} tries, and at last "
            f"{problem}; look at the server, or raise judge.retries or judge.timeout_s"
        )

    def _request(self, path: str, body: bytes | None = None) -> bytes:
        """The server's reply, or as much as came in time."""
        address = (self._section.address or "").rstrip("/") + path
        until = time.monotonic() + self._section.timeout_s
        request = Request(address, body)
        for name, value in self._headers.items():
            request.add_unredirected_header(name, value)  # the key is for this server alone
        with urlopen(request, timeout=self._section.timeout_s) as reply:
            parts = iter(partial(reply.read1, 1 << 16), b"")
            return b"".join(takewhile(lambda _: time.monotonic() < until, parts))

    def _keep(self, key: str, answer: list[Any]) -> None:
        with self._writing:
            self._answers[key] = answer
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a", encoding="utf-8") as file:
                    file.write("\n" + json.dumps({key: answer}))  # after a line left unfinished
