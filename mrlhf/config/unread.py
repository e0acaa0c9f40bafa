"""The keys of a configuration that have no effect or contradict each other.

This is the one file that checks the facts beside the keys. `load` leaves a key without effect out
if another source decides so; `preflight` refuses the rest. Keys without effect of a model that is
not built are not checked, so that a file without a critic can be laid over one with a critic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

from mrlhf.config.reads import KeyPlace
from mrlhf.config.roots import Root
from mrlhf.config.tree import in_yaml, nodes

_NAME = re.compile(r"\{=?([\w.]+)\}")


@dataclass(frozen=True)
class Unread:
    """A key that has another value than its default, and no effect; see `NotRead`."""

    key: str
    value: Any
    why: str
    remedy: str = ""
    deciders: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.key} {in_yaml(self.value)} has no effect{self.why}; {self.remedy}"


def unread_keys(config: Root) -> Iterator[Unread]:
    """The keys that have no effect, each once."""
    for name in nodes(type(config)):
        if name.split(".")[0] in config.unbuilt:  # which may be absent
            continue
        reason = config.why_unread(name)
        if reason is None:
            continue
        value = config.value_of(name)
        default = default_of(config, name)
        if value != default:
            is_inherited = name in config.inherited
            leave = "leave it out" if is_inherited else f"leave it at {in_yaml(default)}"
            remedy = f"{reason.leave or leave}, or {reason.remedy}"
            yield Unread(name, value, reason.why, remedy, reason.deciders)


def default_of(config: Root, key: str) -> Any:
    """The default of a key, or the value of the key from which it inherits."""
    source = config.inherited.get(key)
    return nodes(type(config))[key].default if source is None else config.value_of(source)


def contradictions(config: Root, only: Container[str] | None = None) -> Iterator[str]:
    """A line for each row of a section that holds; `only` names some of the sections.

    What holds is a function. It is given the parts of the configuration that its parameters name,
    and as `self` the section. It gives what the text names beside keys: once, or in a list for
    several mistakes. In the text of `rollout`, {n} stands for "rollout.n 1", {=n} for the value
    alone, and {section} for "rollout". A row that names a key without effect does not count.
    """
    for name, node in nodes(type(config)).items():
        is_meant = only is None or name in only
        if node.section is None or not is_meant or name.split(".")[0] in config.unbuilt:
            continue
        place = KeyPlace(config, name)
        for base in node.section.__mro__:  # a section has the rows of those that it extends
            for text, holds in vars(base).get("refused", {}).items():
                yield from _lines(place, text, holds)


def _lines(place: KeyPlace, text: str, holds: Callable[..., Any]) -> Iterator[str]:
    """The text of a row, once for each mistake."""
    config = place.config
    own = config.value_of(place.section)
    names = signature(holds).parameters
    found = holds(*(own if name == "self" else getattr(config, name) for name in names))

    for mistake in found if isinstance(found, list) else [found] if found else []:
        words = mistake if isinstance(mistake, dict) else {}
        keys = {name: place.name(name) for name in _NAME.findall(text) if name not in words}
        keys.pop("section", None)
        if not all(map(config.reads, keys.values())):
            continue
        line = text.replace("{section}", place.section)
        for name, key in keys.items():
            value = config.value_of(key)
            line = line.replace(f"{{{name}}}", f"{key} {value}").replace(f"{{={name}}}", f"{value}")
        for name, word in words.items():
            line = line.replace(f"{{{name}}}", f"{word}")
        yield line
