"""The names here of verl's configuration keys, for messages about unknown keys and for imports.

They stand in `imports/verl.yaml`, which is read when the first unknown key is met.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

ValueT = TypeVar("ValueT")
_ROLES = ("actor", "critic", "reference", "reward_model", "model")


@dataclass(frozen=True)
class Name:
    """The name here of a key of another system."""

    ours: str | None  # None: it has no counterpart; of several, joined by |, the first that exists
    # of its value: the name of one of `CONVERSIONS`, or what each value becomes
    conversion: str | Mapping[Any, Any] | None = None
    change: str = ""  # what changes with the name
    reason: str = ""  # why there is no counterpart, if there is anything to tell


@dataclass(frozen=True)
class Names:
    """The tables of names of `imports/verl.yaml` by verl's keys; the file says what each holds."""

    sections: Mapping[str, str]
    below_a_role: Mapping[str, Name]
    elsewhere: Mapping[str, Name]
    missing: Mapping[str, str]  # the reasons; "" without one
    missing_below_a_role: Mapping[str, str]


@cache
def read_names() -> Names:
    """Read the tables."""
    file = Path(__file__).with_name("imports") / "verl.yaml"
    tables = yaml.safe_load(file.read_text(encoding="utf-8"))
    for table in ("below_a_role", "elsewhere"):
        rows = tables[table].items()
        tables[table] = {key: Name(*row if isinstance(row, list) else [row]) for key, row in rows}
    for table in ("missing", "missing_below_a_role"):
        reasons = tables[table].items()
        tables[table] = {key: reason for reason, keys in reasons for key in keys}
    return Names(**{name: tables[name] for name in Names.__dataclass_fields__})


def verl_hint(name: str, known: Collection[str]) -> str | None:
    """The name here of verl's key `name`, or that it has none, in words; None if not known."""
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


def translate_name(name: str, known: Collection[str]) -> Name | None:
    """The name of verl's key `name` among the `known` keys; None if it is not in the tables."""
    here = _without_verls_section(name.lstrip("+~"))
    for row in _rows(here):
        for ours in (row.ours or "").split(" | "):
            if ours in known:
                return replace(row, ours=ours)
    if here in known:
        return Name(here)
    reason = _reason(here)
    return None if reason is None else Name(None, reason=reason)


def longest_end(table: Mapping[str, ValueT], name: str) -> ValueT | None:
    """The entry of `name`, or of the longest end of it that the table holds."""
    while name:
        if name in table:
            return table[name]
        name = name.partition(".")[2]
    return None


def nearest_section(table: Mapping[str, ValueT], name: str) -> ValueT | None:
    """The entry of `name`, or of the nearest section around it that the table holds."""
    while name:
        if name in table:
            return table[name]
        name = name.rpartition(".")[0]
    return None


def _without_verls_section(name: str) -> str:
    for theirs, ours in read_names().sections.items():
        if name == theirs or name.startswith(f"{theirs}."):
            return ours + name.removeprefix(theirs)
    return name


def _with_sections(word: str) -> list[str]:
    """The keys of the tables whose part after the section is `word`."""
    names = read_names()
    rows = names.elsewhere
    # neither those that are alike nor those in a section with a row of its own
    keys = [key for key in rows if rows[key].ours != key and key.split(".")[0] not in rows]
    keys += [key for key, reason in names.missing.items() if reason]
    return [key for key in keys if key.partition(".")[2] == word]


def _rows(name: str) -> Iterator[Name]:
    """The rows of a key, those of the whole key first."""
    row = nearest_section(read_names().elsewhere, name)
    if row is not None:
        yield row
    role, _, rest = name.partition(".")
    row = read_names().below_a_role.get(rest)
    if role in _ROLES and row is not None:
        yield replace(row, ours=f"{role}.{row.ours}")


def _reason(name: str) -> str | None:
    """The reason why `name` has no counterpart; "" without a reason; None if it is not known."""
    reason = nearest_section(read_names().missing, name)
    role, _, rest = name.partition(".")
    if reason is None and role in _ROLES:
        if rest.startswith("optim.muon_"):
            return "Muon is as in torch.optim.Muon, with the learning rate of AdamW"
        reason = nearest_section(read_names().missing_below_a_role, rest)
    if reason is None and role in ("optim", "checkpoint"):  # of SFT, whose model needs no role
        reason = nearest_section(read_names().missing_below_a_role, name)
    return reason
