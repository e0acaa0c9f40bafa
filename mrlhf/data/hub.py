"""Takes files of a repository of the Hugging Face Hub, from the local cache or by a download.

Cache, token, mirror, time limits and offline mode are those of huggingface_hub, by its environment
variables. This file does not know which keys name repositories.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_session, snapshot_download
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import disable_progress_bars

from mrlhf.data.hub_files import read_object
from mrlhf.errors import ConfigError

_NAME = r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^\s:@]+))?"
_SNAPSHOT = re.compile(r"s--([^/]+)/snapshots/([0-9a-f]{40})\b")
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt")  # configuration, tokenizer and template
_INDEX = "model.safetensors.index.json"


def local_directory(
    name: str, *, weights: bool = True, begun: str = "", from_cache: bool = False
) -> str:
    """The directory of a model, adapter or tokenizer that is `name`, or `org/name[@revision]`.

    A `name` that exists here, or has another form, is returned as it is. A ConfigError, one line
    that begins with `name`, says that the repository cannot be had.

    Args:
        weights: whether they are needed too: safetensors alone, each tensor once.
        begun: the directory with which a run began; without a revision, its commit is taken again.
        from_cache: whether the cache holds all, so that the Hub need not be asked.
    """
    match = re.fullmatch(_NAME, name)
    if match is None or os.path.lexists(name):
        return name
    folder = _take(match, _revision(match, begun), "model", _SMALL, from_cache)
    if weights:
        files = {"model.safetensors", "adapter_model.safetensors"}
        if (folder / _INDEX).is_file():
            shards = read_object(folder / _INDEX, ConfigError).get("weight_map")
            files |= set(map(str, shards.values())) if isinstance(shards, dict) else set()
        _take(match, folder.name, "model", sorted(files), from_cache)
    return str(folder)


def base_of_adapter(stated: Mapping[str, Any]) -> str:
    """The directory of the model that an `adapter_config.json` names, if it names one."""
    name = str(stated.get("base_model_name_or_path") or "(none)")
    if stated.get("revision") and not Path(name).is_dir():
        name += f"@{stated['revision']}"
    return local_directory(name)


def local_files(name: str, *, begun: str = "", from_cache: bool = False) -> list[str]:
    """The files of a dataset's `org/name[@revision]:split`, `:config/split` or `:file`.

    Its README may say which they are; else their names do. See `local_directory` for the rest.
    """
    match = re.fullmatch(_NAME + r":(?P<split>[\w./-]+)", name)
    if match is None or os.path.lexists(name):
        return [name]
    folder = _take(match, _revision(match, begun), "dataset", ["README.md"], from_cache)
    present = [file.relative_to(folder).as_posix() for file in folder.rglob("*")]
    with suppress(Exception):  # what cannot be listed now must be whole in the cache
        if not from_cache:
            api = HfApi()
            present = api.list_repo_files(match["repo"], repo_type="dataset", revision=folder.name)
    readable = sorted(file for file in present if file.endswith((".jsonl", ".parquet")))
    card: dict[str, Any] | None = None
    with suppress(Exception):  # there is none, or its head is no YAML
        card = metadata_load(folder / "README.md")
    files = _of_split(readable, (card or {}).get("configs"), match["split"])

    places = {f"{Path(file).parent}/*{Path(file).suffix}" for file in files}
    of = re.search(r"-of-(\d+)", files[0]) if files else None
    if len(places) != 1 or (of is not None and int(of[1]) != len(files)):
        raise ConfigError(
            f"{name} names {len(files)} files ({', '.join(sorted(places)) or 'none'}), not those "
            f"of one split; of jsonl and parquet the repository has {', '.join(readable[:8])}...; "
            f"write {match['repo']}:CONFIG/SPLIT or {match['repo']}:FILE"
        )
    _take(match, folder.name, "dataset", files, from_cache)
    return [str(folder / file) for file in files]


def repository_of(path: str) -> tuple[str, str] | None:
    """The repository and the commit of a path in the cache; None of another path."""
    match = _SNAPSHOT.search(path)
    return match and (match[1].replace("--", "/"), match[2])


def _of_split(files: Sequence[str], configs: Any, wanted: str) -> list[str]:
    """The files of a split, as the README's `configs` or the names of files tell."""
    part, _, split = wanted.rpartition("/")
    patterns = [wanted]
    for config in configs if isinstance(configs, list) else ():
        is_meant = isinstance(config, dict) and part in ("", config.get("config_name"))
        given = config.get("data_files") if is_meant else None
        for entry in given if isinstance(given, list) else ():
            if isinstance(entry, dict) and entry.get("split") == split:
                paths = entry.get("path", [])
                patterns += [paths] if isinstance(paths, str) else paths
    stated = [file for file in files if any(fnmatch(file, pattern) for pattern in patterns)]
    folder = re.escape(f"{part}/") if part else ""
    called = re.compile(rf"{folder}(.*[/.-])?{re.escape(split)}([/.-]|_?\d).*")
    return stated or [file for file in files if called.fullmatch(file)]


def _revision(match: re.Match[str], begun: str) -> str | None:
    before = repository_of(begun)
    again = before[1] if before is not None and before[0] == match["repo"] else None
    return match["revision"] or again


def _take(
    match: re.Match[str], revision: str | None, kind: str, files: Sequence[str], from_cache: bool
) -> Path:
    """The snapshot with those `files` of a repository that are there."""
    hooks = get_session().event_hooks["request"]
    if _bound not in hooks:
        hooks.append(_bound)
    if not sys.stderr.isatty():
        disable_progress_bars()

    try:
        place = snapshot_download(
            match["repo"],
            repo_type=kind,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=["*/*"] if files is _SMALL else None,
            local_files_only=from_cache,
        )
    except Exception as error:  # of many types, which differ between versions of its packages
        reason = _reason(error, match["repo"], revision)
        raise ConfigError(f"{match[0]} does not exist here, and {reason}") from error
    return Path(place)


def _bound(request: Any) -> None:
    """Bound each wait for an answer, since the library also asks without a limit."""
    most = max(constants.HF_HUB_DOWNLOAD_TIMEOUT, constants.HF_HUB_ETAG_TIMEOUT)
    limits = request.extensions["timeout"]
    limits |= {part: min(limit or most, most) for part, limit in limits.items()}


def _reason(error: Exception, repo: str, revision: str | None) -> str:
    """Why a repository cannot be had, and the remedy."""
    place = f"{repo} of {constants.ENDPOINT}"
    code = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, RevisionNotFoundError):
        return f"{place} has no revision {revision}; name a branch, tag or commit after @"
    if code in (401, 403):
        return (
            f"{place} is gated, private or not there (answer {code}); correct the name, or accept "
            "its licence on its page and set HF_TOKEN to a token of yours"
        )
    if code == 404:
        return f"there is no {place} (answer 404); name a directory, or a repository as org/name"

    cause = error.__cause__ or error
    text = f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:300]
    return (
        f"{place} was not downloaded, and is not whole in {constants.HF_HUB_CACHE}: {text}; start "
        "again, which goes on, or fill the cache where there is a network ('hf download')"
    )
