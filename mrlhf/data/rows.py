"""Reads jsonl, parquet and text files into rows that know the file and line they came from.

Equal rows are read alike from jsonl and parquet: as JSON has them, and objects without their null
entries, since parquet gives each object the keys of all rows. A text file has a prompt a line. It
knows file formats. It does not know what a column means, nor what tokens are.
"""

from __future__ import annotations

import codecs
import difflib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from mrlhf.errors import DataError

logger = logging.getLogger(__name__)

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Row:
    """One row of a data file."""

    fields: dict[str, Any]  # by column
    file: Path
    number: int  # the line in a jsonl or text file or the row in a parquet file, counted from 1

    @property
    def where(self) -> str:
        """`file:number`, for messages."""
        return f"{self.file}:{self.number}"

    def require(self, name: str) -> Any:
        """The value of column `name`; DataError if it is missing or null."""
        value = self.fields.get(name)
        if value is not None:
            return value

        if name in self.fields:
            raise DataError(f"{self.where}: {name!r} is null; give a value, or remove the row")
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
    """All rows of `files`, in order; DataError if one is missing, empty, unknown or malformed."""
    if not files:
        raise DataError("no data files were given; name at least one .jsonl or .parquet file")
    return [row for file in files for row in _read_file(Path(file))]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write `rows` as jsonl and return how many there were."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")
    return len(lines)


def of_rows(count: int, rows: Sequence[Row]) -> str:
    """`count` as a number and a share of `rows`, with the files that they come from."""
    files = sorted({str(row.file) for row in rows})
    shown = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more files"
    return f"{count} of {len(rows)} rows ({count / len(rows):.1%}) of {shown}"


def warn_of_dropped(what: str, count: int, rows: Sequence[Row], most: int) -> None:
    """Warn that rows are left out because their `what` are longer than `most` tokens."""
    if count:
        logger.warning(
            "dropped %s, whose %s have more than %d tokens", of_rows(count, rows), what, most
        )


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


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, by their numbers."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        text = _decode(line, f"{path}:{number}")
        if text.strip():
            yield number, text


def _read_text(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """A prompt from each line that is not blank."""
    for number, text in _read_lines(path):
        yield number, {"prompt": text.removesuffix("\r")}


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in _read_lines(path):
        where = f"{path}:{number}"
        try:
            fields = _without_nulls(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not a JSON object a line: {error}") from error
        if not isinstance(fields, dict):
            raise DataError(
                f"{where}: each line must be a JSON object, found {type(fields).__name__}"
            )

        if _SURROGATE_ESCAPE.search(text):
            _check_text(fields, where)
        yield number, fields


def _decode(line: bytes, where: str) -> str:
    """The text of a line; a byte order mark before it is left out."""
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{where}: the file is UTF-16; save it as UTF-8")
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: byte {error.start + 1} of the line is not UTF-8 ({error.reason}); save the "
            "file as UTF-8"
        ) from None


def _check_text(fields: dict[str, Any], where: str) -> None:
    """Refuse strings that are not valid text, since nothing can encode them."""
    for column, value in fields.items():
        try:
            json.dumps({column: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])[1:-1]
            raise DataError(
                f"{where}: {column!a} holds {half}, which is half of a character (a lone "
                "surrogate) and cannot be encoded; remove it, or write the whole character"
            ) from None


def _read_parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a readable parquet file: {' '.join(str(error).split())}"
        ) from error
    try:
        rows = table.to_pylist(maps_as_pydicts="strict")
    except (ValueError, OverflowError, KeyError):
        raise DataError(_find_bad_value(path, table)) from None
    kinds = {field.name: field.type for field in table.schema}
    for number, fields in enumerate(rows, start=1):
        yield number, {name: _as_json(value, kinds[name]) for name, value in fields.items()}


def _as_json(value: Any, kind: pyarrow.DataType) -> Any:
    """A value of a parquet file as a JSON file of the same rows has it; bytes stay bytes."""
    kind = getattr(kind, "storage_type", kind)  # of an extension
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if item is not None}
        if pyarrow.types.is_map(kind):
            return {str(key): _as_json(item, kind.item_type) for key, item in kept.items()}
        return {key: _as_json(item, kind.field(key).type) for key, item in kept.items()}
    if isinstance(value, list):
        return [_as_json(item, kind.value_type) for item in value]

    if pyarrow.types.is_float16(kind) or pyarrow.types.is_float32(kind):
        # 0.1 and not 0.10000000149011612
        return None if value is None else float(str(kind.to_pandas_dtype()(value)))
    if isinstance(value, Decimal):
        if value == int(value):
            return int(value)
        number = float(value)
        return number if Decimal(repr(number)) == value else format(value, "f").rstrip("0")
    return value if value is None or isinstance(value, (str, int, float, bytes)) else str(value)


def _without_nulls(value: Any, is_row: bool = True) -> Any:
    """A value of JSON without the null entries of objects, except those of the row itself."""
    if isinstance(value, dict):
        kept = {key: _without_nulls(item, False) for key, item in value.items()}
        return kept if is_row else {k: item for k, item in kept.items() if item is not None}
    return [_without_nulls(item, False) for item in value] if isinstance(value, list) else value


def _find_bad_value(path: Path, table: pyarrow.Table) -> str:
    """Name the value of a table that Python cannot hold, such as a string that is not UTF-8."""
    for number in range(len(table)):
        for column in table.column_names:
            try:
                table[column][number].as_py(maps_as_pydicts="strict")
            except (ValueError, OverflowError, KeyError) as error:
                return (
                    f"{path}:{number + 1}: cannot read {column!r}: {' '.join(str(error).split())}; "
                    "write the file anew, with text as UTF-8"
                )
    raise AssertionError(f"{path}: the table cannot be read, but each of its values can")


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".txt": _read_text}
