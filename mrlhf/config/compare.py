"""Compares an earlier configuration with this one.

It compares values; it does not know what a key means.
"""

from __future__ import annotations

from typing import Any

import yaml

from mrlhf.config.roots import Root
from mrlhf.config.tree import flatten, leaves


def read_leaves(text: str) -> dict[str, Any]:
    """The values in the output of `dump_yaml` by dotted names; empty if it is unreadable."""
    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError:
        read = None
    return dict(leaves(read)) if isinstance(read, dict) else {}


def changed_keys(earlier: str, config: Root) -> list[str]:
    """The dotted names of the keys whose values differ from the `earlier` output of `dump_yaml`,
    sorted.

    If that is not readable, all keys differ.
    """
    before = read_leaves(earlier)
    now = flatten(config)

    missing = object()
    names = before.keys() | now.keys()
    return sorted(n for n in names if before.get(n, missing) != now.get(n, missing))
