"""The table of docs/memory.md is that of the preflight."""

from __future__ import annotations

from tests.sizing import PAGE, TABLE, table


def test_the_table_is_up_to_date() -> None:
    found = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == table(), "run python -m tests.sizing"
