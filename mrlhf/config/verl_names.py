"""The names here of verl's configuration keys, for the message about an unknown key.

They stand in `verl_names.yaml`, which is read when the first unknown key is met.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import yaml

ValueT = TypeVar("ValueT")
_ROLES = ("actor", "critic", "reference", "reward_model", "model")


@dataclass(frozen=True)
class Names:
    """The tables of `verl_names.yaml` by verl's keys; the file says what each holds."""

    sections: Mapping[str, str]
    below_a_role: Mapping[str, str]
    elsewhere: Mapping[str, list[str]]
    changes: Mapping[str, str]
    missing: Mapping[str, str]  # the reasons; "" without one
    missing_below_a_role: Mapping[str, str]


@cache
def read_names() -> Names:
    """Read the tables."""
    tables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for table in ("missing", "missing_below_a_role"):
        reasons = tables[table].items()
        tables[table] = {key: reason for reason, keys in reasons for key in keys}
    return Names(**tables)


def verl_hint(name: str, known: Collection[str]) -> str | None:
    """What verl's key `name` is here, or that it has no counterpart; None if it is not known."""
    here = _without_verls_section(name.lstrip("+~"))
    for theirs in (here, *_with_sections(here)):
        found = translate_name(theirs, known)
        if found is None:
            continue
        if found.ours is not None:
            change = f"; {found.change}" if found.change else ""
            return f"verl's '{name}' is '{found.ours}' here{change}"
        return f"verl's '{name}' has no counterpart here{': ' * bool(found.reason)}{found.reason}"
    return None


@dataclass(frozen=True)
class Name:
    """What a key of another system is here."""

    ours: str | None  # None: it has no counterpart
    conversion: str | None = None  # of its value, by its name in `CONVERSIONS`
    change: str = ""  # what changes with the name
    reason: str = ""  # why there is no counterpart, if there is anything to tell


def translate_name(name: str, known: Collection[str]) -> Name | None:
    """Return what verl's key `name` is among the `known` keys; None if it is not in the tables."""
    here = _without_verls_section(name.lstrip("+~"))
    ours = _counterpart(here, known)
    if ours is not None:
        return Name(ours, change=longest_end(read_names().changes, here) or "")
    reason = _reason(here)
    return None if reason is None else Name(None, reason=reason)


def longest_end(table: Mapping[str, ValueT], name: str) -> ValueT | None:
    """The entry of `name`, or of the longest end of it that the table holds."""
    while name:
        if name in table:
            return table[name]
        name = name.partition(".")[2]
    return None


def _without_verls_section(name: str) -> str:
    for theirs, ours in read_names().sections.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return name


def _with_sections(word: str) -> list[str]:
    """The keys of the tables whose part after the section is `word`."""
    names = read_names()
    with_reason = [key for key, reason in names.missing.items() if reason]
    return [key for key in (*names.elsewhere, *with_reason) if key.partition(".")[2] == word]


def _counterpart(name: str, known: Collection[str]) -> str | None:
    if name in known:
        return name
    role, _, rest = name.partition(".")
    candidates = list(_longest(read_names().elsewhere, name) or ())
    if role in _ROLES and rest in read_names().below_a_role:
        candidates.append(f"{role}.{read_names().below_a_role[rest]}")
    return next((key for key in candidates if key in known), None)


def _reason(name: str) -> str | None:
    """The reason why `name` has no counterpart; "" without a reason; None if it is not known."""
    reason = _longest(read_names().missing, name)
    role, _, rest = name.partition(".")
    if reason is None and role in _ROLES:
        if rest.startswith("optim.muon_"):
            return "Muon is as in torch.optim.Muon, with the learning rate of AdamW"
        reason = _longest(read_names().missing_below_a_role, rest)
    if reason is None and role in ("optim", "checkpoint"):  # of SFT, whose model needs no role
        reason = _longest(read_names().missing_below_a_role, name)
    return reason


def _longest(table: Mapping[str, ValueT], name: str) -> ValueT | None:
    """The entry of `name`, or of the nearest section around it that the table holds."""
    while name:
        if name in table:
            return table[name]
        name = name.rpartition(".")[0]
    return None
