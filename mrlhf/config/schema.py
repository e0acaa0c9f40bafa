"""The keys of a configuration as a flat list, for --help and for the nearest key to a misspelling.

It reads the classes of the sections. It does not know files, nor what the values mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mrlhf.config.fields import Section
from mrlhf.config.roots import Root
from mrlhf.config.verl_names import verl_hint

REQUIRED = "required"


@dataclass(frozen=True)
class Key:
    """What --help says of one key.

    Attributes:
        name: full dotted key; `*` stands for the number of a list item.
        is_section: whether it holds keys rather than a value.
        type: the values it takes, in words.
        default: its default as written in YAML, "required", or the key that it inherits from.
        doc: its meaning, with the unit.
    """

    name: str
    is_section: bool
    type: str
    default: str
    doc: str


def keys(root_class: type[Root]) -> list[Key]:
    """Every key of a root, sections included, in the order of the file."""
    return list(_walk(root_class, "", root_class))


def _walk(section: type[Section], prefix: str, root_class: type[Root]) -> Iterable[Key]:
    for name, field in section.model_fields.items():
        full = f"{prefix}{name}"
        kind = _section_class(field)
        is_list = get_origin(field.annotation) is list

        default = _default_in_words(field)
        if full in root_class.inherited:
            default = root_class.inherited[full]
        yield Key(
            name=full,
            is_section=kind is not None and not is_list,
            type=_type_in_words(field.annotation),
            default=default,
            doc=field.description or "",
        )

        if kind is not None:
            yield from _walk(kind, f"{full}.*." if is_list else f"{full}.", root_class)


def _section_class(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, alone, in a list or as one of two types; else None."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, Section) and get_origin(kind) is None:
            return kind
    return None


def _default_in_words(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    value = field.get_default(call_default_factory=True, validated_data={})
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _type_in_words(annotation: Any) -> str:
    if annotation is None or annotation is type(None):
        return "null"
    if get_origin(annotation) is Annotated:
        return _type_in_words(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " | ".join(str(value) for value in get_args(annotation))
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return "section" if issubclass(annotation, Section) else annotation.__name__
    if get_origin(annotation) is list:
        return "list"
    return " | ".join(_type_in_words(part) for part in get_args(annotation))


def help_text(root_class: type[Root]) -> str:
    """All keys, one on a line, with type, default and doc; a blank line between sections."""
    lines = []
    for key in keys(root_class):
        if key.is_section and "." not in key.name:
            lines.append("")
        if key.is_section:
            lines.append(f"{key.name}:  {key.doc}")
        else:
            lines.append(f"  {key.name} = {key.default}  ({key.type})  {key.doc}")
    return "\n".join(lines)


def starred(name: str) -> str:
    """`name` with the numbers of list items replaced by `*`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def unknown_key(root_class: type[Root], name: str) -> str:
    """One line that says `name` is no key, and which key was probably meant."""
    known = [key.name for key in keys(root_class)]
    if name in known:
        return f"unknown key '{name}'; its name holds a dot: nest it, as {nested(name)}"
    bare = name.lstrip("+~")
    if bare != name and bare in known:
        return f"unknown key '{name}'; write '{bare}': + and ~ are Hydra's"
    hint = verl_hint(name, known)
    if hint is not None:
        return f"unknown key '{name}'; {hint}"
    if name.split(".")[0] == "actor_rollout_ref":
        return f"unknown key '{name}'; {_without_verls_section(name, known)}"

    near = _nearest(starred(name), known)
    for part in name.split("."):
        if near and part.isdecimal():
            near = near.replace("*", part, 1)
    hint = f"did you mean '{near}'?" if near else "--help lists all keys"
    return f"unknown key '{name}'; {hint}"


def nested(name: str) -> str:
    """The dotted key `name` as a file writes it."""
    first, _, rest = name.partition(".")
    return f"{first}: {{{nested(rest)}}}" if rest else f"{first}: ..."


def _without_verls_section(name: str, known: list[str]) -> str:
    """What `name` is called here; verl has one more section around actor, rollout and reference."""
    for theirs, ours in (("actor", "actor"), ("rollout", "rollout"), ("ref", "reference")):
        start = f"actor_rollout_ref.{theirs}"
        if name.startswith(f"{start}."):
            here = ours + name.removeprefix(start)
            near = _nearest(here, known)
            hint = f"; did you mean '{near}'?" if near else ""
            return f"verl's '{start}' is '{ours}' here{hint}"
    return (
        "verl's 'actor_rollout_ref.actor', '.rollout' and '.ref' are 'actor', 'rollout' and "
        "'reference' here"
    )


def _nearest(name: str, known: list[str]) -> str | None:
    """The key that `name` probably stands for.

    The first of these that exists: a key of that word in a subsection, a key of the same section
    with a similar word, a key of that word in another section, any similar key.
    """
    parent, _, last = name.rpartition(".")
    same_word = [key for key in known if key.rpartition(".")[2] == last]
    for key in same_word:
        if parent and key.startswith(f"{parent}."):
            return key

    siblings = {}
    for key in known:
        section, _, word = key.rpartition(".")
        if section == parent:
            siblings[word] = key
    close = difflib.get_close_matches(last, siblings, n=1)
    if close:
        return siblings[close[0]]

    if same_word:
        return max(same_word, key=lambda key: difflib.SequenceMatcher(None, key, name).ratio())
    close = difflib.get_close_matches(name, known, n=1)
    return close[0] if close else None


def flatten(config: BaseModel) -> dict[str, Any]:
    """Every value of `config` by its dotted key; lists stay lists, an absent section is None."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump().items():
        _flatten_into(flat, name, value)
    return flat


def _flatten_into(flat: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _flatten_into(flat, f"{key}.{name}", inner)
    else:
        flat[key] = value
