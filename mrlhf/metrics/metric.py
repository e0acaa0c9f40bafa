"""The description of one metric, or of several whose names follow one pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Literal

# How the numbers of tokens, responses or ranks become one number: "named": the end of the name says
# it; "whole": there is one number for the whole step; "main": the main rank measures it.
Reduction = Literal["mean", "sum", "max", "min", "named", "whole", "main"]

SAME = "same"  # verl has this name, too


@dataclass(frozen=True)
class Metric:
    """A row of the table."""

    name: str  # `{a,b}` stands for either; `<...>` for any text
    how: Reduction
    over: str  # what it is reduced over, in the plural; empty if `how` says all
    unit: str
    meaning: str
    above: float | None = None  # a healthy run stays above this
    below: float | None = None  # a healthy run stays below this
    label: str | None = None  # its name on the console; None: it is not shown there
    curve: bool = False  # whether the picture of the run's curves shows it
    verl: str | None = None  # its name in verl, `SAME`, or None where verl has no such metric

    @property
    def names(self) -> list[str]:
        """The name for each choice of `{a,b}`; `<...>` stays."""
        parts = re.split(r"\{(.*?)\}", self.name)
        choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
        return ["".join(chosen) for chosen in product(*choices)]

    def describes(self, name: str) -> bool:
        """Whether this is the row of the metric `name`."""
        return any(re.fullmatch(_pattern(own), name) for own in self.names)


class Chapter:
    """Rows that belong together, in the order in which they are shown.

    `text` says, as Markdown, what holds for all of them; it may be empty.
    """

    def __init__(self, title: str, text: str, *rows: Metric) -> None:
        self.title = title
        self.text = text
        self.rows = rows


def _pattern(name: str) -> str:
    """A regular expression in which each `<...>` matches any text."""
    return ".+".join(re.escape(part) for part in re.split(r"<.*?>", name))
