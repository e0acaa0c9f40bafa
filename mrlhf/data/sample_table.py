"""The parquet file of a rollout: a row for each sample, with lists of its tokens' numbers.

It knows the file's format and its columns. It does not know where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from mrlhf.errors import DataError

# The columns that every file has, beside those of tokens.
TEXTS = {
    "step": pyarrow.int32(),
    "uid": pyarrow.int64(),
    "sample": pyarrow.int32(),
    "data_source": pyarrow.string(),
    "prompt": pyarrow.string(),
    "response": pyarrow.string(),
    "ground_truth": pyarrow.string(),
    "finish_reason": pyarrow.string(),
    "length": pyarrow.int32(),
    "score": pyarrow.float32(),
    "terms": pyarrow.map_(pyarrow.string(), pyarrow.float32()),
    "prompt_ids": pyarrow.list_(pyarrow.int32()),
    "response_tokens": pyarrow.list_(pyarrow.string()),
}
# The columns that a file also has if its responses are episodes, named as in `Episode`.
EPISODES = {
    "turn_begins": pyarrow.list_(pyarrow.int32()),
    "turns": pyarrow.list_(pyarrow.int32()),
    "turn_rewards": pyarrow.list_(pyarrow.float32()),
    "tools": pyarrow.map_(pyarrow.string(), pyarrow.int32()),
    "errors": pyarrow.int32(),
    "failure": pyarrow.string(),
    "waited_s": pyarrow.float32(),
    "context_begins": pyarrow.list_(pyarrow.int32()),
    "context_prompts": pyarrow.list_(pyarrow.int32()),
    "context_roles": pyarrow.list_(pyarrow.string()),
}
# The columns with a number for each token of the response. A file has those that were measured.
TOKEN_TYPES = {
    "response_ids": pyarrow.int32(),
    "version": pyarrow.int32(),
    "loss_mask": pyarrow.bool_(),
    "advantage": pyarrow.float32(),
    "return": pyarrow.float32(),
    "reward": pyarrow.float32(),
    "placed": pyarrow.float32(),
    "value": pyarrow.float32(),
    "old_logprob": pyarrow.float32(),
    "new_logprob": pyarrow.float32(),
    "rollout_logprob": pyarrow.float32(),
    "ref_logprob": pyarrow.float32(),
    "entropy": pyarrow.float32(),
    "weight": pyarrow.float32(),
}


@dataclass(frozen=True)
class SampleTable:
    """Samples of one step."""

    # The columns of `TEXTS`, and those of `EPISODES` or none of them, by name; one entry a sample.
    texts: Mapping[str, Sequence[Any]]
    # The columns of `TOKEN_TYPES` that are there, by name; the tokens of all samples, one sample
    # after the other.
    tokens: Mapping[str, NDArray[Any]]

    def __post_init__(self) -> None:
        known = (TEXTS.keys(), (TEXTS | EPISODES).keys())
        assert self.texts.keys() in known, f"columns {sorted(self.texts)}"
        total = sum(self.texts["length"])
        for name, column in self.tokens.items():
            assert len(column) == total, f"{len(column)} numbers in {name} for {total} tokens"

    def __len__(self) -> int:
        return len(self.texts["length"])

    @property
    def has_episodes(self) -> bool:
        """Whether the columns of episodes are there."""
        return EPISODES.keys() <= self.texts.keys()

    @property
    def begins(self) -> list[int]:
        """The first token of each sample, and the end of the last."""
        return list(accumulate(map(int, self.texts["length"]), initial=0))


def write_samples(path: Path, table: SampleTable) -> None:
    """Write `table` as a parquet file."""
    columns = {
        name: pyarrow.array(list(table.texts[name]), type=kind)
        for name, kind in (TEXTS | EPISODES).items()
        if name in table.texts
    }
    offsets = pyarrow.array(table.begins, type=pyarrow.int32())
    for name, numbers in table.tokens.items():
        flat = pyarrow.array(numbers, type=TOKEN_TYPES[name])
        columns[name] = pyarrow.ListArray.from_arrays(offsets, flat)

    with written_whole(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary, compression="zstd")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file that takes the place of `path` after the body; if the body fails, nothing is left."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_samples(path: Path) -> SampleTable:
    """The table that `write_samples` wrote; DataError if the file is unreadable or another."""
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a readable parquet file: {' '.join(str(error).split())}; remove it"
        ) from error

    names = set(table.column_names)
    missing = sorted(TEXTS.keys() - names)
    if missing:
        raise DataError(
            f"{path} is no rollout of this program: it has no column {missing[0]!r}; remove it"
        )
    kinds = TEXTS | EPISODES if EPISODES.keys() <= names else TEXTS
    texts = {name: table[name].to_pylist() for name in kinds}
    tokens = {
        name: table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        for name in TOKEN_TYPES
        if name in names
    }
    return SampleTable(texts, tokens)
