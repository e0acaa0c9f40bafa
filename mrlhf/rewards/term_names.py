"""The names of a reward's terms in metrics, in samples and in `gdpo_reward_keys`.

It knows names alone, and loads no function.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from mrlhf.errors import ConfigError
from mrlhf.rl.names import RewardName

_BUILT_IN = {name for union in get_args(RewardName) for name in get_args(union) or (union,)}


def term_names(terms: Sequence[str]) -> list[str]:
    """The name of each term: a rule's own, and a function's without its file.

    If several functions have the same name, or one has the name of a built-in term, the file's name
    is put in front, as in `my_rules.score`; and its folders, if the file names are equal too.

    Raises:
        ConfigError: a term is given twice.
    """
    real = [_real(term) for term in terms]
    for number, term in enumerate(terms):
        if real[number] in real[:number]:
            raise ConfigError(
                f"reward.terms holds '{term}' {real.count(real[number])} times; keep one and add "
                "the weights"
            )

    names = list(terms)
    for number, term in enumerate(real):
        if ":" in term:
            names[number] = _short(term, [other for other in real if other != term])
    return names


def _real(term: str) -> str:
    """The term; the file of a function becomes an absolute path without links."""
    if ":" not in term:
        return term
    file, _, function = term.rpartition(":")
    return f"{os.path.realpath(file)}:{function}"


def _short(reference: str, others: Sequence[str]) -> str:
    """The shortest name of a function that none of the other terms can have."""
    parts = _parts(reference)
    taken = {other for other in others if ":" not in other} | _BUILT_IN
    names_of_others = [_parts(other) for other in others if ":" in other]

    for first in range(len(parts) - 1, 0, -1):
        alike = any(other[first - len(parts) :] == parts[first:] for other in names_of_others)
        name = ".".join(parts[first:])
        if not alike and name not in taken:
            return name
    return ".".join(parts)


def _parts(reference: str) -> list[str]:
    """The folders, the file without its suffix, and the function."""
    file, _, function = reference.rpartition(":")
    return [*Path(file).with_suffix("").parts, function]
