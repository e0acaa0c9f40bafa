"""The findings of a check, and how they are shown; this file makes no check."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from mrlhf.errors import MrlhfError

Level = Literal["ok", "look", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line: `broken` stops a run, and `look` may be meant."""

    level: Level
    subject: str  # what was looked at
    seen: str
    advice: str = ""  # what to do; empty if nothing


def ok(subject: str, seen: str) -> Finding:
    """A finding that asks for nothing."""
    return Finding("ok", subject, seen)


def look(subject: str, seen: str, advice: str = "") -> Finding:
    """A finding that may be meant."""
    return Finding("look", subject, seen, advice)


def broken(subject: str, seen: str, advice: str = "") -> Finding:
    """A finding that stops a run."""
    return Finding("broken", subject, seen, advice)


def judged(is_good: bool, subject: str, seen: str, advice: str) -> Finding:
    """`ok`, or else `look` with the advice."""
    return ok(subject, seen) if is_good else look(subject, seen, advice)


def examine(subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check, with what it warns of and what it refuses.

    A warning of mrlhf is a `look`, a refusal is `broken`, a line each; so is any other error, since
    it would end a run as well.
    """
    found: list[Finding] = []
    with _warnings() as warnings:
        try:
            found += check()
        except MrlhfError as error:
            found += [broken(subject, line) for line in str(error).splitlines()]
        except Exception as error:
            found.append(broken(subject, f"{type(error).__name__}: {error}"))
    return [look(subject, warning) for warning in warnings] + found


def in_words(groups: Iterable[tuple[str, list[Finding]]]) -> str:
    """Return the findings of each group, a line each, and in the end how many there are."""
    lines = []
    every: list[Finding] = []
    for title, findings in groups:
        if not findings:
            continue
        lines += [title, *(line for finding in findings for line in _lines(finding)), ""]
        every += findings
    counts = {level: sum(f.level == level for f in every) for level in ("ok", "look", "broken")}
    lines.append(", ".join(f"{count} {level}" for level, count in counts.items()))
    return "\n".join(lines)


def _lines(finding: Finding) -> Iterator[str]:
    yield f"  {finding.level:<7} {finding.subject}: {finding.seen}"
    if finding.advice:
        yield f"          {finding.advice}"


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect mrlhf's warnings, which are shown nowhere else in the body of the `with`."""
    messages: list[str] = []

    class WarningCollector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger = logging.getLogger("mrlhf")
    collector = WarningCollector(logging.WARNING)
    logger.addHandler(collector)
    propagates = logger.propagate
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagates
