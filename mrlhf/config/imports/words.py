"""Words of a script: what is unknown of them, and what bash makes of them.

`expand.sh` asks bash for the value of words, arithmetic and comparisons, from which all that starts
a program has been taken out.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from tree_sitter import Node

from mrlhf.errors import ConfigError

UNKNOWN = "\x1e"
# A value is never code to bash, not even beside another: these stand for what begins code.
_HIDDEN = {"$": "\x1c", "(": "\x1f", "`": "\x1d"}
_BY_DEFAULT = (":-", "-", ":=", "=", ":?", "?", ":+", "+")
_PLAIN = re.compile(r"[\w./:,@%^=-]*")
_ASSIGNS = re.compile(r"(?<![=!<>])=(?!=)|\+\+|--")
# Besides what starts programs: a `$` that quotes keep apart from a `(`, until an index joins them.
_STARTS_PROGRAMS = re.compile(
    r"`|\$\(|[<>]\(|\$\{!|@[A-Za-z]\}|\$\[|\$(?![\w{#@*?!$-]).*\(", re.DOTALL
)
_ARITHMETIC = re.compile(r"(?:[\w\s+\-*/%<>=!&|^~?:,();#}]|\$\{|\$\w)*")


def unknown_parts(text: str) -> list[str]:
    """The parts of a word that are unknown."""
    return text.split(UNKNOWN)[1::2]


def shared(values: list[Any], name: str) -> Any:
    """The first words that all values have in common, and a mark for those that follow."""
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
    depths = list(accumulate({"(": 1, ")": -1}.get(letter, 0) for letter in f" {source}"))
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


def _as_written(node: Node) -> str:
    """The source of a quoted text, in which `follow` has put names in braces."""
    return re.sub(r"\$\{([A-Za-z_]\w*)\}(?!\w)", r"$\1", text_of(node))


@dataclass
class Words:
    """The values of a script's variables, and what words become with them."""

    variables: dict[str, Any] = field(default_factory=lambda: {"HOME": "~"})  # texts and arrays
    _arguments: list[str] | None = None  # of a function

    def _words(self, nodes: Iterable[Node]) -> list[str]:
        """The words that these become."""
        words: list[str] = []
        for node in nodes:
            if node.type != "comment":
                words += self._expand(node, "set -- {}")
        return words

    def is_true(self, node: Node) -> bool | None:
        """Whether `[ ]`, `[[ ]]` or `(( ))` holds."""
        text = text_of(node)
        if node.type == "compound_statement" and _ASSIGNS.search(text):
            for name in re.findall(r"[A-Za-z_]\w*", text):
                self.variables[name] = unknown(f"${name}")
            return None
        if re.search(r"\s-[a-mo-yA-Z]\s", re.sub(r"-(eq|ne|[lg][te])\b", "", text)):
            return None  # it asks for a file
        found = self._expand(node, "if {}; then set -- 1; else set -- 0; fi", is_test=True)
        return None if UNKNOWN in "".join(found) else found == ["1"]

    def _expand(self, node: Node | None, form: str, is_test: bool = False) -> list[str]:
        """What bash makes of a node, which stands in the place of {} in the `form` of a command."""
        if node is None:
            return []
        text = text_of(node)
        if _PLAIN.fullmatch(text):
            return [text]

        values: dict[str, Any] = {}
        source = self._rendered(node, values, is_test)
        if "\\$" in source:
            values["__dollar"] = "$"
            source = re.sub(r"(?s)\\(.)", lambda m: "${__dollar}" if m[1] == "$" else m[0], source)
        taken = {name: self.variables[name] for name in names_of(node) & self.variables.keys()}
        is_unsafe = _STARTS_PROGRAMS.search(source) is not None
        if is_test and UNKNOWN in "".join(map("".join, (*values.values(), *taken.values()))):
            is_unsafe = True
        if is_unsafe:
            return [unknown(text)]

        pairs = [pair for name in names_of(node) - taken.keys() for pair in ("-", name)]
        for name, value in {**taken, **values}.items():
            items = [value] if isinstance(value, str) else value
            for number, item in enumerate(items):
                pairs += [name if isinstance(value, str) else f"{name}[{number}]", item]
        pairs += [pair for text in self._arguments or [] for pair in ("+", text)]
        found = asked_bash(form.format(source), *pairs)
        return [unknown(text)] if found is None else found

    def _rendered(self, node: Node, values: dict[str, Any], is_test: bool) -> str:
        """The source of a node with names instead of what bash may not see; their `values`."""

        def put(value: str) -> str:
            name = f"__{len(values)}"
            values[name] = value
            return f"${{{name}}}"

        kind = node.type
        if kind == "raw_string":
            return f'"{put(_as_written(node)[1:-1])}"'
        if kind == "ansi_c_string":
            original = _as_written(node)
            return f'"{put("".join(asked_bash(f"__v={original}") or [unknown(original)]))}"'
        if kind == "command_substitution":
            return put(self._output(node))
        if kind == "arithmetic_expansion":
            return put(self._computed(node))
        if kind in ("simple_expansion", "expansion") and self._is_unknown(node, is_test):
            return put(unknown(text_of(node)))

        source = node.text or b""
        rendered = ""
        at = 0
        for child in (*node.children, None):
            end = len(source) if child is None else child.start_byte - node.start_byte
            gap = source[at:end].decode()
            rendered += gap.replace('"', '\\"') if kind.startswith("heredoc") else gap
            if child is not None:
                rendered += self._rendered(child, values, is_test)
                at = child.end_byte - node.start_byte
        return rendered

    def _is_unknown(self, node: Node, is_test: bool) -> bool:
        """Whether the script alone does not tell the value of `$NAME` or `${...}`."""
        children = [child for child in node.children if child.type not in ("$", "${", "}")]
        name = re.match(r"\w+|.", text_of(children[0 if children[0].is_named else -1]))
        operator = text_of(children[1]) if children[0].is_named and children[1:] else ""
        key = name[0] if name else ""
        if key in ("@", "*") or operator in _BY_DEFAULT:
            return False
        if key.isdecimal() or key == "#":
            return self._arguments is None or key == "0"

        if key not in self.variables:
            if "[" in text_of(children[0]):
                return False  # no array comes from outside
            parent = node.parent
            while parent is not None and parent.type == "string":
                parent = parent.parent
            asks = is_test and parent is not None and text_of(parent).startswith(("-n", "-z"))
            return not asks
        is_changed = bool(operator) or not children[0].is_named
        return is_changed and UNKNOWN in "".join(self.variables[key])

    def _computed(self, node: Node) -> str:
        """The value of `$((...))`, of whole numbers alone."""
        values: dict[str, Any] = {}
        source = "".join(self._rendered(child, values, False) for child in node.children)
        names = names_of(node) & self.variables.keys()
        taken = {**{name: self.variables[name] for name in names}, **values}
        is_known = names_of(node) <= names and not _ASSIGNS.search(source)
        is_known = is_known and is_arithmetic(source.removeprefix("$((").removesuffix("))"))
        for value in taken.values():
            is_known = is_known and re.fullmatch(r"[-+]?\w+", "".join(value)) is not None
        pairs = [part for pair in taken.items() for part in pair if isinstance(part, str)]
        found = asked_bash(f"set -- {source}", *pairs) if is_known else None
        return found[0] if found else unknown(text_of(node))

    def _output(self, node: Node) -> str:
        """What `$(...)` prints, of the programs that only change text."""
        commands = node.named_children
        is_one = len(commands) == 1 and commands[0].type == "command"
        words = self._words(commands[0].named_children) if is_one else []
        name, *rest = [word for word in words if word != "--"] or [""]
        if rest and UNKNOWN not in "".join(rest):
            if name == "basename":
                return posixpath.basename(rest[0].rstrip("/")).removesuffix("".join(rest[1:2]))
            if name == "dirname":
                return posixpath.dirname(rest[0].rstrip("/")) or "."
            if name == "echo" and not rest[0].startswith("-"):
                return " ".join(rest)
            if name == "expr" and all(re.fullmatch(r"-?\d+|[-+*/%()]", word) for word in rest):
                return "".join(asked_bash(f"set -- $(({' '.join(rest)}))") or [])
        return unknown(text_of(node))
