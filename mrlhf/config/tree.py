"""The tree of keys: the one file that walks sections and nested values.

A key has a dotted name, such as `actor.optim.lr`; `*` stands for the number of a list item. Values
are also held flat, by the names of their keys. This file knows what a section is, but no key and no
files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from mrlhf.config.fields import Section


@dataclass(frozen=True)
class Node:
    """One key, as the class of its section, `owner`, declares it."""

    name: str  # dotted, in full
    field: FieldInfo
    owner: type[Section]
    section: type[Section] | None  # that it holds, alone or in a list
    is_list: bool

    @property
    def is_section(self) -> bool:
        """Whether it holds keys rather than a value."""
        return self.section is not None and not self.is_list

    @property
    def doc(self) -> str:
        """Its meaning, with the unit, on one line."""
        return " ".join((self.field.description or "").split())

    @property
    def default(self) -> Any:
        """Its default; pydantic's mark for "undefined" if it is required."""
        return self.field.get_default(call_default_factory=True, validated_data={})


@cache
def nodes(root: type[Section]) -> Mapping[str, Node]:
    """Every key below `root` by its name, sections included, in the order of the file."""
    return {node.name: node for node in _walk(root, "")}


def _walk(owner: type[Section], prefix: str) -> Iterator[Node]:
    for name, field in owner.model_fields.items():
        section = None
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and get_origin(kind) is None and issubclass(kind, Section):
                section = kind
        is_list = get_origin(field.annotation) is list
        yield Node(f"{prefix}{name}", field, owner, section, is_list)

        if section is not None:
            yield from _walk(section, f"{prefix}{name}.*." if is_list else f"{prefix}{name}.")


def starred(name: str) -> str:
    """`name` with the numbers of list items replaced by `*`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def leaves(
    values: Mapping[str, Any],
    prefix: str = "",
    is_section: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Any]]:
    """The values of nested sections by their dotted names; a list is one value.

    Args:
        prefix: put before each name.
        is_section: whether a dictionary of this name is a section, and not a value.
    """
    for name, value in values.items():
        full = f"{prefix}{name}"
        if isinstance(value, dict) and value and is_section(full):
            yield from leaves(value, f"{full}.", is_section)
        else:
            yield full, value


def flatten(config: Section) -> dict[str, Any]:
    """Every value by its dotted key; lists and mappings stay whole, an absent section is None."""
    known = nodes(type(config))
    return dict(leaves(config.model_dump(), is_section=lambda name: known[name].is_section))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that hold the flat `values`."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def put(values: dict[str, Any], name: str, value: Any) -> None:
    """Set a key of the flat `values`, and remove values in the place of its section or below it.

    An empty section changes nothing if there are keys below it.
    """
    below = [key for key in values if key.startswith(f"{name}.")]
    if below and value == {}:
        return
    for key in below:
        del values[key]
    for parent in parents(name):
        values.pop(parent, None)
    values[name] = value


def parents(name: str) -> list[str]:
    """The sections around a key, the outermost first."""
    parts = name.split(".")
    return [".".join(parts[:number]) for number in range(1, len(parts))]


def unknown_names(root: type[Section], values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted names in nested `values` that are no keys; other mistakes are found later."""
    unknown = []
    for name, value in values.items():
        full = f"{prefix}{name}"
        node = nodes(root).get(starred(full))
        if node is None or "." in name:
            unknown.append(full)
        elif node.is_list and node.section is not None and isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, dict):
                    unknown += unknown_names(root, item, f"{full}.{number}.")
        elif node.is_section and isinstance(value, dict):
            unknown += unknown_names(root, value, f"{full}.")
    return unknown


def in_yaml(value: object) -> str:
    """`value` as in a YAML file."""
    if value is None:
        return "null"
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)
