"""Reads a shell script: which commands it would start, and with which words.

Nothing of it is run. tree-sitter reads the syntax, this file follows it, and `expand.sh` asks bash
for the value of words, arithmetic and comparisons, from which all that starts a program has been
taken out. What only a run could tell (what a program prints, files, variables from outside) stands
between two `UNKNOWN` characters. A variable from outside counts as unset where the script itself
asks whether it is set, and the script as started without arguments.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from mrlhf.config.imports.words import (
    UNKNOWN,
    asked_bash,
    is_arithmetic,
    names_of,
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
_BY_DEFAULT = (":-", "-", ":=", "=", ":?", "?", ":+", "+")
_PLAIN = re.compile(r"[\w./:,@%^=-]*")
_WITH_KEYS = re.compile(r"[\s(]\[[^\]]*\]=")
_ASSIGNS = re.compile(r"(?<![=!<>])=(?!=)|\+\+|--")
# Besides what starts programs: a `$` that quotes keep apart from a `(`, until an index joins them.
_STARTS_PROGRAMS = re.compile(
    r"`|\$\(|[<>]\(|\$\{!|@[A-Za-z]\}|\$\[|\$(?![\w{#@*?!$-]).*\(", re.DOTALL
)


@dataclass(frozen=True)
class Command:
    """A command that the script would start."""

    words: list[str]
    line: int
    is_certain: bool  # False below a condition that is unknown


@dataclass
class Script:
    """What a script has set and started so far."""

    variables: dict[str, Any] = field(default_factory=lambda: {"HOME": "~"})  # texts and arrays
    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be followed
    _functions: dict[str, Node] = field(default_factory=dict)
    _arguments: list[str] | None = None  # of a function
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
        status: bool | None = method(node)
        return status

    def _follow_children(self, node: Node) -> bool | None:
        return self._follow_all(node.named_children)

    def _follow_command(self, node: Node) -> bool | None:
        before = dict(self.variables)
        words: list[str] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._follow(child)
            elif child.type == "herestring_redirect":
                self._start(["bash", "-c", *self._words(child.named_children[-1:])], node)
            elif "redirect" not in child.type:
                break
        inside = dict(self.variables)
        named = [c for c in node.named_children if c.type != "variable_assignment"]
        is_alone = not [child for child in named if "redirect" not in child.type]
        if is_alone:
            return True
        self.variables = before
        words = self._words([child for child in named if "redirect" not in child.type])
        return self._start(words, node, inside) if words else True

    def _start(
        self, words: list[str], node: Node, inside: dict[str, Any] | None = None
    ) -> bool | None:
        """Note a command, and follow it if it is a function or starts another shell."""
        name = words[0]
        if name in self._functions:
            outer = self._arguments, self._locals
            self._arguments, self._locals = words[1:], {}
            status = self._follow_until(("return",), [self._functions[name]])
            for one, value in self._locals.items():
                self._set(one, value)
            self._arguments, self._locals = outer
            return status
        if name in ("return", "break", "continue", "exit"):
            is_fault = name == "exit" and words[1:] not in ([], ["0"])
            self._stop = "fail" if is_fault else name
            return None
        if name == "test":
            return self._is_true(node)
        if name == "set" and "--" in words:
            self._arguments = words[words.index("--") + 1 :]
            return True
        if name in ("true", ":", "false"):
            return name != "false"
        if name in ("read", "mapfile", "readarray", "let", "getopts"):
            names = [word.partition("=")[0].rstrip("+-*/") for word in words[1:]]
            self.variables |= {one: unknown(f"${one}") for one in names if one.isidentifier()}
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

    def _follow_until(self, stops: tuple[str, ...], *branches: list[Node]) -> bool | None:
        """Follow a function or a loop, up to a `return`, or to a `break`."""
        outer, self._left = self._left, []
        is_one = len(branches) == 1
        status = self._follow_all(branches[0]) if is_one else self._follow_one_of([*branches])
        if self._stop in stops:
            self._stop = ""
        self._merge([dict(self.variables), *self._left])
        self._left = outer
        return status

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
        inner = Script(variables, self.commands, self.notes, self._functions)
        inner._is_certain = self._is_certain
        inner._first_line = line
        inner._steps = self._steps + 100  # so that a text that evaluates itself comes to an end
        inner.follow(text)
        self._steps = inner._steps

    def _follow_redirected_statement(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body")
        names = text_of(body).split()
        for redirect in (one for one in node.named_children if one.type == "heredoc_redirect"):
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
        return self._is_true(node) if node.children[0].type == "((" else self._follow_children(node)

    def _follow_test_command(self, node: Node) -> bool | None:
        return self._is_true(node)

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
            return self._follow_until(("break", "continue"), node.children[-1:], [])
        outer, self._left = self._left, []
        for word in words:
            self.variables[name] = word
            self._follow_all(node.children[-1:])
            self._stop = "" if self._stop == "continue" else self._stop
            if self._stop:
                break
        self._stop = "" if self._stop == "break" else self._stop
        self._merge([dict(self.variables), *self._left])
        self._left = outer
        return None

    def _follow_while_statement(self, node: Node) -> bool | None:
        # A loop over arguments ends at once, since there are none.
        is_of_arguments = re.search(r"\$[#1]|getopts", text_of(node.named_children[0]))
        if is_of_arguments:
            return None
        return self._follow_until(("break", "continue"), node.children[-1:], [])

    def _follow_c_style_for_statement(self, node: Node) -> bool | None:
        name = text_of(node).partition("((")[2].partition("=")[0].strip()
        self.variables[name] = unknown(f"${name}")
        return self._follow_until(("break", "continue"), node.children[-1:], [])

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

    def _words(self, nodes: Iterable[Node]) -> list[str]:
        """The words that these become."""
        words: list[str] = []
        for node in nodes:
            if node.type != "comment":
                words += self._expand(node, "set -- {}")
        return words

    def _is_true(self, node: Node) -> bool | None:
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
            source = re.sub(
                r"\\(.)", lambda m: "${__dollar}" if m[1] == "$" else m[0], source, flags=re.S
            )
        taken = {name: self.variables[name] for name in names_of(node) & self.variables.keys()}
        is_unsafe = _STARTS_PROGRAMS.search(source) is not None
        if is_test and UNKNOWN in "".join(map("".join, (*values.values(), *taken.values()))):
            is_unsafe = True
        source = form.format(source) if not is_unsafe else ""
        pairs = [pair for name in names_of(node) - taken.keys() for pair in ("-", name)]
        for name, value in {**taken, **values}.items():
            items = [value] if isinstance(value, str) else value
            for number, item in enumerate(items):
                pairs += [name if isinstance(value, str) else f"{name}[{number}]", item]
        pairs += [pair for one in self._arguments or [] for pair in ("+", one)]
        found = None if is_unsafe else asked_bash(source, *pairs)
        return [unknown(text)] if found is None else found

    def _rendered(self, node: Node, values: dict[str, Any], is_test: bool) -> str:
        """The source of a node with names instead of what bash may not see; their `values`."""

        def put(value: str) -> str:
            name = f"__{len(values)}"
            values[name] = value
            return f"${{{name}}}"

        kind = node.type
        if kind == "raw_string":
            original = re.sub(r"\$\{([A-Za-z_]\w*)\}(?!\w)", r"$\1", text_of(node)[1:-1])
            return f'"{put(original)}"'
        if kind == "ansi_c_string":
            original = re.sub(r"\$\{([A-Za-z_]\w*)\}(?!\w)", r"$\1", text_of(node))
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
