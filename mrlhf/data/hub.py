"""Takes the files of a repository of the Hugging Face Hub, from the local cache or by a download.

The cache, the token, the mirror, time limits and offline mode are those of huggingface_hub, by its
environment variables. This file does not know which keys name repositories.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)

from mrlhf.data.hub_files import read_object
from mrlhf.errors import ConfigError

_REPOSITORY = r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^\s:@]+))?"
_MODEL = re.compile(_REPOSITORY)
_SNAPSHOT = re.compile(r"/(models|datasets)--([^/]+)/snapshots/([0-9a-f]{40})(/|$)")
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt")  # configuration, tokenizer and template
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


def local_directory(
    name: str, *, weights: bool = True, begun: str = "", from_cache: bool = False
) -> str:
    """The directory of a model, adapter or tokenizer; what is `name` itself is taken first.

    Else `org/name` or `org/name@revision` is taken from the cache or downloaded. A `name` of
    another form is returned as it is.

    Args:
        weights: whether weights are needed too: of safetensors alone, and each tensor once.
        begun: the directory with which a run began; of the same repository, its commit is taken
            again unless `name` has a revision.
        from_cache: take what the cache holds, and ask nobody.

    Raises:
        ConfigError: the repository cannot be had; one line that begins with `name`.
    """
    match = _MODEL.fullmatch(name)
    if match is None or os.path.lexists(name):
        return name
    repo = match["repo"]
    revision = match["revision"] or commit_of(begun, repo) or constants.DEFAULT_REVISION
    folder = _take(name, "model", repo, revision, _SMALL, from_cache)
    if weights:
        files = [*_WEIGHTS]
        if (folder / _INDEX).is_file():
            shards = read_object(folder / _INDEX, ConfigError).get("weight_map")
            files += sorted({str(file) for file in shards.values()} if shards else ())
        _take(name, "model", repo, folder.name, files, from_cache)
    return str(folder)


def repository_of(path: str) -> tuple[str, str] | None:
    """The repository and the commit of a path in the cache; None if it is not of the cache."""
    match = _SNAPSHOT.search(path)
    return match and (match[2].replace("--", "/", 1), match[3])


def commit_of(path: str, repo: str) -> str | None:
    """The commit of `path`, if it is of `repo` in the cache."""
    found = repository_of(path)
    return found[1] if found is not None and found[0] == repo else None


def _take(
    name: str, kind: str, repo: str, revision: str, files: Sequence[str], from_cache: bool
) -> Path:
    """The snapshot with those `files` of a repository that it has, at the top if with a `*`."""
    hooks = get_session().event_hooks["request"]
    if _bound not in hooks:
        hooks.append(_bound)
    try:
        place = snapshot_download(
            repo,
            repo_type=kind,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=["*/*"] if files is _SMALL else None,
            local_files_only=from_cache,
        )
    except Exception as error:  # of many types, which differ between versions of its packages
        reason = _reason(error, kind, repo, revision)
        raise ConfigError(f"{name} does not exist here, and {reason}") from error
    return Path(place)


def _bound(request: Any) -> None:
    """Bound the wait for an answer: the library asks what a repository holds without a limit."""
    limits = request.extensions.get("timeout", {})
    for part in ("connect", "read", "write", "pool"):
        if limits.get(part) is None:
            limits[part] = constants.HF_HUB_DOWNLOAD_TIMEOUT
    request.extensions["timeout"] = limits


def _reason(error: Exception, kind: str, repo: str, revision: str) -> str:
    """Why a repository cannot be had, and the remedy."""
    url = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    response = getattr(error, "response", None)
    code = None if response is None else response.status_code
    if isinstance(error, RevisionNotFoundError):
        return f"{url} has no revision {revision}; name a branch, a tag or a commit after the @"
    if isinstance(error, GatedRepoError) or code in (401, 403):
        return (
            f"{url} is private, gated or not there (answer {code}); correct the name, or accept "
            "the licence on that page and set HF_TOKEN to a token of yours"
        )
    if code == 404:
        return f"{url} is not there either (answer 404); correct the name, or name a directory"

    fetch = f"hf download {repo}{' --repo-type dataset' if kind == 'dataset' else ''}"
    if constants.HF_HUB_OFFLINE:
        return (
            f"{constants.HF_HUB_CACHE} does not hold all of {repo} ({revision}), and "
            f"HF_HUB_OFFLINE forbids a download; run '{fetch}' where there is a network"
        )
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
    text = " ".join(str(cause or error).split())
    what = f"{type(cause or error).__name__}: {text}"[:300]
    where = "" if isinstance(error, HfHubHTTPError) and code else " (is there a network here?)"
    return (
        f"{url} was not downloaded: {what}{where}; start again, which goes on, or run '{fetch}' "
        "where there is a network, and copy the cache or name a directory"
    )
