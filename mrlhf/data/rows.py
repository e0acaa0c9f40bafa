"""Reads jsonl and parquet files into rows that know the file and line they came from.

It knows file formats. It does not know what a column means, nor what tokens are.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from mrlhf.errors import DataError

__all__ = ["Row", "read_rows", "write_rows"]


@dataclass(frozen=True)
class Row:
    """One row of a data file.

    Attributes:
        fields: the row's columns.
        file: the file it was read from.
        number: the line in a jsonl file or the row in a parquet file, counted from 1.
    """

    fields: dict[str, Any]
    file: Path
    number: int

    @property
    def where(self) -> str:
        """`file:number`, for messages."""
        return f"{self.file}:{self.number}"

    def require(self, name: str) -> Any:
        """The value of column `name`; DataError if it is missing or null."""
        value = self.fields.get(name)
        if value is not None:
            return value

        near = difflib.get_close_matches(name, self.fields, n=1)
        if near and near[0] != name:
            hint = f"did you mean {near[0]!r}?"
        else:
            hint = f"the row has {sorted(self.fields)}"
        raise DataError(f"{self.where}: no value for {name!r}; {hint}")

    def text(self, name: str) -> str:
        """The string in column `name`; DataError if it is missing or not a string."""
        value = self.require(name)
        if not isinstance(value, str):
            raise DataError(
                f"{self.where}: {name!r} must be a string, found {type(value).__name__}"
            )
        return value


def read_rows(files: Sequence[str | Path]) -> list[Row]:
    """All rows of `files`, one file after another.

    Raises:
        DataError: a file is missing, empty, of an unknown kind or malformed.
    """
    if not files:
        raise DataError("no data files were given; name at least one .jsonl or .parquet file")
    return [row for file in files for row in _read_file(Path(file))]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write `rows` as jsonl and return how many there were."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    return len(lines)


def _read_file(path: Path) -> list[Row]:
    if not path.is_file():
        raise DataError(
            f"data file {path} does not exist; check the path (relative to the working directory)"
        )
    if path.suffix not in _READERS:
        raise DataError(
            f"{path}: cannot read {path.suffix or 'a file without a suffix'}; "
            f"use {' or '.join(_READERS)}"
        )

    rows = [Row(fields, path, number) for number, fields in _READERS[path.suffix](path)]
    if not rows:
        raise DataError(f"data file {path} has no rows")
    return rows


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not a JSON object a line: {error}") from error
        if not isinstance(fields, dict):
            raise DataError(
                f"{path}:{number}: each line must be a JSON object, found {type(fields).__name__}"
            )
        yield number, fields


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a readable parquet file: {' '.join(str(error).split())}"
        ) from error
    yield from enumerate(table.to_pylist(), start=1)


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
