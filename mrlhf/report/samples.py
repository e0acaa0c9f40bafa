"""Packs the rollouts of a run for the page: an index of all samples, and blocks with the contents.

A block is compressed and written as base64, and the page opens it when needed. Blocks of texts
serve the search, and each sample has a block with the numbers of its tokens. This file does not
know how the page shows them.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mrlhf.batch import NO_VERSION
from mrlhf.data.sample_table import EPISODES, SampleTable, read_samples

TEXTS_IN_BLOCK = 256
_COLUMNS = ("step", "uid", "sample", "data_source", "score", "length", "finish_reason")
Floats = NDArray[np.float32]


@dataclass
class PackedSamples:
    """The samples of a run, packed for the page; blocks are base64."""

    # The index; one entry a sample. `block` and `place` say where its tokens are: the number of the
    # block, and where in it the sample's part begins and ends.
    columns: dict[str, list[Any]] = field(default_factory=dict)
    # The names of the numbers that tokens have, in the order in which they are stored.
    quantities: list[str] = field(default_factory=list)
    token_blocks: list[str] = field(default_factory=list)  # the samples of a step
    # Prompts and responses of up to `TEXTS_IN_BLOCK` samples.
    text_blocks: list[str] = field(default_factory=list)
    left_out: int = 0  # the number of samples that did not fit


def pack_samples(dumps: Mapping[int, Path], most: int) -> PackedSamples:
    """Read and pack the rollouts of a run, whose files are `dumps`, by step.

    At most `most` samples are packed. Every step gives equally many: the first ones of its file.

    Raises:
        DataError: a file is damaged.
    """
    names = (*_COLUMNS, "turns", "errors", "block", "begin", "end")
    packed = PackedSamples(columns={name: [] for name in names})
    steps = _spread(sorted(dumps), most)
    each = most // len(steps) if steps else 0
    texts: list[list[str]] = []

    for step in steps:
        table = read_samples(dumps[step])
        count = min(len(table), each)
        packed.left_out += len(table) - count
        for name in _COLUMNS:
            packed.columns[name] += [plain(value) for value in table.texts[name][:count]]
        nothing = [None] * count
        turns = map(len, table.texts["turns"][:count]) if table.has_episodes else nothing
        packed.columns["turns"] += turns
        packed.columns["errors"] += table.texts.get("errors", nothing)[:count]
        texts += [
            list(pair) for pair in zip(table.texts["prompt"], table.texts["response"], strict=True)
        ][:count]
        _pack_tokens(packed, table, count)

    for begin in range(0, len(texts), TEXTS_IN_BLOCK):
        packed.text_blocks.append(_block(_json(texts[begin : begin + TEXTS_IN_BLOCK])))
    return packed


def _spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the steps, evenly spread; the last step is always among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[-1 - math.floor(i * len(steps) / most)] for i in reversed(range(most))]


def _pack_tokens(packed: PackedSamples, table: SampleTable, count: int) -> None:
    """Add one block with the tokens of the first `count` samples of a step."""
    quantities = dict(_quantities(table.tokens))
    for name in quantities:
        if name not in packed.quantities:
            packed.quantities.append(name)

    parts: list[str] = []
    length = 0
    begins = table.begins
    for row in range(count):
        where = slice(begins[row], begins[row + 1])
        numbers = {name: column[where] for name, column in quantities.items()}
        part = _block(_sample(table, row, where, numbers))
        packed.columns["block"].append(len(packed.token_blocks))
        packed.columns["begin"].append(length)
        packed.columns["end"].append(length + len(part))
        parts.append(part)
        length += len(part)
    packed.token_blocks.append("".join(parts))


def _quantities(tokens: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, Floats]]:
    """The numbers that can be shown for each token, if they were measured."""
    old = tokens["old_logprob"]
    yield "advantage", tokens["advantage"]
    yield "reward", tokens["reward"]
    if "placed" in tokens:
        yield "placed by reward terms", tokens["placed"]
    if "ref_logprob" in tokens:
        yield "KL to reference", old - tokens["ref_logprob"]
    if "new_logprob" in tokens:
        yield "ratio after update", np.exp(tokens["new_logprob"] - old)

    difference = old - tokens["rollout_logprob"]
    if "version" in tokens:  # the engine has no log-probability of what the policy did not draw
        difference = np.where(tokens["version"] == NO_VERSION, np.float32(np.nan), difference)
    yield "trainer - engine", difference

    if "value" in tokens:
        yield "value", tokens["value"]
    if "entropy" in tokens:
        yield "entropy", tokens["entropy"]
    yield "log-probability", old
    if "weight" in tokens:
        yield "correction weight", tokens["weight"]
    yield "loss mask", tokens["loss_mask"].astype(np.float32)


def _sample(table: SampleTable, row: int, where: slice, numbers: Mapping[str, Floats]) -> bytes:
    """One sample: a line of JSON, then for each quantity the high and the low bytes of its numbers.

    Numbers are float16 in units that the JSON names, such that the largest is about 1. All high
    bytes are stored first, then all low bytes, since that compresses better.
    """
    units = {}
    planes = []
    for name, column in numbers.items():
        largest = float(np.max(np.abs(column), initial=0.0, where=np.isfinite(column)))
        unit = 2.0 ** math.ceil(math.log2(largest)) if largest > 0 else 1.0
        units[name] = unit
        halves = (column.astype(np.float64) / unit).astype("<f2")
        low_and_high = halves.view(np.uint8).reshape(-1, 2).T
        planes += [low_and_high[1].tobytes(), low_and_high[0].tobytes()]

    head = {
        "prompt": table.texts["prompt"][row],
        "answer": table.texts["ground_truth"][row],
        "terms": {name: plain(score) for name, score in table.texts["terms"][row]},
        "tokens": table.texts["response_tokens"][row],
        "ids": table.tokens["response_ids"][where].tolist(),
        "units": units,
    }
    if "version" in table.tokens:
        head["versions"] = table.tokens["version"][where].tolist()
    if table.has_episodes:
        episode = {name: plain(table.texts[name][row]) for name in EPISODES}
        head["episode"] = episode | {"tools": dict(episode["tools"])}
    return _json(head) + b"\n" + b"".join(planes)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _block(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode("ascii")


def plain(value: Any) -> Any:
    """The value in a form that JSON can hold, numbers with six digits."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
