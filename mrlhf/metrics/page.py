"""The page of all metrics, `docs/metrics.md`, written from the table."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import fill

from mrlhf.metrics.metric import SAME, Metric
from mrlhf.metrics.table import CHAPTERS, COLUMNS, TABLE

_INTRODUCTION = """\
# Metrics

Every number of a line of `metrics.jsonl`. This page is written by
`python tools/write_configuration_page.py`; edit the rows in `mrlhf/metrics/` instead.

- Means are over the tokens or responses of the whole batch, so that a number does not depend on the
  layout. Where there is nothing to count, it is `null`; where it was not measured, it is missing.
- `{a,b}` in a name stands for either. `<...>` stands for any text.
- "reduced" says how the numbers of tokens, responses or ranks become one: "as named" means as the
  end of the name says, "one number" that there is one for the whole step, and "main rank" that the
  main rank measures it.
- "healthy" is where the number stands in a run that goes well. An
  [alarm](troubleshooting.md) is raised when it stands elsewhere, some of them when it does so for
  several steps.
- "verl" is the name there: "same", another name, or none.
"""
_WORDS = {"named": "as named", "whole": "one number", "main": "main rank"}


def metrics_page() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION]
    for chapter in CHAPTERS:
        parts.append(f"## {chapter.title}\n")
        if chapter.text:
            parts.append(f"{_filled(chapter.text)}\n")
        parts.append(_table(("metric", "reduced", "unit", "meaning", "healthy", "verl")))
        parts += [_line(_cells(row)) for row in chapter.rows]
        parts.append("")

    parts.append("## On the console and in the picture\n")
    parts.append("The console shows these numbers of a step, as far as it has them:\n")
    parts.append(_table(("column", "metric")))
    parts += [_line((label, f"`{name}`")) for label, name in COLUMNS]
    drawn = ", ".join(f"`{row.name}`" for row in TABLE if row.curve)
    parts.append("\n" + _filled(f"`curves.png` shows all of held-out rows, and {drawn}.") + "\n")
    return "\n".join(parts)


def _filled(text: str) -> str:
    return fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _table(titles: Iterable[str]) -> str:
    titles = list(titles)
    return f"{_line(titles)}\n|{'---|' * len(titles)}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cells(row: Metric) -> tuple[str, ...]:
    how = _WORDS.get(row.how, row.how)
    reduced = f"{how} over {row.over}" if row.over else how
    verl = "same" if row.verl == SAME else f"`{row.verl}`" if row.verl else "—"
    return f"`{row.name}`", reduced, row.unit, row.meaning, _healthy(row), verl


def _healthy(row: Metric) -> str:
    bounds = (("above", row.above), ("below", row.below))
    return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
