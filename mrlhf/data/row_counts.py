"""Says how many rows of which files something concerns, in the words that all data files share.

It does not know what stands in a row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mrlhf.data.rows import Row

__all__ = ["of_rows", "warn_of_dropped"]

logger = logging.getLogger(__name__)


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
