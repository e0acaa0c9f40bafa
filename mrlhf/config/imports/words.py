"""Words of a script: what is unknown of them, and what bash makes of them."""

from __future__ import annotations

import re
import subprocess
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from tree_sitter import Node

from mrlhf.errors import ConfigError

UNKNOWN = "\x1e"
# A value is never code to bash, not even beside another: these stand for what begins code.
_HIDDEN = {"$": "\x1c", "(": "\x1f", "`": "\x1d"}
_ARITHMETIC = re.compile(r"(?:[\w\s+\-*/%<>=!&|^~?:,();#}]|\$\{|\$\w)*")


def unknown_parts(text: str) -> list[str]:
    """The parts of a word that are unknown."""
    return text.split(UNKNOWN)[1::2]


def shared(values: list[Any], name: str) -> Any:
    """What the values have in common at their beginning, by words, and an unknown word."""
    if all(value == values[0] for value in values):
        return values[0]
    if None in values or len({type(value) for value in values}) > 1:
        return unknown(f"${name}")
    is_text = isinstance(values[0], str)
    words = [re.findall(r"\s*\S+", value) if is_text else value for value in values]
    same: list[str] = []
    for word, *others in zip(*words, strict=False):
        if any(other != word for other in others):
            break
        same.append(word)
    other = unknown(f"${name}")
    return ("".join(same) + " " * bool(same) + other) if is_text else [*same, other]


def shown(text: str) -> str:
    """The text without its marks."""
    return text.replace(UNKNOWN, "").replace("\xa0", " ")


def unknown(text: str) -> str:
    """A mark for what is unknown; it stays one word."""
    return UNKNOWN + re.sub(r"\s+", "\xa0", shown(text)) + UNKNOWN


def without_nested_arithmetic(text: str) -> str:
    """The script with (( in place of each $(( inside another one, which the grammar misreads."""
    return "\n".join(map(_flat, text.split("\n")))


def _flat(line: str) -> str:
    depth = 0
    parts = re.split(r"(\$\(\(|[()])", line)
    for number, part in enumerate(parts):
        if part == "$((":
            parts[number] = "((" if depth else part
            depth += 2
        elif depth and part in ("(", ")"):
            depth += 1 if part == "(" else -1
    return line if depth else "".join(parts)


def text_of(node: Node | None) -> str:
    """The source of a node; nothing of none."""
    return "" if node is None or node.text is None else node.text.decode()


def is_arithmetic(source: str) -> bool:
    """Whether bash reads $((source)) as numbers, and not as $(...) of a program in brackets."""
    depths = list(accumulate({"(": 1, ")": -1}.get(one, 0) for one in f" {source}"))
    return bool(_ARITHMETIC.fullmatch(source)) and min(depths) == depths[-1] == 0


def names_of(node: Node) -> set[str]:
    """The variables that a node names."""
    own = {text_of(node)} if node.type == "variable_name" else set()
    return own.union(*(names_of(child) for child in node.children)) - {"@", "*"}


@lru_cache(maxsize=1000)
def asked_bash(source: str, *pairs: str) -> list[str] | None:
    """The words or the value that a line of bash leaves; None if it fails."""
    hidden_pairs = "\0".join(pairs)
    for plain, hidden in _HIDDEN.items():
        hidden_pairs = hidden_pairs.replace(plain, hidden)
    lines = Path(__file__).with_name("expand.sh").read_text(encoding="utf-8")
    tell = 'set -- "${__v[@]}"\n' if source.startswith("__v=") else ""
    lines += f'{source}\n{tell}for __w; do printf "%s\\0" "$__w"; done\n'
    command = ["bash", "--noprofile", "--norc", "-c", lines, "expand.sh"]
    command += hidden_pairs.split("\0") if pairs else []
    try:
        done = subprocess.run(
            command, env={"LC_ALL": "C.UTF-8", "HOME": "~"}, capture_output=True, timeout=10
        )
    except FileNotFoundError as error:
        raise ConfigError("reading a script needs bash, which is not on this machine") from error
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if done.returncode or done.stderr:
        return None
    text = done.stdout.decode(errors="replace")
    for plain, hidden in _HIDDEN.items():
        text = text.replace(hidden, plain)
    return text.split("\0")[:-1]
