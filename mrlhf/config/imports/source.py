"""Reads what another system was started with: a shell script, a command line, or YAML.

Nothing is run. In a script, variables that it sets itself are put in, with the default of
`${NAME:-default}`; others stay as they stand. This file knows no key.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mrlhf.config.roots import Program
from mrlhf.config.tree import leaves
from mrlhf.config.yaml_text import parse_yaml
from mrlhf.errors import ConfigError

System = Literal["verl", "trl", "openrlhf"]

_ASSIGNED = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*)$")
_VARIABLE = re.compile(r"\$\{(\w+)(:?[-=][^{}]*)?\}|\$(\w+)")
_MOST_NESTED = 4  # variables inside the defaults of others
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}
_HYDRA = re.compile(r"^[+~]{0,2}([A-Za-z_]\w*(?:\.[\w@/]+)+|model_engine)=(.*)$", re.DOTALL)
_OPTION = re.compile(r"^--([A-Za-z][\w.]*)(?:=(.*))?$", re.DOTALL)

_SIGNS: dict[System, tuple[str, ...]] = {
    "verl": ("verl.trainer", "actor_rollout_ref", "verl.sft", "data.micro_batch_size_per_gpu"),
    "openrlhf": ("openrlhf.cli", "--actor.model_name_or_path", "--pretrain"),
    "trl": ("trl ", "per_device_train_batch_size", "model_name_or_path"),
}
_PROGRAMS: dict[Program, tuple[str, ...]] = {
    "sft": ("trl sft", "train_sft", "sft_trainer", "fsdp_sft"),
    "dpo": ("trl dpo", "train_dpo", "dpo.py"),
    "rm": ("trl reward", "train_rm", "reward_modeling.py"),
    "ppo": ("trl grpo", "trl rloo", "train_ppo", "main_ppo", "ppo.py", "grpo"),
}

# TRL's trainers that share a program with its GRPO, by words of a script or keys.
_TRAINERS: dict[str, tuple[str, ...]] = {
    "rloo": ("trl rloo", "rloo.py", "RLOOConfig"),
    "ppo_trainer": ("/ppo.py", "ppo_tldr.py", "PPOConfig", "num_ppo_epochs", "sft_model_path"),
}


@dataclass(frozen=True)
class Source:
    """What was read: the system, the program, and the values by the system's own keys."""

    system: System
    program: Program
    values: Mapping[str, Any]
    trainer: str = ""  # if it has rows of its own in the table


def read_source(file: Path, system: System | None, program: Program | None) -> Source:
    """Read a file; `system` and `program` are found out where they are None.

    Raises:
        ConfigError: there is no such file, or it is of no system that is known.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error

    is_yaml = file.suffix in (".yaml", ".yml")
    found = system or _first_with(_SIGNS, text)
    if found is None:
        raise ConfigError(
            f"{file} is of no system that is known; name it: --from verl, trl or openrlhf"
        )
    if is_yaml:
        parsed = parse_yaml(text, str(file))
        if not isinstance(parsed, dict):
            raise ConfigError(f"{file} holds no keys")
        values = dict(leaves(parsed))
    else:
        pairs = _hydra(text) if found == "verl" else _options(text)
        values = dict(pairs)
    if not values:
        raise ConfigError(f"{file} sets no key of {found}; give the whole script")
    kind = program or _first_with(_PROGRAMS, text) or "ppo"
    trainer = _first_with(_TRAINERS, text) if (found, kind) == ("trl", "ppo") else None
    return Source(found, kind, values, trainer or kind)


def _first_with(signs: dict[Any, tuple[str, ...]], text: str) -> Any:
    return next((name for name, words in signs.items() if any(w in text for w in words)), None)


def _hydra(text: str) -> Iterator[tuple[str, Any]]:
    for words in _lines(text):
        for word in words:
            found = _HYDRA.match(word)
            if found:
                yield found[1], _value(found[2])


def _options(text: str) -> Iterator[tuple[str, Any]]:
    for words in _lines(text):
        for number, word in enumerate(words):
            found = _OPTION.match(word)
            if not found:
                continue
            given = [] if found[2] is None else [found[2]]
            for later in words[number + 1 :] if found[2] is None else []:
                if later.startswith("--") or later in ("&&", "|", ";"):
                    break
                given.append(later)
            values = [_value(one) for one in given]
            yield found[1], values[0] if len(values) == 1 else values or True


def _lines(text: str) -> Iterator[list[str]]:
    """The words of each line of a script as its shell would split them, with its variables put in.

    The parentheses of an array are left out.
    """
    variables: dict[str, str] = {}
    joined = re.sub(r"\\\n", " ", text)
    for line in joined.splitlines():
        line = _ARITHMETIC.sub(lambda found: _computed(found, variables), line)
        assigned = _ASSIGNED.match(line)
        if assigned and not assigned[2].startswith("("):
            try:
                [value] = shlex.split(assigned[2], comments=True) or [""]
            except ValueError:  # more than one word, or a quotation over several lines
                value = ""
            variables[assigned[1]] = _put_in(value, variables)
            continue
        try:
            split = shlex.split(line.replace("(", " ( ", 1) if assigned else line, comments=True)
        except ValueError:
            split = line.split()
        yield [_put_in(word, variables) for word in split if word not in ("(", ")")]


def _put_in(text: str, variables: dict[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        default = found[2]
        if name in variables:
            return variables[name]
        return found[0] if default is None else default.lstrip(":")[1:]

    text = re.sub(r"\$HOME\b|\$\{HOME\}", "~", text)
    for _ in range(_MOST_NESTED):
        text = _VARIABLE.sub(value, text)
    return text


def _computed(found: re.Match[str], variables: dict[str, str]) -> str:
    """The value of `$((...))` with whole numbers; the text itself if it is of another kind."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        name = node.id if isinstance(node, ast.Name) else ast.unparse(node)
        return int(variables.get(name, name))

    try:
        return str(value(ast.parse(_put_in(found[1].strip(), variables), mode="eval").body))
    except (KeyError, SyntaxError, ValueError, ZeroDivisionError):
        return found[0].replace(" ", "")


def _value(text: str) -> Any:
    try:
        return {"True": True, "False": False, "None": None}.get(text, parse_yaml(text, "a value"))
    except ConfigError:
        return text
