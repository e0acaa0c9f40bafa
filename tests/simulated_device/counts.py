"""Counts what a simulated device does: kernels, copies and waits, by the line that asks for them.

It knows neither tensors nor torch.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

Line = tuple[str, str]
"""What was done, and the line of code that did it."""

_OWN = "/tests/simulated_device/"
_ROOTS = ("/mrlhf/", "/megatron/", "/tests/", "/benchmarks/")


@dataclass
class Counts:
    """What has been done since some moment.

    Attributes:
        kernels: by operator and line, without those that were captured or replayed.
        copies: between host and device; "unpinned" ones stop the host until they are staged.
        waits: of the host for the device.
        synchronized: calls of `torch.cuda.synchronize`, by line.
        captures: graphs captured.
        replays: graphs replayed.
        replayed: kernels of the replayed graphs.
    """

    kernels: Counter[Line] = field(default_factory=Counter)
    copies: Counter[Line] = field(default_factory=Counter)
    waits: Counter[Line] = field(default_factory=Counter)
    synchronized: Counter[Line] = field(default_factory=Counter)
    captures: int = 0
    replays: int = 0
    replayed: int = 0

    def copy(self) -> Counts:
        """The counts as they are now."""
        return Counts(**{item.name: _copy(getattr(self, item.name)) for item in fields(self)})

    def __sub__(self, before: Counts) -> Counts:
        """What was done after `before`."""
        names = [item.name for item in fields(self)]
        return Counts(**{name: getattr(self, name) - getattr(before, name) for name in names})

    def __add__(self, other: Counts) -> Counts:
        names = [item.name for item in fields(self)]
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def launched(self) -> int:
        """Kernels that the host launched one by one."""
        return self.kernels.total()

    @property
    def unpinned(self) -> int:
        """Copies from or to memory that is not pinned."""
        return sum(count for (kind, _), count in self.copies.items() if "unpinned" in kind)

    @property
    def stops(self) -> int:
        """How often the host stood still: waits, and calls of `synchronize`."""
        return self.waits.total() + self.synchronized.total()

    def totals(self) -> dict[str, int]:
        """The sums, for a table."""
        return {
            "kernels": self.launched,
            "replayed kernels": self.replayed,
            "waits": self.waits.total(),
            "synchronized": self.synchronized.total(),
            "unpinned copies": self.unpinned,
        }

    def operators(self) -> Counter[str]:
        """Kernels by operator."""
        return _sums(self.kernels)

    def describe(self, most: int = 8) -> str:
        """The commonest lines of each kind, for the message of a test that fails."""
        parts = []
        for name in ("waits", "synchronized", "copies", "kernels"):
            counter: Counter[Line] = getattr(self, name)
            rows = [f"  {count} {kind} at {at}" for (kind, at), count in counter.most_common(most)]
            parts.append("\n".join([f"{name}: {counter.total()}", *rows]))
        return "\n".join(parts)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, Counter) else value


def _sums(counter: Counter[Line]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for (kind, _), count in counter.items():
        sums[kind] += count
    return sums


def place(beside: str = "") -> str:
    """The innermost line that belongs neither to torch, the simulated device nor `beside`."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_ours = file not in ("", beside) and _OWN not in file and not file.startswith("<")
        if is_ours and "/torch/" not in file:
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _short(file: str) -> str:
    for root in _ROOTS:
        if root in file:
            return root[1:] + file.rsplit(root, 1)[1]
    return file
