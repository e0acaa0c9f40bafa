"""Which source, a file or the command line, gave each key its value.

A key that has no effect is a mistake where the same source also says why it has none. Where another
source does, such as a method's file that is laid over a base, the key is left out and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrlhf.config.compare import leaves
from mrlhf.config.unread import Unread, in_yaml


class Sources:
    """The sources that were read so far, in order."""

    def __init__(self) -> None:
        """No source was read yet."""
        self._labels: list[str] = []
        self._of: dict[str, int] = {}  # the number of the last source that has the key
        self._left_out: dict[tuple[str, str], list[str]] = {}  # by source and reason

    def add(self, label: str, raw: Mapping[str, Any]) -> None:
        """Take note of the keys of the next source.

        Args:
            label: what the source is called.
            raw: its sections, with shorthands expanded.
        """
        for key, _ in leaves(raw):
            self._of[key] = len(self._labels)
        self._labels.append(label)

    def forget(self, key: str) -> None:
        """Forget who gave `key`, which may be a section, its value."""
        for known in list(self._of):
            if known == key or known.startswith(f"{key}."):
                del self._of[known]

    def apart(self, unread: Unread) -> bool:
        """Whether another source than the key's own decides that the key has no effect.

        Where several keys decide so, the last word counts. A default decides in every source.
        """
        own = self._of.get(unread.key)
        return own is not None and self._deciding(unread) not in (None, own)

    def leave_out(self, unread: Unread) -> None:
        """Take note that the key is left out, which its default now stands for."""
        label = self._labels[self._of[unread.key]]
        keys = self._left_out.setdefault((label, unread.why), [])
        keys.append(f"{unread.key} {in_yaml(unread.value)}")

        deciding = self._deciding(unread)
        assert deciding is not None
        self._of[unread.key] = deciding

    def left_out(self) -> str:
        """All keys that were left out in one line, with their sources and the reason; or ""."""
        parts = []
        for (label, why), keys in self._left_out.items():
            has = "has" if len(keys) == 1 else "have"
            parts.append(f"{', '.join(keys)} of {label} {has} no effect{why}")
        return f"left out: {'; '.join(parts)}" if parts else ""

    def _deciding(self, unread: Unread) -> int | None:
        """The last source that has a key which decides; None: they all have their defaults."""
        return max((self._of[key] for key in unread.deciders if key in self._of), default=None)
