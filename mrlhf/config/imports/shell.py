"""Reads a shell script: which commands it would start, and with which words.

Nothing of it is run. tree-sitter reads the syntax, this file follows it, and `words` asks bash for
values. What only a run could tell (what a program prints, files, variables from outside) stands
between two `UNKNOWN` characters. A variable from outside counts as unset where the script itself
asks whether it is set, and the script as started without arguments.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from mrlhf.config.imports.words import (
    UNKNOWN,
    Words,
    shared,
    shown,
    text_of,
    unknown,
    without_nested_arithmetic,
)
from mrlhf.errors import ConfigError

_LANGUAGE = Language(tree_sitter_bash.language())
_MOST_STEPS = 4_000  # statements, those of a loop each time
_LONGEST = 100_000  # characters of a value; bash takes no argument that is longer than 128 KiB
_RUNNERS = ("bash", "sh", "zsh", "eval", "ssh", "sbatch", "su", "tmux", "screen")
_TESTS = ("test_command", "compound_statement", "negated_command", "list")
_ASKS = {"test", "grep", "egrep", "which", "command", "type", "hash", "pgrep", "diff", "cmp"}
_WITH_KEYS = re.compile(r"[\s(]\[[^\]]*\]=")


def _is_before_words(node: Node) -> bool:
    """Whether a part of a command is an assignment or a redirection."""
    return node.type == "variable_assignment" or "redirect" in node.type


@dataclass(frozen=True)
class Command:
    """A command that the script would start."""

    words: list[str]
    line: int
    is_certain: bool  # False below a condition that is unknown


@dataclass
class Script(Words):
    """What a script has set and started so far."""

    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be followed
    _functions: dict[str, Node] = field(default_factory=dict)
    _locals: dict[str, Any] | None = None  # what its own variables hide
    _stop: str = ""  # return, break, continue, exit, or fail: an exit that tells of a fault
    _left: list[dict[str, Any]] = field(default_factory=list)  # variables of branches that stopped
    _is_certain: bool = True
    _first_line: int = 1
    _steps: int = 0

    def follow(self, text: str) -> None:
        """Follow a whole script; ConfigError if it is too deep or too long, or without bash."""
        # The grammar misreads $a/b/$c/$d, and not ${a}/b/${c}/${d}.
        text = re.sub(r"(?<!\\)\$([A-Za-z_]\w*)", r"${\1}", text.replace("\r\n", "\n"))
        root = Parser(_LANGUAGE).parse(without_nested_arithmetic(text).encode()).root_node
        try:
            for node in root.children:
                if node.type == "command" and text_of(node).split()[:1] == ["exit"]:
                    break
                self._follow_all([node])
        except RecursionError:
            raise ConfigError("the script is nested too deep") from None

    def _line(self, node: Node) -> int:
        return node.start_point[0] + self._first_line

    def _follow_all(self, nodes: Iterable[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            if not self._stop:
                status = self._follow(node)
        return status

    def _follow(self, node: Node) -> bool | None:
        """Follow a statement; whether it succeeds, None if only a run could tell."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise ConfigError(f"line {self._line(node)}: the script takes too many steps")
        if node.type == "ERROR":
            self.notes.append(f"line {self._line(node)} is no shell that can be read; left out")
        method = getattr(self, f"_follow_{node.type}", self._follow_children)
        return method(node)

    def _follow_children(self, node: Node) -> bool | None:
        return self._follow_all(node.named_children)

    def _follow_command(self, node: Node) -> bool | None:
        before = dict(self.variables)
        leading = list(takewhile(_is_before_words, node.named_children))
        for child in leading:
            if child.type == "variable_assignment":
                self._follow(child)
            elif child.type == "herestring_redirect":
                self._start(["bash", "-c", *self._words(child.named_children[-1:])], node)
        parts = node.named_children[len(leading) :]
        if not parts:
            return True

        inside = dict(self.variables)
        self.variables = before
        words = self._words(part for part in parts if not _is_before_words(part))
        return self._start(words, node, inside) if words else True

    def _start(
        self, words: list[str], node: Node, inside: dict[str, Any] | None = None
    ) -> bool | None:
        """Note a command, and follow it if it is a function or starts another shell."""
        name = words[0]
        if name in self._functions:
            outer = self._arguments, self._locals
            self._arguments, self._locals = words[1:], {}
            with self._until("return"):
                status = self._follow(self._functions[name])
            for hidden, value in self._locals.items():
                self._set(hidden, value)
            self._arguments, self._locals = outer
            return status

        if name in ("return", "break", "continue", "exit"):
            is_fault = name == "exit" and words[1:] not in ([], ["0"])
            self._stop = "fail" if is_fault else name
            return None
        if name == "test":
            return self.is_true(node)
        if name == "set" and "--" in words:
            self._arguments = words[words.index("--") + 1 :]
            return True
        if name in ("true", ":", "false"):
            return name != "false"

        if name in ("read", "mapfile", "readarray", "let", "getopts"):
            names = [word.partition("=")[0].rstrip("+-*/") for word in words[1:]]
            self.variables |= {key: unknown(f"${key}") for key in names if key.isidentifier()}
        elif name == "shift" and self._arguments:
            del self._arguments[: int(words[1]) if words[1:] and words[1].isdecimal() else 1]
        elif name in ("source", "."):
            self.notes.append(f"line {self._line(node)}: {shown(' '.join(words))} was not read")
        else:
            if name != "eval":
                self.commands.append(Command(words, self._line(node), self._is_certain))
            self._follow_texts(words, node, self.variables if inside is None else inside)
        return None

    def _set(self, name: str, value: Any) -> None:
        self.variables.pop(name, None)
        if value is not None:
            self.variables[name] = value

    @contextmanager
    def _until(self, *stops: str) -> Iterator[None]:
        """Follow the body of a function or a loop, which these statements end, and no more."""
        outer, self._left = self._left, []
        yield
        self._stop = "" if self._stop in stops else self._stop
        self._merge([dict(self.variables), *self._left])
        self._left = outer

    def _follow_perhaps(self, body: list[Node]) -> bool | None:
        """Follow the body of a loop that may have no turn."""
        with self._until("break", "continue"):
            return self._follow_one_of([body, []])

    def _follow_subshell(self, node: Node) -> bool | None:
        before = dict(self.variables)
        status = self._follow_children(node)
        self.variables.clear()
        self.variables |= before
        self._stop = ""
        return status

    _follow_pipeline = _follow_subshell

    def _follow_texts(self, words: list[str], node: Node, inside: dict[str, Any]) -> None:
        """Follow the words that are scripts: `bash -c`, `eval`, `ssh`, `sbatch --wrap`."""
        names = {posixpath.basename(word) for word in words}
        if words[0] == "eval":
            self._follow_text(" ".join(words[1:]), self.variables, self._line(node))
        elif not names.isdisjoint(_RUNNERS):
            for word in words[1:]:
                text = word.removeprefix("--wrap=")
                if re.search(r"\s", text) and "=" not in text.split()[0].lstrip("-"):
                    self._follow_text(text, dict(inside), self._line(node))

    def _follow_text(self, text: str, variables: dict[str, Any], line: int) -> None:
        inner = Script(variables, None, self.commands, self.notes, self._functions)
        inner._is_certain = self._is_certain
        inner._first_line = line
        inner._steps = self._steps + 100  # so that a text that evaluates itself comes to an end
        inner.follow(text)
        self._steps = inner._steps

    def _follow_redirected_statement(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body")
        names = text_of(body).split()
        for redirect in (c for c in node.named_children if c.type == "heredoc_redirect"):
            parts = {child.type: child for child in redirect.children}
            text = text_of(parts["heredoc_body"]) if "heredoc_body" in parts else ""
            if text and text_of(parts["heredoc_start"])[0] not in "'\"\\":
                text = "".join(self._expand(parts["heredoc_body"], '__v="{}"'))
            if names[:1] == ["read"]:
                self.variables[names[-1]] = text.rstrip("\n")
                return True

            is_data = re.search(r"\.(ya?ml|jsonl?|py|toml|txt|md)\b", text_of(node).split("\n")[0])
            if (names[:1] in (["cat"], ["tee"]) and not is_data) or not {*names}.isdisjoint(
                _RUNNERS
            ):
                self._follow_text(text, dict(self.variables), self._line(redirect))
            self._follow_all(
                c for c in redirect.named_children if c.type in ("pipeline", "command")
            )
        return None if body is None else self._follow(body)

    def _follow_variable_assignment(self, node: Node) -> bool:
        target = node.child_by_field_name("name")
        value = node.child_by_field_name("value")
        name, _, index = text_of(target).removesuffix("]").partition("[")
        old = self.variables.get(name)
        new: Any = ""
        if value is not None:
            found = self._expand(value, "__v={}")
            new = found if value.type == "array" else "".join(found)
            if value.type == "array" and _WITH_KEYS.search(text_of(value)):
                new = unknown(f"${name}")  # its values have keys, not places

        if index:
            is_next = isinstance(old, list) and index == str(len(old))
            new = [*(old or []), new] if is_next else unknown(f"${name}")
        elif node.children[1].type == "+=" and old is not None:
            if isinstance(old, list):
                new = [*old, *new] if isinstance(new, list) else [old[0] + new, *old[1:]]
            else:
                new = [old, *new] if isinstance(new, list) else old + new

        if len("".join(new)) > _LONGEST:
            raise ConfigError(f"line {self._line(node)}: ${name} becomes too long")
        self.variables[name] = new
        return True

    def _follow_declaration_command(self, node: Node) -> bool:
        for child in node.named_children:
            name = re.split(r"\W", text_of(child.child_by_field_name("name") or child))[0]
            is_own = text_of(node.children[0]) in ("local", "declare", "typeset")
            if is_own and self._locals is not None and name not in self._locals:
                self._locals[name] = self.variables.get(name)
            if child.type == "variable_assignment":
                self._follow(child)
        return True

    def _follow_unset_command(self, node: Node) -> bool:
        for child in node.named_children:
            self.variables.pop(text_of(child), None)
        return True

    def _follow_function_definition(self, node: Node) -> bool:
        self._functions[text_of(node.child_by_field_name("name"))] = node.children[-1]
        return True

    def _follow_compound_statement(self, node: Node) -> bool | None:
        return self.is_true(node) if node.children[0].type == "((" else self._follow_children(node)

    _follow_test_command = Words.is_true

    def _follow_negated_command(self, node: Node) -> bool | None:
        status = self._follow_children(node)
        return None if status is None else not status

    def _follow_list(self, node: Node) -> bool | None:
        first = node.named_children[0]
        is_and = any(child.type == "&&" for child in node.children)
        status = self._follow(first)
        asks = {part.split()[0] for part in text_of(first).split("|") if part.split()} & _ASKS
        if status is None and (first.type in _TESTS or asks):
            return self._follow_one_of([node.named_children[1:], []])
        # A command is taken to succeed.
        goes_on = (status is not False) is is_and
        return self._follow_branch(node.named_children[1:]) if goes_on else status

    def _follow_if_statement(self, node: Node) -> bool | None:
        """Follow the branch that is taken; if that is unknown, each by itself."""
        possible: list[list[Node]] = []
        clauses = [c for c in node.named_children if c.type in ("elif_clause", "else_clause")]
        for clause in (node, *clauses):
            marks = [n for n, c in enumerate(clause.children) if c.type in ("then", "else")]
            at = marks[0] if marks else 0
            condition = [child for child in clause.children[:at] if child.is_named]
            status = self._follow_all(condition)

            if status is not False:
                body = [child for child in clause.children[at:] if child.is_named]
                possible.append([child for child in body if child not in clauses])
            if status:
                break
        else:
            possible.append([])
        return self._follow_one_of(possible)

    def _follow_case_statement(self, node: Node) -> bool | None:
        [value] = self._expand(node.child_by_field_name("value"), "__v={}") or [""]
        possible: list[list[Node]] = []
        for item in (child for child in node.named_children if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            texts = ["".join(self._expand(pattern, "__v={}")) for pattern in patterns]
            if UNKNOWN in value or any(fnmatch.fnmatchcase(value, text) for text in texts):
                possible.append([c for c in item.named_children if c not in patterns])
                if UNKNOWN not in value:
                    break
        return self._follow_one_of([*possible, []] if UNKNOWN in value else possible or [[]])

    def _follow_for_statement(self, node: Node) -> bool | None:
        name = text_of(node.child_by_field_name("variable"))
        words = self._words(node.children_by_field_name("value"))
        if UNKNOWN in "".join(words):
            self.variables[name] = unknown(f"${name}")
            return self._follow_perhaps(node.children[-1:])

        with self._until("break"):
            for word in words:
                self.variables[name] = word
                self._follow_all(node.children[-1:])
                self._stop = "" if self._stop == "continue" else self._stop
                if self._stop:
                    break
        return None

    def _follow_while_statement(self, node: Node) -> bool | None:
        # A loop over arguments ends at once, since there are none.
        is_of_arguments = re.search(r"\$[#1]|getopts", text_of(node.named_children[0]))
        return None if is_of_arguments else self._follow_perhaps(node.children[-1:])

    def _follow_c_style_for_statement(self, node: Node) -> bool | None:
        name = text_of(node).partition("((")[2].partition("=")[0].strip()
        self.variables[name] = unknown(f"${name}")
        return self._follow_perhaps(node.children[-1:])

    def _follow_one_of(self, branches: list[list[Node]]) -> bool | None:
        """Follow each branch from here on; what they leave different is unknown."""
        if len(branches) == 1:
            self._follow_branch(branches[0])
            return None

        before = dict(self.variables)
        was_certain = self._is_certain
        self._is_certain = False
        after: list[dict[str, Any]] = []
        for branch in branches:
            self.variables.clear()
            self.variables |= before
            self._follow_all(branch)
            if not self._stop:
                after.append(dict(self.variables))
            elif self._stop not in ("exit", "fail"):
                self._left.append(dict(self.variables))
            self._stop = ""

        self._is_certain = was_certain
        self._merge(after or [before])
        return None

    def _follow_branch(self, nodes: list[Node]) -> bool | None:
        """Follow the branch that is taken; a script that only tells of a fault goes on."""
        status = self._follow_all(nodes)
        if self._stop == "fail":
            self._stop = ""
        return status

    def _merge(self, after: list[dict[str, Any]]) -> None:
        """Keep what is the same after each branch."""
        for name in {name for variables in after for name in variables}:
            self._set(name, shared([variables.get(name) for variables in after], name))
