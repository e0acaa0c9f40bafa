"""Which source, a file or the command line, gave each key its value.

A key that has no effect is a mistake where the same source also says why it has none. Where another
source does, such as a method's file that is laid over a base, the key is left out and named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mrlhf.config.compare import leaves
from mrlhf.config.unread import Unread, in_yaml


class Sources:
    """The sources that were read so far, in order."""

    def __init__(self) -> None:
        """No source was read yet."""
        self._labels: list[str] = []
        self._of: dict[str, int] = {}  # the number of the last source that has the key

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
        deciding = [self._of[key] for key in unread.deciders if key in self._of]
        return unread.key in self._of and bool(deciding) and max(deciding) != self._of[unread.key]

    def in_words(self, left_out: Sequence[Unread]) -> str:
        """The keys `left_out` in one line, with their sources and the reason."""
        together: dict[tuple[str, str], list[str]] = {}
        for unread in left_out:
            label = self._labels[self._of[unread.key]]
            keys = together.setdefault((label, unread.why), [])
            keys.append(f"{unread.key} {in_yaml(unread.value)}")

        parts = []
        for (label, why), keys in together.items():
            has = "has" if len(keys) == 1 else "have"
            parts.append(f"{', '.join(keys)} of {label} {has} no effect{why}")
        return f"left out: {'; '.join(parts)}"
