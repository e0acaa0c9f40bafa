"""The keys of a configuration in words, for --help, and the nearest key to a misspelling.

It does not know files, nor what the values mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from mrlhf.config.fields import Section
from mrlhf.config.roots import Root
from mrlhf.config.tree import Node, in_yaml, nodes, starred
from mrlhf.config.verl_names import verl_hint

REQUIRED = "required"


def default_in_words(root_class: type[Root], node: Node) -> str:
    """The default of a key as in YAML, "required", or the key from which it inherits."""
    if node.name in root_class.inherited:
        return root_class.inherited[node.name]
    if node.field.is_required():
        return REQUIRED
    value = node.default
    return in_yaml(value) if value is None or isinstance(value, bool) else str(value)


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
    if get_origin(annotation) is Sequence:
        return f"list of {_type_in_words(get_args(annotation)[0])}"
    return " | ".join(_type_in_words(part) for part in get_args(annotation))


def help_text(root_class: type[Root]) -> str:
    """All keys, one on a line, with type, default and doc; a blank line between sections."""
    lines = []
    for name, node in nodes(root_class).items():
        if node.is_section and "." not in name:
            lines.append("")
        if node.is_section:
            lines.append(f"{name}:  {node.doc}")
        else:
            default = default_in_words(root_class, node)
            kind = _type_in_words(node.field.annotation)
            lines.append(f"  {name} = {default}  ({kind})  {node.doc}")
    return "\n".join(lines)


def unknown_key(root_class: type[Root], name: str) -> str:
    """One line that says that `name` is no key, and which key was probably meant."""
    known = list(nodes(root_class))
    if name in known:
        return f"unknown key '{name}'; its name holds a dot: nest it, as {in_sections(name)}"
    bare = name.lstrip("+~")
    if bare != name and bare in known:
        return f"unknown key '{name}'; write '{bare}': + and ~ are Hydra's"
    hint = verl_hint(name, known)
    if hint is not None:
        return f"unknown key '{name}'; {hint}"
    if name.split(".")[0] == "actor_rollout_ref":
        return f"unknown key '{name}'; {_without_verls_section(name, known)}"

    if name.partition(".")[0] == "rollout" and "dpo" in known:
        return "unknown key 'rollout'; online DPO is train_ppo with algorithm.preset=online_dpo"
    near = _nearest(starred(name), known)
    for part in name.split("."):
        if near and part.isdecimal():
            near = near.replace("*", part, 1)
    hint = f"did you mean '{near}'?" if near else "--help lists all keys"
    return f"unknown key '{name}'; {hint}"


def in_sections(name: str) -> str:
    """The dotted key `name` as in a file."""
    first, _, rest = name.partition(".")
    return f"{first}: {{{in_sections(rest)}}}" if rest else f"{first}: ..."


def _without_verls_section(name: str, known: list[str]) -> str:
    """The name for `name` here; verl has one more section around actor, rollout and reference."""
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
    """The key that was probably meant by `name`.

    The first of these that exists: the same word in a subsection, a similar word in the same
    section, the same word in another section, any similar key.
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
