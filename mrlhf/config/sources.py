"""The sources of a configuration, files and the command line, laid over each other.

A key that has no effect is a mistake if the same source decides so. If another source does, such as
a method's file that is laid over a base, the key is left out and named. A preset is a source of its
own, below the one that names it; what the preset decides, that source decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from mrlhf.config.presets import PRESET, is_of_method
from mrlhf.config.roots import Root
from mrlhf.config.tree import in_yaml, parents, put
from mrlhf.config.unread import Unread


class Sources:
    """The values of the sources so far by dotted keys, the later over the earlier."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._labels: list[str] = []
        self._of: dict[str, int] = {}  # the number of the last source that has the key
        self._presets: set[int] = set()  # the numbers of the sources that are presets
        self._implied: set[str] = set()  # the keys whose present value is that of a preset
        self._expanded: set[str] = set()  # those that a source has by such a preset alone
        self._replaced: list[tuple[str, Unread]] = []  # with the labels of their sources
        self._left_out: dict[tuple[str, str], list[str]] = {}  # by source and reason

    def forget(self, sections: Collection[str]) -> None:
        """Forget all keys of `sections`, because the next source replaces them as a whole."""
        for section in sections:
            keys = [key for key in self._of if key == section or key.startswith(f"{section}.")]
            self.replace(keys, f", since the command line replaces {section} as a whole")

    def lay(
        self,
        label: str,
        values: Mapping[str, Any],
        implied: Collection[str] = (),
        expanded: Collection[str] = (),
    ) -> None:
        """Lay the next source, with its label and values by dotted names, over the others.

        A preset in it decides the keys `implied`; of these, the source does not name `expanded`.
        """
        for key, value in values.items():
            put(self.values, key, value)
            self._of[key] = len(self._labels)
        self._implied = (self._implied - values.keys()) | set(implied)
        self._expanded = (self._expanded - values.keys()) | set(expanded)
        self._labels.append(label)

    def lay_preset(self, label: str, name: str, values: Mapping[str, Any]) -> None:
        """Replace the method by a preset; the source that names it is laid over it next."""
        of_preset = self._implied - self._expanded
        keys = [key for key in self.values if is_of_method(key) or key in of_preset]
        self.replace(keys, f", since {PRESET} of {label} is {name}")
        self._presets.add(len(self._labels))
        self.lay(f"the preset {name}", values, values)

    def replace(self, keys: Collection[str], why: str) -> None:
        """Forget keys; those that a user has given are named, if their values are others then."""
        for key in [key for key in keys if key in self._of]:
            number = self._of.pop(key)
            if key not in self.values:
                continue
            unread = Unread(key, self.values.pop(key), why)
            if number not in self._presets and key not in self._expanded:
                self._replaced.append((self._labels[number], unread))

    def decided_elsewhere(self, unread: Unread) -> bool:
        """Whether another source than the key's own decides that the key has no effect."""
        own = self._of[unread.key] if unread.key in self.values else None
        return own is not None and self._deciding(unread) not in (None, own)

    def leave_out(self, unread: Unread) -> None:
        """Leave out a key, so that it has its default."""
        self._note(self._labels[self._of[unread.key]], unread)
        deciding = self._deciding(unread)
        assert deciding is not None
        self._of[unread.key] = deciding
        del self.values[unread.key]

    def left_out(self, config: Root) -> str:
        """One line with all keys that were left out, their sources and the reason; or "".

        A key that has the same value in `config` after all, or one that a later source has given,
        is not named.
        """
        for label, unread in self._replaced:
            given = [key for key in (unread.key, *parents(unread.key)) if key in self.values]
            if not self._implied.issuperset(given):
                continue
            now = config.value_of(unread.key)
            if now != unread.value:
                self._note(label, unread, f" (now {in_yaml(now)})")

        parts = []
        for (label, why), keys in self._left_out.items():
            has = "has" if len(keys) == 1 else "have"
            parts.append(f"{', '.join(keys)} of {label} {has} no effect{why}")
        return f"left out: {'; '.join(parts)}" if parts else ""

    def _note(self, label: str, unread: Unread, now: str = "") -> None:
        keys = self._left_out.setdefault((label, unread.why), [])
        keys.append(f"{unread.key} {in_yaml(unread.value)}{now}")

    def _deciding(self, unread: Unread) -> int | None:
        """The last source that has a deciding key; None if all of them have their defaults."""
        numbers = [self._of[key] for key in unread.deciders if key in self._of]
        return max((number + (number in self._presets) for number in numbers), default=None)
