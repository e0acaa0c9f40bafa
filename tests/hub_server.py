"""A hub of models and datasets on this machine, which speaks what huggingface_hub asks.

It answers what a repository is, which files it holds and what is in them. As the real one does, it
sends large files from another address after a redirect, in parts where a part is asked for.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".parquet", ".bin")


@dataclass
class Hub:
    """The repositories, by their kind and name, and what was asked."""

    address: str = ""
    # Of each repository its commits by revision, and the files of a commit.
    revisions: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)  # repositories that need the token "good"
    silent: set[str] = field(default_factory=set)  # what never gets an answer: words of a path
    broken: dict[str, int] = field(default_factory=dict)  # by name, how often a file breaks off
    gets: Counter[str] = field(default_factory=Counter)  # whole or partial files that were sent
    asked: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def add(
        self, name: str, files: Mapping[str, bytes], kind: str = "models", revision: str = "main"
    ) -> str:
        """Put files into a repository; returns the commit, to which the revision then points."""
        digest = hashlib.sha1(name.encode())
        for path, content in sorted(files.items()):
            digest.update(path.encode() + content)
        commit = digest.hexdigest()
        repository = f"{kind}/{name}"
        self.revisions.setdefault(repository, {}).update({revision: commit, commit: commit})
        self.files[repository, commit] = dict(files)
        return commit


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files of a folder, by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that serves until the end of the block."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        hub = self.hub
        hub.asked.append(f"{self.command} {path}")
        if any(words in path for words in hub.silent):
            hub.ended.wait()
            return
        if path.startswith("large/"):
            _, repository_kind, owner, name, commit, *file = path.split("/")
            self._send_file(f"{repository_kind}/{owner}/{name}", commit, "/".join(file))
            return
        parts = path.removeprefix("api/").split("/")
        if not path.startswith("api/") and parts[0] != "datasets":
            parts = ["models", *parts]
        if len(parts) < 5 or parts[0] not in ("models", "datasets"):
            self._refuse(404, "")
            return

        repository = "/".join(parts[:3])
        what = parts[3]
        revision = parts[4]
        if repository not in hub.revisions:
            self._refuse(404, "RepoNotFound")
        elif repository in hub.gated and self.headers.get("Authorization") != "Bearer good":
            self._refuse(401, "GatedRepo")
        elif revision not in hub.revisions[repository]:
            self._refuse(404, "RevisionNotFound")
        else:
            commit = hub.revisions[repository][revision]
            self._send(repository, commit, what, "/".join(parts[5:]))

    def _send(self, repository: str, commit: str, what: str, file: str) -> None:
        files = self.hub.files[repository, commit]
        name = repository.partition("/")[2]
        if what == "revision":
            siblings = [{"rfilename": path} for path in files]
            self._send_json({"_id": "1", "id": name, "sha": commit, "siblings": siblings})
        elif what == "tree":
            self._send_json([_entry(path, content) for path, content in files.items()])
        elif what == "resolve" and file not in files:
            self._refuse(404, "EntryNotFound")
        elif what == "resolve" and file.endswith(LARGE):
            content = files[file]
            headers = {
                "Location": f"{self.hub.address}/large/{repository}/{commit}/{file}",
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
            }
            self._head(302, commit, headers, 0)
        else:
            self._send_file(repository, commit, file)

    def _send_file(self, repository: str, commit: str, file: str) -> None:
        content = self.hub.files[repository, commit][file]
        status = 200
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        begin = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0]
        if int(begin):
            status = 206
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            content = content[int(begin) :]
        self._head(status, commit, headers, len(content))
        if self.command == "HEAD":
            return

        self.hub.gets[file] += 1
        if self.hub.broken.get(file, 0) > 0:
            self.hub.broken[file] -= 1
            content = content[: len(content) // 2]
            self.close_connection = True
        self.wfile.write(content)

    def _send_json(self, value: Any) -> None:
        text = json.dumps(value).encode()
        self._head(200, "", {"Content-Type": "application/json"}, len(text))
        self.wfile.write(text)

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, "", {"X-Error-Code": code, "X-Error-Message": "refused"}, 0)

    def _head(self, status: int, commit: str, headers: Mapping[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in {**headers, "X-Repo-Commit": commit}.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content)}
    entry["oid"] = hashlib.sha1(content).hexdigest()
    if path.endswith(LARGE):
        oid = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 134}
    return entry
