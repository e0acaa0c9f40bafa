"""The page of all metrics, `docs/metrics.md`, written from the table."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import fill

from mrlhf.metrics.metric import SAME, Metric
from mrlhf.metrics.table import CHAPTERS, COLUMNS, TABLE

_INTRODUCTION = """\
# Metrics

Every number of a line of `metrics.jsonl`: in brackets its unit and how it is reduced, then what it
means, and where it stands in a healthy run. `python tools/write_configuration_page.py` writes this
page from the rows in `mrlhf/metrics/`.

- Means are over the whole batch, whatever the layout. A number is `null` where there is nothing to
  count, and missing where it was not measured.
- `{a,b}` in a name stands for either, `<...>` for any text. Metrics with \\* are not in verl; the
  others have the same name there, or that in "meaning".
- "named": reduced as the end of the name says; "main rank": measured there; nothing: one number for
  the step.
- Outside the healthy range, for some after several steps, an [alarm](operations.md#alarms) comes.
"""


def metrics_page() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION]
    for chapter in CHAPTERS:
        parts.append(f"## {chapter.title}\n")
        if chapter.text:
            parts.append(f"{_filled(chapter.text)}\n")
        parts += [_entry(row) for row in chapter.rows]
        parts.append("")

    parts.append("## On the console and in the picture\n")
    parts.append("The console shows of a step:\n")
    parts.append(_table(("column", "metric")))
    parts += [_line((label, f"`{name}`")) for label, name in COLUMNS]
    drawn = ", ".join(f"`{row.name}`" for row in TABLE if row.curve)
    parts.append("\n" + _filled(f"`curves.png` shows all held-out rows, and {drawn}.") + "\n")
    return "\n".join(parts)


def _filled(text: str) -> str:
    return fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _table(titles: Iterable[str]) -> str:
    titles = list(titles)
    return f"{_line(titles)}\n|{'---|' * len(titles)}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _entry(row: Metric) -> str:
    name = f"`{row.name}`" if row.verl else f"`{row.name}`\\*"
    how = {"whole": "", "main": "main rank"}.get(row.how, row.how)
    of = "; ".join(text for text in (row.unit, f"{how}, {row.over}" if row.over else how) if text)
    verl = f"; verl: `{row.verl}`" if row.verl not in (None, SAME) else ""
    healthy = f"; healthy {bounds}" if (bounds := _healthy(row)) else ""
    return f"- {name} ({of}): {row.meaning}{verl}{healthy}"


def _healthy(row: Metric) -> str:
    bounds = (("above", row.above), ("below", row.below))
    return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
