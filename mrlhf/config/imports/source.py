"""Reads what another system was started with: a shell script, a command line, or YAML.

Nothing is run. Which programs a system has stands in its table; this file knows no key that is
translated.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from mrlhf.config.imports.shell import Command, Script
from mrlhf.config.imports.words import shown, unknown_parts
from mrlhf.config.roots import Program
from mrlhf.config.tree import leaves
from mrlhf.config.yaml_text import parse_yaml
from mrlhf.errors import ConfigError

System = Literal["verl", "trl", "openrlhf"]

_HYDRA = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:[./][\w@]+)*)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_MODULE = re.compile(r"(?:\w+\.)*(verl|openrlhf|recipe|trl)(?:\.\w+)*\.(\w+)")
_NOT_READ = {
    "slime": r"--rollout-num-gpus\b|--hf-checkpoint\b|--num-rollout\b|\bslime[./]",
    "NeMo-RL": r"\bnemo_rl\b|\bNeMo-?RL\b|num_prompts_per_step|\bpolicy\.(megatron_cfg|dtensor_cfg)"
    r"|(?m:^policy:)|train_global_batch_size",
}
_SIGNS: dict[System, str] = {
    "verl": r"\bactor_rollout_ref\b|\bverl\.|(?m:^ *partial_pretrain:)|data\.micro_batch_size_per",
    "openrlhf": r"\bopenrlhf\b|--actor\.model_name_or_path|--pretrain\b",
    "trl": r"\btrl\b|per_device_train_batch_size|model_name_or_path",
}
_NOT_TRAINERS = ("other", "undecided")
_STARTS_NOTHING = re.compile("(?:.*/)?(?:echo|printf|pkill|pgrep|killall|grep|ls|cat|cp|rm|vim)")


@dataclass(frozen=True)
class Unknown:
    """A value of which a part comes from outside the script."""

    text: str


@dataclass(frozen=True)
class Source:
    """What was read: the system, the program, and the values by the system's own keys."""

    system: System
    program: Program
    values: Mapping[str, Any]
    trainer: str = ""  # whose rows of the table are read; the program if it has none of its own
    world_size: int | None = None  # if the source names it
    notes: list[str] = field(default_factory=list)  # what was not read


@cache
def read_table(system: System) -> Mapping[str, Any]:
    """Read the table of a system; its reasons by key."""
    file = Path(__file__).with_name(f"{system}.yaml")
    table: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    reasons = table.get("missing", {}).items()
    table["missing"] = {key: reason for reason, keys in reasons for key in keys}
    return table


def read_source(file: Path, system: System | None, program: Program | None) -> Source:
    """Read a file, and find out what is None; ConfigError if it is of no system that is read."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error

    is_sure = system is not None or re.search(r"actor_rollout_ref|openrlhf\.cli", text)
    for other, sign in _NOT_READ.items():
        if not is_sure and re.search(sign, text):
            raise ConfigError(
                f"{file} is of {other}, which is not read; verl, TRL and OpenRLHF are"
            )
    found = system or next((name for name, sign in _SIGNS.items() if re.search(sign, text)), None)
    if found is None:
        raise ConfigError(
            f"{file} is of no system that is known; name it: --from verl, trl or openrlhf"
        )
    try:
        if file.suffix in (".yaml", ".yml"):
            return _of_yaml(file, text, found, program)
        return _of_script(file, text, found, program)
    except RecursionError:
        raise ConfigError(f"{file}: nested too deep") from None
    except ConfigError as error:
        raise ConfigError(str(error) if str(file) in str(error) else f"{file}: {error}") from None


def _of_yaml(file: Path, text: str, system: System, program: Program | None) -> Source:
    parsed = parse_yaml(text, str(file))
    if not isinstance(parsed, dict) or not parsed:
        raise ConfigError(f"{file} holds no keys")
    try:
        json.dumps(parsed, default=str)
    except (ValueError, RecursionError):
        raise ConfigError(f"{file}: a value holds itself; write it out") from None

    values = dict(leaves(parsed))
    comment = re.search(r"\btrl (\w+)", text)
    named = _trainer_of(system, comment[1] if comment else file.stem)
    trainer = program or named or _trainer_by_keys(system, values)
    if trainer in _NOT_TRAINERS:
        raise ConfigError(
            f"{file} does not say which program of {system} it is for; give --program"
        )
    for key, value in values.items():
        if isinstance(value, str) and "${" in value:
            values[key] = Unknown(value)
    return Source(system, _program(trainer), values, trainer, _world_size(system, [], values))


def _of_script(file: Path, text: str, system: System, program: Program | None) -> Source:
    script = Script()
    script.follow(text)
    runs: dict[tuple[str, ...], tuple[Command, str, int]] = {}
    unknown: list[str] = []
    for command in script.commands:
        at, name = _start_of(system, command.words)
        if at is None or any(map(_STARTS_NOTHING.fullmatch, command.words[: max(at, 0)])):
            continue
        words = command.words[at + 1 :]
        named = program or _trainer_of(system, name)
        trainer = named or _trainer_by_keys(system, dict(_pairs(system, words)))
        if trainer not in _NOT_TRAINERS:
            runs.setdefault(tuple(command.words), (command, trainer, at))
        elif any(map(_looks_like_a_key, words)):
            unknown.append(f"line {command.line} starts {name} of {system}")

    if len(runs) > 1:
        lines = ", ".join(str(command.line) for command, _, _ in runs.values())
        raise ConfigError(f"{file} starts {len(runs)} runs, at lines {lines}; keep one of them")
    if not runs:
        if unknown:
            raise ConfigError(f"{file}: {unknown[0]}, which is not read; --program says what it is")
        raise ConfigError(f"{file} sets no key of {system}; give the whole script")
    [(command, trainer, at)] = runs.values()
    values = dict(_pairs(system, command.words[at + 1 :]))
    if not values:
        raise ConfigError(f"{file} sets no key of {system}; give the whole script")

    notes = list(script.notes)
    if not command.is_certain:
        notes.append(f"line {command.line}: the run starts only if a condition holds")
    notes += _strays(command.words[at + 1 :], script.commands, command)
    size = _world_size(system, command.words, values)
    return Source(system, _program(trainer), values, trainer, size, notes)


def _strays(words: list[str], commands: Sequence[Command], run: Command) -> Iterator[str]:
    """What looks like keys of the run and is not, or may hold some."""
    for word in words:
        if "=" not in word and not word.startswith("-") and unknown_parts(word) == [word[1:-1]]:
            of = f"{shown(word)} depends on what only a run could tell"
            yield f"line {run.line}: {of}; it may hold keys"
    for other in commands:
        if _HYDRA.fullmatch(other.words[0]) or other.words[0].startswith("--"):
            yield (
                f"line {other.line}: {shown(other.words[0])} does not reach the run: a comment or "
                "a blank ends the continued line before it"
            )


def _looks_like_a_key(word: str) -> bool:
    return bool(_HYDRA.fullmatch(word) or _OPTION.fullmatch(word))


def _program(trainer: str) -> Program:
    return next((name for name in get_args(Program) if name == trainer.split("_")[-1]), "ppo")


def _start_of(system: System, words: list[str]) -> tuple[int | None, str]:
    """Where a command names a program of the system, and which; None if it names none."""
    for number, word in enumerate(words):
        module = _MODULE.fullmatch(word)
        is_named = system != "trl" or words[number - 1] in ("-m", "--module")
        if module and is_named and (system == "verl" or module[1] == system):
            return number, module[2]
        if posixpath.basename(word) == "trl" and system == "trl" and words[number + 1 :]:
            return number + 1, words[number + 1]
        if word.endswith(".py") and not word.startswith("-") and "=" not in word:
            return number, posixpath.basename(word)[:-3]

    # A command line without its program.
    is_bare = len(words) > 1 and _looks_like_a_key(words[0])
    begins = is_bare and words[0].startswith(("-", "+", "data", "actor", "algo"))
    return -1 if begins else None, ""


def _trainer_of(system: System, name: str) -> str | None:
    """The trainer that a program's name tells, whole or by one of its words; None if none does."""
    table = read_table(system)
    parts = re.split(r"[_\-.]", name.lower())
    if name in table["programs"]:
        return str(table["programs"][name])
    if {name.lower(), *parts} & {*table["other_programs"]}:
        return "other"
    return next((table["programs"][part] for part in parts if part in table["programs"]), None)


def _trainer_by_keys(system: System, values: Mapping[str, Any]) -> str:
    """The trainer that has keys which no other one has."""
    for trainer, pattern in read_table(system)["programs_by_keys"].items():
        if any(re.fullmatch(pattern, key) for key in values):
            return str(trainer)
    return "undecided"


def _pairs(system: System, words: list[str]) -> Iterator[tuple[str, Any]]:
    if system == "verl":
        for word, later in zip(words, [*words[1:], ""], strict=False):
            pair = _HYDRA.fullmatch(word)
            option = _OPTION.fullmatch(word)
            if pair:
                # Hydra's {a:1} is YAML's {a: 1}.
                is_dict = pair[2].startswith("{")
                text = re.sub(r"([{,]\s*[\w.]+):(?=\S)", r"\1: ", pair[2]) if is_dict else pair[2]
                yield from leaves({pair[1]: _value(text)})
            elif option:
                yield f"--{option[1]}", _value(option[2] or later)
        return

    for number, word in enumerate(words):
        found = _OPTION.fullmatch(word)
        if not found:
            continue
        given = [] if found[2] is None else [found[2]]
        for later in words[number + 1 :] if found[2] is None else []:
            if later.startswith("--"):
                break
            given.append(later)

        values = [_value(text if len(given) == 1 else text.rstrip(",")) for text in given]
        key = found[1].replace("-", "_")
        value = values[0] if len(values) == 1 else values or True
        if key.startswith("no_") and value is True and system == "trl":
            key = key.removeprefix("no_")
            value = False
        yield from leaves({key: value})


def _value(text: str) -> Any:
    if unknown_parts(text):
        return Unknown(shown(text))
    try:
        return {"True": True, "False": False, "None": None}.get(text, parse_yaml(text, "a value"))
    except ConfigError:
        return text


def _world_size(system: System, words: list[str], values: Mapping[str, Any]) -> int | None:
    """The ranks that the source names: by its launcher, or by keys of its own."""
    rows: dict[str, Any] = read_table(system).get("world_size", {})
    numbers = {}
    for option, number in re.findall(r"--([\w-]+)[= ](\d+)(?= |$)", " ".join(words)):
        numbers[option.replace("-", "_")] = int(number)
    if "num_processes" in numbers:
        return numbers["num_processes"]
    each = numbers.get("nproc_per_node", numbers.get("num_gpus"))
    if each is not None:
        is_known = "nnodes" in numbers or "--nnodes" not in " ".join(words)
        return each * numbers.get("nnodes", numbers.get("num_nodes", 1)) if is_known else None

    for needed, parts in rows.items():
        if not any(re.fullmatch(needed, key) for key in values):
            continue
        total = 0
        for nodes_key, each_key, default, shared_by in parts:
            if shared_by in values or not {nodes_key, each_key} & values.keys():
                continue
            sizes = (values.get(nodes_key, 1), values.get(each_key, default))
            if not all(type(size) is int and size > 0 for size in sizes):
                return None
            total += sizes[0] * sizes[1]
        return total or None
    return None
