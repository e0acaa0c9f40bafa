"""Warns of rows that a run would see twice. It does not know what a row is for."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterable, Sequence

logger = logging.getLogger(__name__)


def warn_of_files_named_twice(key: str, files: Sequence[str]) -> None:
    """Warn if `key` names a file twice, by its name, a link or another path."""
    first_as: dict[tuple[int, int], str] = {}
    for file in files:
        status = os.stat(file)
        identity = (status.st_dev, status.st_ino)
        first = first_as.get(identity)
        if first is None:
            first_as[identity] = file
            continue
        other = "" if first == file else f", also as {file}"
        logger.warning("%s names %s twice%s; its rows count double", key, first, other)


def warn_of_shared_rows(
    key: str, rows: Sequence[Hashable], other_key: str, others: Iterable[Hashable]
) -> None:
    """Warn if held-out rows (files of `key`) are in other data (files of `other_key`) too.

    A warning alone: a small set may be trained and validated on, to see whether it can be learned
    by heart. A row is the part that the model is given, in a form that is equal for equal rows.
    """
    known = set(others)
    shared = sum(row in known for row in rows)
    if shared:
        logger.warning(
            "%d of %d rows of %s are in %s too; they do not show what the model does with new rows",
            shared,
            len(rows),
            key,
            other_key,
        )
