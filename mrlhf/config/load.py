"""Reads a configuration: the defaults, then YAML files in order, then `key.path=value` arguments.

A shorthand, such as a preset, is expanded in each source before the next source is laid over it.
A key that has no effect is left out if another source than its own decides so. Every mistake is one
line of a ConfigError: the full key, the value, and what is allowed. This file does not know what
the keys mean; what must hold between keys is checked in `preflight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from mrlhf.config.fields import Section
from mrlhf.config.roots import Root
from mrlhf.config.schema import keys, starred, unknown_key
from mrlhf.config.sources import Sources
from mrlhf.config.unread import unread_keys
from mrlhf.errors import ConfigError

RootT = TypeVar("RootT", bound=Root)


_SHOWN_CHARACTERS = 100
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice and reads numbers as YAML 1.2 does.

    1e-4 is a number; 0.5_5 and 1:30 are texts.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML declares it
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            key = self.construct_object(key_node, deep=True)

            if not isinstance(key, str):
                raise ConfigError(f"line {line}: key {key!r} is not text; quote it or remove it")
            if key in seen:
                raise ConfigError(f"line {line}: key '{key}' is given twice; keep one of them")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    _INT, re.compile(r"^(?:[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^(?:[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


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
        root_class: the configuration of the launcher.
        paths: YAML file, or several, of which a later one overrides the earlier ones key by key
            (lists as a whole), or None for the defaults alone.
        overrides: `key.path=value` with the value in YAML; a later one wins. A value given for a
            whole section replaces what the files say of that section.

    Returns:
        The configuration, and a line that names the keys that were left out; "" if none was.

    Raises:
        ConfigError: unreadable file, unknown key, bad or missing value; one line each.
    """
    if paths is None:
        paths = []
    elif isinstance(paths, str | Path):
        paths = [paths]

    raw: dict[str, Any] = {}
    sources = Sources()
    for path in paths:
        from_file = _expand(root_class, _read_yaml(root_class, Path(path)))
        raw = _merged(root_class, raw, from_file)
        sources.add(str(path), from_file)

    arguments = [_parse_override(override) for override in overrides]
    known = {key.name for key in keys(root_class)}
    unknown = [unknown_key(root_class, key) for key, _ in arguments if starred(key) not in known]
    if unknown:
        raise ConfigError("\n".join(unknown))

    # Arguments that reach into lists change `raw` alone; all others are collected as well, since
    # their shorthands are expanded together.
    from_arguments: dict[str, Any] = {}
    for key, value in arguments:
        _assign(raw, key, value)
        sources.forget(key)
        if starred(key) == key:
            _assign(from_arguments, key, value)
    from_arguments = _expand(root_class, from_arguments)
    raw = _merged(root_class, raw, from_arguments)
    sources.add("the command line", from_arguments)
    return _without_strays(root_class, raw, sources)


def _without_strays(
    root_class: type[RootT], raw: dict[str, Any], sources: Sources
) -> tuple[RootT, str]:
    """The configuration without the keys that another source than their own leaves unread.

    Returns:
        The configuration, and a line that names these keys; "" if there are none.
    """
    config = _validated(root_class, raw)
    while strays := [unread for unread in unread_keys(config) if sources.apart(unread)]:
        for unread in strays:
            _remove(raw, unread.key)
            sources.leave_out(unread)
        config = _validated(root_class, raw)
    return config, sources.left_out()


def _validated(root_class: type[RootT], raw: dict[str, Any]) -> RootT:
    try:
        return root_class.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_in_words(root_class, error))) from None


def _remove(raw: dict[str, Any], key: str) -> None:
    """Take the dotted `key` out of the nested `raw`."""
    *sections, last = key.split(".")
    for name in sections:
        raw = raw[name]
    del raw[last]


def dump_yaml(config: Root) -> str:
    """`config` in full as YAML, inherited values filled in; loading it gives an equal object."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)


def _parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}") from None


def _read_yaml(root_class: type[Root], path: Path) -> dict[str, Any]:
    """The sections of a file.

    Raises:
        ConfigError: the file cannot be read, or a key in it does not exist.
    """
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

    raw = _parse_yaml(text, str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds a {type(raw).__name__}, not sections with keys")

    known = {key.name for key in keys(root_class)}
    unknown = [f"{path}: {unknown_key(root_class, key)}" for key in _unknown(raw, known)]
    if unknown:
        raise ConfigError("\n".join(unknown))
    return raw


def _unknown(node: Any, known: set[str], prefix: str = "") -> Iterator[str]:
    """The dotted names in `node` that are no keys.

    What stands below a value is left to the value's own check; so is a list in the place of a
    section, and a section in the place of a list.
    """
    items: Iterable[tuple[Any, Any]] = ()
    needs_list = any(key.startswith(f"{starred(prefix)}*.") for key in known)
    if isinstance(node, list) and needs_list:
        items = enumerate(node)
    elif isinstance(node, dict) and not needs_list:
        items = node.items()

    for name, value in items:
        full = f"{prefix}{name}"
        if isinstance(node, dict) and "." in name:
            yield full
            continue
        below = f"{starred(full)}."
        if any(key.startswith(below) for key in known):
            yield from _unknown(value, known, f"{full}.")
        elif starred(full) not in known:
            yield full


def _merged(
    section: type[Section], first: dict[str, Any], second: dict[str, Any]
) -> dict[str, Any]:
    """`second` laid over `first`.

    A key that `second` does not have keeps its value. A section with nothing under it changes
    nothing.
    """
    merged = dict(first)
    subsections = section.subsections()

    for name, value in second.items():
        if name in subsections and value is None:
            merged.setdefault(name, value)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(subsections.get(name, Section), merged[name], value)
        else:
            merged[name] = value
    return merged


def _expand(section: type[Section], raw: dict[str, Any]) -> dict[str, Any]:
    """Expand the shorthands in `raw`, all that one source says, and in its subsections."""
    full = dict(section.expand(raw))
    for name, kind in section.subsections().items():
        if isinstance(full.get(name), dict):
            full[name] = _expand(kind, full[name])
    return full


def _parse_override(override: str) -> tuple[str, Any]:
    """The key and the value of one argument."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        hint = ""
        if override.endswith((".yaml", ".yml")):
            hint = f"; to read it as a file, write --config {override}"
        raise ConfigError(f"argument '{override}' is not of the form key.path=value{hint}")
    return key, _parse_yaml(text, f"argument '{override}'")


def _assign(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` in the nested `raw`; sections that are missing are added."""
    *sections, last = key.split(".")
    node: Any = raw
    for name in sections:
        if isinstance(node, list):
            node = _item(node, key, name)
        elif isinstance(node, dict):
            if node.get(name) is None:
                node[name] = {}
            node = node[name]

    if not isinstance(node, dict):
        raise ConfigError(
            f"cannot set '{key}': the file has the value {_shown(node)} where a section should be"
        )
    node[last] = value


def _item(items: list[Any], key: str, number: str) -> Any:
    """The item that `key` names by its `number`."""
    if not number.isdecimal() or int(number) >= len(items):
        raise ConfigError(
            f"cannot set '{key}': the file's list has {len(items)} items, numbered from 0"
        )
    return items[int(number)]


def _in_words(root_class: type[Root], error: ValidationError) -> list[str]:
    """One line for each mistake; a value that other keys inherit is complained about once."""
    errors = error.errors(include_url=False)
    told = {_dotted(item["loc"]): item for item in errors}
    misspelt = any(item["type"] == "extra_forbidden" for item in errors)

    lines = []
    for item in errors:
        name = _dotted(item["loc"])
        if _follows(root_class, item, told):
            continue
        if misspelt and item["type"] == "missing":
            continue  # the misspelt key may be the missing one
        lines.append(_line(root_class, name, item))
    return lines


def _follows(
    root_class: type[Root], item: Mapping[str, Any], told: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Whether the mistake `item` is only that of the key from which it takes its value."""
    source = root_class.inherited.get(_dotted(item["loc"]))
    if source is None:
        return False
    if item["type"] == "missing":
        return source in told or source.split(".")[0] in told
    return source in told and repr(told[source]["input"]) == repr(item["input"])


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
    """The mistake `item`, as pydantic describes it, at the key `name`, in one line."""
    if item["type"] == "extra_forbidden":
        return unknown_key(root_class, name)
    if item["type"] == "missing":
        doc = next(key.doc for key in keys(root_class) if key.name == starred(name))
        return f"missing key '{name}' ({doc}); set it in the file or as {name}=..."
    if item["type"] in ("model_type", "model_attributes_type"):
        message = "should be a section with keys of its own"
    else:
        message = item["msg"].removeprefix("Value error, ")
        if isinstance(item["input"], dict) and item["type"] == "value_error":
            return f"'{name}': {message}"
    return f"bad value {_shown(item['input'])} for '{name}': {message[0].lower()}{message[1:]}"
