"""The keys of a configuration that have no effect, because other keys decide so.

This is the one file that checks the facts beside the keys. `load` leaves such a key out if another
source decides so; `preflight` refuses the rest. The keys of a model that is not built are not
checked, so that a file without a critic can be laid over one with a critic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mrlhf.config.reads import NotRead, Place, ReadIf
from mrlhf.config.roots import Root
from mrlhf.config.tree import in_yaml, nodes


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
        reason = _reason(config, name)
        if reason is None or name.split(".")[0] in config.unbuilt:
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


def is_read(config: Root, key: str) -> bool:
    """Whether a key has an effect, by the facts beside it."""
    return _reason(config, key) is None


def _reason(config: Root, name: str) -> NotRead | None:
    """The reason why a key has no effect; None if it has one."""
    place = Place(config, name.rpartition(".")[0])
    for fact in nodes(type(config))[name].field.metadata:
        if isinstance(fact, ReadIf):
            reason = fact.problem(place)
            if reason is not None:
                return reason
    return None
