"""Reads a configuration: the defaults, then YAML files in order, then `key.path=value` arguments.

A preset is replaced by its keys before the next source is laid over it. A key that has no effect
because of another source is left out. Every mistake is one line of a ConfigError: the full key, the
value, and what is allowed. This file does not know what the keys mean; `preflight` checks the
conditions between them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError

from mrlhf.config.fields import Section
from mrlhf.config.presets import (
    CORRECTION_PRESET,
    OF_FEW,
    PRESET,
    PresetName,
    is_of_method,
    preset_file,
    with_correction,
)
from mrlhf.config.roots import PROGRAMS, AnyConfig, Program, Root
from mrlhf.config.schema import unknown_key
from mrlhf.config.sources import Sources
from mrlhf.config.tree import flatten, leaves, nested, nodes, parents, put, starred, unknown_names
from mrlhf.config.unread import unread_keys
from mrlhf.config.yaml_text import parse_yaml
from mrlhf.errors import ConfigError

RootT = TypeVar("RootT", bound=Root)
SectionT = TypeVar("SectionT", bound=Section)

_SHOWN_CHARACTERS = 100


def load_config(
    root_class: type[RootT],
    paths: str | Path | Sequence[str | Path] | None,
    overrides: Sequence[str] = (),
) -> RootT:
    """Read a configuration as `read_config` does."""
    return read_config(root_class, paths, overrides)[0]


def read_config(
    root_class: type[RootT],
    paths: str | Path | Sequence[str | Path] | None,
    overrides: Sequence[str] = (),
) -> tuple[RootT, str]:
    """Read a configuration.

    Args:
        paths: YAML file, or several; a later one overrides the earlier ones key by key (lists as a
            whole). None: the defaults alone.
        overrides: `key.path=value` with the value in YAML; a later one wins. A value for a whole
            section replaces that section of the files.

    Returns:
        The configuration, and a line that names the keys that were left out, or "".

    Raises:
        ConfigError: unreadable file, unknown key, bad or missing value; one line each.
    """
    if paths is None:
        paths = []
    elif isinstance(paths, str | Path):
        paths = [paths]

    sources = Sources()
    for path in paths:
        values = _values(root_class, _read_yaml(root_class, Path(path)))
        _lay(sources, root_class, str(path), values)
    values, replaced = _arguments(root_class, overrides, sources.values)
    sources.forget(replaced)
    _lay(sources, root_class, "the command line", values)

    # Without these keys, others may have no effect either.
    config = _validated(root_class, sources.values)
    while strays := [unread for unread in unread_keys(config) if sources.decided_elsewhere(unread)]:
        for unread in strays:
            sources.leave_out(unread)
        config = _validated(root_class, sources.values)
    return config, sources.left_out(config)


def read_any(
    program: Program | None, paths: Sequence[str | Path], overrides: Sequence[str]
) -> AnyConfig:
    """Read a configuration of `program`, or of any; the ConfigError is that of the nearest."""
    problems = []
    for name in [program] if program else list(PROGRAMS):
        try:
            return load_config(PROGRAMS[name], paths, overrides)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError(min(problems, key=lambda problem: len(problem.splitlines())))


def _validated(root_class: type[RootT], values: Mapping[str, Any]) -> RootT:
    try:
        return root_class.model_validate(nested(values))
    except ValidationError as error:
        raise ConfigError("\n".join(_in_words(root_class, error))) from None


def read_section(kind: type[SectionT], raw: Mapping[str, Any], file: Path) -> SectionT:
    """The section in another program's file, whose other keys do not count; or a ConfigError."""
    known = {key: raw[key] for key in kind.model_fields if raw.get(key) is not None}
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        name = _dotted(item["loc"])
        line = f"'{name}' is missing" if item["type"] == "missing" else _line(Root, name, item)
        raise ConfigError(f"{file}: {' '.join(line.split())}") from None


def _values(root_class: type[Root], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one source by dotted names; an empty section counts as missing."""
    known = nodes(root_class)
    values = dict(leaves(raw, is_section=lambda name: known[name].is_section))
    for name, value in list(values.items()):
        node = known[name]
        may_be_absent = node.field.annotation is not node.section
        if value in (None, {}) and node.is_section and not may_be_absent:
            del values[name]
    return values


def _lay(sources: Sources, root_class: type[Root], label: str, values: Mapping[str, Any]) -> None:
    """Lay one source over the earlier ones, with its preset below it."""
    name: Any = values.get(PRESET)
    if name in get_args(PresetName):
        preset = {}
        if name != "defaults":
            preset = _values(root_class, _read_yaml(root_class, preset_file(name)))
        sources.lay_preset(label, name, {**preset, PRESET: None})
        values = {key: value for key, value in values.items() if key != PRESET}

    full = with_correction(values)
    expanded = full.keys() - values.keys()
    correction = values.get(CORRECTION_PRESET)
    sources.replace(expanded, f", since {CORRECTION_PRESET} of {label} is {correction}")
    implied = set(expanded)
    if name == "defaults":  # as the files of the presets begin
        implied |= {key for key in values if is_of_method(key) or key.startswith(OF_FEW)}
    sources.lay(label, full, implied, expanded)


def dump_yaml(config: Root) -> str:
    """`config` in full as YAML, inherited values filled in; loading it gives an equal object."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)


def keys_as_yaml(values: Mapping[str, Any]) -> str:
    """Return the text of a file that gives these keys, by dotted name, and no others."""
    return str(yaml.safe_dump(nested(values), sort_keys=False, allow_unicode=True))


def read_leaves(text: str) -> dict[str, Any]:
    """The values in the output of `dump_yaml` by dotted names; empty if it is unreadable."""
    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError:
        read = None
    return dict(leaves(read)) if isinstance(read, dict) else {}


def changed_keys(earlier: str, config: Root) -> list[str]:
    """The keys that differ from the `earlier` output of `dump_yaml`; all if it is not readable."""
    before = read_leaves(earlier)
    now = flatten(config)
    missing = object()
    names = before.keys() | now.keys()
    return sorted(n for n in names if before.get(n, missing) != now.get(n, missing))


def _read_yaml(root_class: type[Root], path: Path) -> dict[str, Any]:
    """The sections of a file; ConfigError if it cannot be read, or a key in it does not exist."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"configuration file '{path}' cannot be read: it is a directory, a pipe or a "
                "device; give a file, since every rank reads it"
            )
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = "; mrlhf-init copies the shipped ones here" if path.parts[0] == "configs" else ""
        raise ConfigError(
            f"configuration file '{path}' does not exist; give an existing one to --config{hint}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file '{path}' cannot be read: {error}") from None

    raw = parse_yaml(text, str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds a {type(raw).__name__}, not sections with keys")

    unknown = unknown_names(root_class, raw)
    if unknown:
        raise ConfigError("\n".join(f"{path}: {unknown_key(root_class, key)}" for key in unknown))
    return raw


def _arguments(
    root_class: type[Root], overrides: Sequence[str], files: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """The values of all arguments; a later one wins.

    Args:
        files: the values of the files; an argument may set a key inside one of their lists.

    Returns:
        The values by dotted names, and the sections that the arguments replace as a whole.
    """
    known = nodes(root_class)
    arguments = [_parse_override(override) for override in overrides]
    unknown = []
    for key, value in arguments:
        if starred(key) not in known:
            unknown.append(key)
        elif isinstance(value, dict) and starred(key) == key and known[key].is_section:
            unknown += unknown_names(root_class, value, f"{key}.")
    if unknown:
        raise ConfigError("\n".join(unknown_key(root_class, key) for key in unknown))

    values: dict[str, Any] = {}
    replaced: set[str] = set()
    for key, value in arguments:
        if starred(key) != key:
            _put_into_list(values, files, key, value)
        elif known[key].is_section:
            replaced.add(key)
            for name in [name for name in values if name.startswith(f"{key}.")]:
                del values[name]
            values |= _values(root_class, nested({key: value}))
        else:
            _refuse_value_around(values, files, key)
            put(values, key, value)
    return values, replaced


def _refuse_value_around(values: Mapping[str, Any], files: Mapping[str, Any], key: str) -> None:
    """Refuse to set a key in a section if a file has a value in place of the section."""
    for parent in parents(key):
        value = values.get(parent, files.get(parent))
        if value is not None and value != {}:
            raise ConfigError(
                f"cannot set '{key}': the file has the value {_shown(value)} where a section "
                "should be"
            )


def _put_into_list(values: dict[str, Any], files: Mapping[str, Any], key: str, value: Any) -> None:
    """Set a key of a list's item; the arguments then hold the whole list."""
    name, number, last = re.split(r"\.(\d+)\.", key, maxsplit=1)
    items = values.get(name, files.get(name)) or []
    if not isinstance(items, list) or int(number) >= len(items):
        count = len(items) if isinstance(items, list) else 0
        raise ConfigError(f"cannot set '{key}': the file's list has {count} items, numbered from 0")
    item = items[int(number)]
    if not isinstance(item, dict):
        raise ConfigError(
            f"cannot set '{key}': the file has the value {_shown(item)} where a section should be"
        )
    values[name] = [*items]
    values[name][int(number)] = {**item, last: value}


def _parse_override(override: str) -> tuple[str, Any]:
    """The key and the value of one argument."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        hint = ""
        if override.endswith((".yaml", ".yml")):
            hint = f"; to read it as a file, write --config {override}"
        raise ConfigError(f"argument '{override}' is not of the form key.path=value{hint}")
    return key, parse_yaml(text, f"argument '{override}'")


def _in_words(root_class: type[Root], error: ValidationError) -> list[str]:
    """One line for each mistake; a value that other keys inherit is complained about once."""
    errors = error.errors(include_url=False)
    mistakes = {_dotted(item["loc"]): item for item in errors}
    misspelt = any(item["type"] == "extra_forbidden" for item in errors)

    lines = []
    for item in errors:
        name = _dotted(item["loc"])
        if _follows(root_class, item, mistakes):
            continue
        if misspelt and item["type"] == "missing":
            continue  # the misspelt key may be the missing one
        lines.append(_line(root_class, name, item))
    return lines


def _follows(
    root_class: type[Root], item: Mapping[str, Any], mistakes: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Whether the mistake `item` only repeats that of the key from which it takes its value."""
    source = root_class.inherited.get(_dotted(item["loc"]))
    if source is None:
        return False
    if item["type"] == "missing":
        return source in mistakes or source.split(".")[0] in mistakes
    return source in mistakes and repr(mistakes[source]["input"]) == repr(item["input"])


def _shown(value: Any) -> str:
    """`value` on one line, without its middle if it is long."""
    text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}...{text[-half:]}"


def _dotted(loc: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in loc)


def _line(root_class: type[Root], name: str, item: Mapping[str, Any]) -> str:
    """The mistake `item` of pydantic, at the key `name`, in one line."""
    if item["type"] == "extra_forbidden":
        return unknown_key(root_class, name)
    if item["type"] == "missing":
        doc = nodes(root_class)[starred(name)].doc
        return f"missing key '{name}' ({doc}); set it in the file or as {name}=..."
    if item["type"] in ("model_type", "model_attributes_type"):
        message = "should be a section with keys of its own"
    else:
        message = item["msg"].removeprefix("Value error, ")
        if isinstance(item["input"], dict) and item["type"] == "value_error":
            return f"'{name}': {message}"
    return f"bad value {_shown(item['input'])} for '{name}': {message[0].lower()}{message[1:]}"
