"""The page of all configuration keys, `docs/configuration.md`, written from the sections' fields.

It knows Markdown and how the keys are described, not what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mrlhf.config.fields import MOST
from mrlhf.config.roots import PROGRAMS, Root
from mrlhf.config.schema import REQUIRED, default_in_words
from mrlhf.config.tree import Node, nodes
from tools.pages.json_schema import JsonSchema, values_of

LAUNCHERS: Mapping[str, type[Root]] = {
    f"train_{program}": root for program, root in PROGRAMS.items()
}
TITLES = {
    "train_ppo": "PPO",
    "train_sft": "Supervised fine-tuning",
    "train_rm": "Reward-model training",
    "train_critic": "Training of a critic",
    "train_dpo": "Direct preference optimization (DPO, IPO)",
}
_WORDS = {
    "object": "mapping",
    "boolean": "boolean",
    "integer": "integer",
    "number": "number",
    "string": "text",
    "null": "`null`",
}
INTRODUCTION = """\
# Configuration

Every key of the five launchers, in brackets its default and the values it takes, then what it means
with its unit. `launch/train_ppo.py --help` prints the same list. `mrlhf/config/` has the fields
from which `python tools/write_configuration_page.py` writes this page.

## How a configuration is read

- `--config FILE` may be given several times. A later file overrides an earlier one key by key; a
  list is replaced as a whole.
- Arguments of the form `key.path=value` come last. The value is YAML; `reward.terms.0.weight=0.5`
  reaches into a list.
- Numbers are those of YAML 1.2: `1e-4` is a number, `1_000` is text.
- An unknown key is refused, and the nearest key is named; so is a value of the wrong type.
- An integer is at most 1000000000 where no other bound stands below. A key whose default is `null`,
  which is "not set", takes it.
- In paths, a `~` at the start and environment variables (`${NAME}` or `$NAME`) are replaced when
  the file is read. A variable that is not set is refused. A path that does not begin with `/` is
  relative to the working directory.
- A key that has no effect is refused where the same file, or the command line, also holds the key
  that decides so. If another one does, the key is left out, and a line at the start names it.
- Where the default reads "as `actor.path`", the value of that key is taken if this one is left out
  or null. The keys of an optional section, `reward_model`, are required only if the section is
  there.
- A key of which an earlier section says the same is only named.
- `--dry-run` checks the whole configuration and prints what it comes to, without starting
  anything. What must hold between keys is only checked there and at the start of a run. If a file
  or a package is not found, its first lines say so, and its exit code is 3; with
  `--allow-missing`, for a run on another machine, it is 0.

## Completion in an editor

`configs/schema/` holds a JSON schema of each launcher's file. An editor with the YAML language
server completes keys, shows their meaning and marks mistakes if a file's first line names its
schema, relative to the file:

```yaml
# yaml-language-server: $schema=schema/train_ppo.json
```

"""


Seen = dict[tuple[str, ...], tuple[str, str]]
"""The launcher and the section of each key that stands on the page, by what is said of it.

A list of keys that were described before stands there by its own words.
"""


def configuration_page() -> str:
    """The whole page in Markdown."""
    parts = [INTRODUCTION]
    seen: Seen = {}
    for launcher, root_class in LAUNCHERS.items():
        parts.append(_launcher(launcher, root_class, seen))
    return "\n".join(parts)


def _launcher(launcher: str, root_class: type[Root], seen: Seen) -> str:
    """The keys of one launcher, section by section."""
    lines = [f"## {TITLES[launcher]}: `launch/{launcher}.py`", ""]
    keys = list(nodes(root_class).values())
    own = [key for key in keys if "." not in key.name and not key.is_section]
    lines += _keys(launcher, root_class, own, seen)
    for section in keys:
        if section.is_section and "." not in section.name:
            lines += ["", f"### `{section.name}`", "", _sentence(section.doc), ""]
            inside = [key for key in keys if key.name.startswith(f"{section.name}.")]
            own = [key for key in inside if not key.is_section]
            lines += _keys(launcher, root_class, own, seen)
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _keys(launcher: str, root_class: type[Root], keys: Sequence[Node], seen: Seen) -> list[str]:
    """A list of keys, and the names of those that an earlier list has in the same words."""
    values = values_of(root_class)
    rows = []
    again: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.name.rpartition(".")
        here = f"`{section}`" if section else "keys without a section"
        source, _, source_name = root_class.inherited.get(key.name, "").rpartition(".")
        said = (name, *_cells(root_class, key, values[key.name]))
        if source_name == name and key.doc == nodes(root_class)[f"{source}.{name}"].doc:
            text = f"{here}, where not set, has the value of `{source}`"
            again.setdefault(text, []).append(f"`{name}`")
        elif said in seen:
            there, section_there = seen[said]
            where = f"`{section_there}`" if section_there else "the keys without a section"
            of = "" if there == launcher else f" of {TITLES[there].partition(' (')[0]}"
            again.setdefault(f"{here}, as in {where}{of}", []).append(f"`{name}`")
        else:
            seen[said] = (launcher, section)
            of, default, meaning = said[1:]
            rows.append(f"- `{key.name}` ({default}; {of}): {meaning}")

    lists = [f"- {text}: {', '.join(names)}" for text, names in again.items()]
    new = [line for line in lists if seen.setdefault((line,), (launcher, ""))[0] == launcher]
    known: dict[str, list[str]] = {}
    for line in lists:
        if line not in new:
            section = line.partition(", ")[0].removeprefix("- ")
            known.setdefault(TITLES[seen[(line,)][0]], []).append(section)
    for title, sections in known.items():
        new.append(f"- the lists of {title} for {', '.join(dict.fromkeys(sections))}")
    return rows + new


def _cells(root_class: type[Root], key: Node, value: JsonSchema) -> tuple[str, str, str]:
    """What is said of a key: its values, its default and its meaning."""
    default = _default(root_class, key)
    values = _values(value)
    return values.removesuffix(" or `null`") if default == "`null`" else values, default, key.doc


def _default(root_class: type[Root], key: Node) -> str:
    default = default_in_words(root_class, key)
    if default == REQUIRED:
        return REQUIRED
    return f"as `{default}`" if key.name in root_class.inherited else f"`{default}`"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _values(value: JsonSchema) -> str:
    """The values that a key takes, in words."""
    if "title" in value:
        return f"`{value['title']}`"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_values(choice) for choice in value["anyOf"]))
    if "enum" in value:
        return ", ".join(f"`{name}`" for name in value["enum"])
    if value["type"] == "array":
        items = value["items"]
        if choices := items.get("enum", [items["const"]] if "const" in items else None):
            return f"list of {', '.join(f'`{name}`' for name in choices)}"
        if "anyOf" in items:
            return f"list of {_values(items)}"
        return "list" if "$ref" in items else f"list of {_WORDS[items['type']]}s{_bounds(items)}"
    return _WORDS[value["type"]] + _bounds(value)


def _bounds(value: JsonSchema) -> str:
    if "minimum" in value and value.get("maximum", MOST) != MOST:
        return f" {_number(value['minimum'])} to {_number(value['maximum'])}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [
        f"{sign} {_number(value[name])}"
        for name, sign in signs.items()
        if name in value and value[name] != MOST
    ]
    return f" {' and '.join(bounds)}" if bounds else ""


def _number(value: float) -> str:
    """A bound; a whole number with all its digits."""
    return str(int(value)) if value == int(value) else f"{value:g}"
