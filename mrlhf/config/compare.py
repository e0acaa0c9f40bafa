"""Which keys differ between an earlier configuration and this one.

It compares values; it does not know what a key means.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from mrlhf.config.roots import Root


def read_leaves(text: str) -> dict[str, Any]:
    """The values of a configuration as `dump_yaml` wrote it, by their dotted names.

    It is empty if the text is no configuration.
    """
    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError:
        read = None
    return dict(leaves(read)) if isinstance(read, dict) else {}


def changed_keys(earlier: str, config: Root) -> list[str]:
    """The dotted names of the keys whose values differ, sorted.

    Args:
        earlier: a configuration as `dump_yaml` wrote it. If it is not readable, all keys differ.
        config: the present configuration.
    """
    before = read_leaves(earlier)
    now = dict(leaves(config.model_dump()))

    missing = object()
    names = before.keys() | now.keys()
    return sorted(n for n in names if before.get(n, missing) != now.get(n, missing))


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested sections by their dotted names; a list is one value."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
