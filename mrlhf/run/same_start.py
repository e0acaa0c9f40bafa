"""Makes sure that all ranks were started alike, before anything is built.

Each node may read a copy of its own of the configuration, the code and the data. Every rank shows
one short hash in the job's store, and rank 0 compares; only ranks that differ say more. This file
does not know what a key means.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from mrlhf.checkpoint.frozen import hash_of
from mrlhf.config.roots import Root
from mrlhf.config.tree import flatten
from mrlhf.errors import ConfigError
from mrlhf.parallel.job import Launch, connect, meet, wait_for
from mrlhf.weights.stored import ADAPTER_WEIGHTS

_CODE = (".py", ".cpp", ".h")
_MODEL = (".json", ".jinja", ".model", ".txt", ".safetensors")
_SHOWN_KEYS = 3
_SHOWN_CHARACTERS = 120
_ALIKE = "alike"


def describe_start(config: Root, inputs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The facts that all ranks must share, by name; `inputs` are keys and paths of files."""
    facts = {"the program": type(config).__name__}
    facts |= {name: _shortened(repr(value)) for name, value in flatten(config).items()}
    facts["the code of mrlhf"] = _code()
    facts["torch"] = str(torch.__version__)
    for key, path in inputs:
        name = f"the content of {key}"
        number = 2
        while name in facts:
            name = f"the content of {key}, file {number}"
            number += 1
        facts[name] = _content(Path(path))
    return facts


def require_same_start(
    launch: Launch,
    facts: Mapping[str, str],
    timeout_s: float,
    look: Callable[[], None],
    to_all: Callable[[], str] = str,
) -> tuple[dist.Store | None, str]:
    """Refuse ranks that differ in `facts` (see `describe_start`); every rank calls it.

    Args:
        timeout_s: longest wait for the other ranks, seconds.
        look: called again and again while this process waits for the others; it may raise.
        to_all: what rank 0 tells the others.

    Returns:
        On rank 0 the connection, which it must keep while others may still read; else None. And
        what rank 0 tells.

    Raises:
        ConfigError: on every rank, naming what differs and the ranks.
        HangError: another process does not come in time.
    """
    connection = connect(timeout_s)
    store = meet(connection, launch, timeout_s, look)
    rank = launch.rank

    def wait(keys: Sequence[str]) -> list[str]:
        wait_for(store, keys, launch, timeout_s, look)
        return [value.decode() for value in store.multi_get(list(keys))]

    text = json.dumps(facts)
    mine = xxhash.xxh3_128(text.encode()).hexdigest()
    hashes = [f"start of rank {other}" for other in range(launch.world_size)]
    store.set(hashes[rank], mine)
    if rank > 0:
        [first, wanted] = wait([hashes[0], "facts of rank 0"])
        if first != mine:
            store.set(f"differences of rank {rank}", json.dumps(differences(wanted, facts)))
        [verdict] = wait(["verdict"])
    else:
        differing = [other for other, value in enumerate(wait(hashes)) if value != mine]
        store.set("facts of rank 0", text if differing else _ALIKE)
        told = wait([f"differences of rank {other}" for other in differing]) if differing else []
        verdict = describe_differences(dict(zip(differing, told, strict=True)))
        verdict = verdict or _ALIKE + to_all()
        store.set("verdict", verdict)

    if not verdict.startswith(_ALIKE):
        raise ConfigError(verdict)
    return connection if rank == 0 else None, verdict.removeprefix(_ALIKE)


def differences(first: str, own: Mapping[str, str]) -> list[str]:
    """The differences in words between rank 0's facts, as JSON, and those of another rank."""
    wanted: dict[str, str] = json.loads(first)
    names = [*wanted, *(name for name in own if name not in wanted)]
    return [
        f"{name} is {wanted.get(name, 'not there')} on rank 0 and {own.get(name, 'not there')} on"
        for name in names
        if wanted.get(name) != own.get(name)
    ]


def describe_differences(told: Mapping[int, str]) -> str:
    """One line about the ranks that differ, from their `differences`; empty if none does."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in told.items():
        for difference in json.loads(text):
            ranks_of.setdefault(difference, []).append(rank)
    if not ranks_of:
        return ""

    lines = [f"{difference} {_ranks(ranks)}" for difference, ranks in ranks_of.items()]
    more = len(lines) - _SHOWN_KEYS
    shown = "; ".join(lines[:_SHOWN_KEYS]) + (f"; and {more} more differences" if more > 0 else "")
    return (
        f"the ranks were not started alike: {shown}; give every node the same files, code and "
        "command"
    )


def _ranks(ranks: Sequence[int]) -> str:
    """The ranks in words, consecutive ones as a range."""
    spans = []
    for _, numbered in groupby(enumerate(ranks), key=lambda item: item[1] - item[0]):
        span = [rank for _, rank in numbered]
        spans.append(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"


def _code() -> str:
    """A short hash of the sources of this package."""
    package = Path(__file__).parents[1]
    digest = xxhash.xxh3_64()
    for file in sorted(file for file in package.rglob("*") if file.suffix in _CODE):
        digest.update(file.relative_to(package).as_posix().encode())
        digest.update(file.read_bytes())
    return f"version {digest.hexdigest()}"


def _content(path: Path) -> str:
    """Size and a short hash of a file, or of the model, adapter or tokenizer in a directory."""
    files = [path]
    digest = xxhash.xxh3_64()
    nbytes = 0

    try:
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in _MODEL)
        for file in files:
            if not file.is_file():
                return "missing"
            size = file.stat().st_size
            nbytes += size
            digest.update(f"{file.name} {size} ".encode() if path.is_dir() else b"")
            # Every rank reads the weights of an adapter; of a model, one rank for its replicas.
            if file.suffix != ".safetensors" or file.name == ADAPTER_WEIGHTS:
                digest.update(hash_of(file).encode())
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return f"{nbytes} bytes with the hash {digest.hexdigest()}"


def _shortened(text: str) -> str:
    """A long `text` without its middle, which a hash replaces."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}...{text[-half:]} (hash {xxhash.xxh3_64(text.encode()).hexdigest()})"
