"""Measures the Python files of a checkout and prints the figures as Markdown tables.

Usage: tools/code_figures.py [DIR] [--trace LABEL=REGEX ...]

It knows the syntax of Python, and nothing of what the code does.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MAX_COLUMNS = 100
LONG_BODY = 15  # from this many lines on, a body should have paragraphs
TRACED_FOLDER = "mrlhf"


@dataclass(frozen=True)
class Function:
    """One function or method."""

    name: str  # where it stands, such as "Actor.update.run"
    lines: int  # from its `def` to its end
    body_lines: int  # from the statement after the docstring to the end, without nested functions
    blank_lines: int  # how many of `body_lines` are blank


@dataclass(frozen=True)
class SourceFile:
    """One file: its path inside the checkout, and its text."""

    path: str
    text: str

    @property
    def lines(self) -> list[str]:
        """The lines, without their ends."""
        return self.text.splitlines()

    @property
    def folder(self) -> str:
        """The topmost folder, or "." for a file at the top."""
        parts = PurePosixPath(self.path).parts
        return parts[0] if len(parts) > 1 else "."


def read_checkout(directory: Path) -> list[SourceFile]:
    """The Python files that git tracks in `directory`."""
    command = ["git", "-C", str(directory), "ls-files", "-z", "--", "*.py"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    paths = [path for path in listing.split("\0") if path and (directory / path).is_file()]
    return [SourceFile(path, (directory / path).read_text(encoding="utf-8")) for path in paths]


def functions_of(text: str) -> list[Function]:
    """The functions of a file, outer before inner."""
    tree = ast.parse(text)
    blank = _blank_lines(text, tree)
    return [_measure(name, node, blank) for name, node in _definitions(tree, "")]


def figures_row(label: str, sources: list[SourceFile]) -> list[str]:
    """The cells of a table's row on the files together."""
    sizes = [(source.path, len(source.lines)) for source in sources]
    columns = [len(line) for source in sources for line in source.lines]
    functions = []
    function_sizes = []
    for source in sources:
        for function in functions_of(source.text):
            functions.append(function)
            function_sizes.append((f"{source.path}: {function.name}", function.lines))

    long = [function for function in functions if function.body_lines >= LONG_BODY]
    unbroken = sum(function.blank_lines == 0 for function in long)
    share = f" ({100 * unbroken / len(long):.0f} %)" if long else ""
    return [
        label,
        str(len(sources)),
        str(sum(lines for _, lines in sizes)),
        _largest(sizes),
        _largest(function_sizes),
        f"{unbroken} of {len(long)}{share}",
        str(sum(width > MAX_COLUMNS for width in columns)),
    ]


def files_that_mention(pattern: str, sources: list[SourceFile]) -> list[str]:
    """Paths under `TRACED_FOLDER` of the files in which the regular expression is found."""
    return [
        source.path
        for source in sources
        if source.folder == TRACED_FOLDER and re.search(pattern, source.text)
    ]


def figures_table(sources: list[SourceFile]) -> str:
    """One row a top folder, and one for all files."""
    by_folder: dict[str, list[SourceFile]] = {}
    for source in sources:
        by_folder.setdefault(source.folder, []).append(source)

    rows = [figures_row(folder, by_folder[folder]) for folder in sorted(by_folder)]
    rows.append(figures_row("all", sources))
    lines = [
        f"| folder | files | lines | largest file | largest function | of {LONG_BODY} or more body "
        f"lines: no blank line | lines over {MAX_COLUMNS} columns |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]
    return "\n".join(lines)


def trace_table(traces: list[str], sources: list[SourceFile]) -> str:
    """One row a trace, given as "LABEL=REGEX" or as a regular expression that is its own label."""
    lines = [f"| trace | files under {TRACED_FOLDER}/ that mention it |", "|---|---|"]
    for trace in traces:
        label, separator, pattern = trace.partition("=")
        mentions = files_that_mention(pattern if separator else label, sources)
        lines.append(f"| {label} | {len(mentions)} |")
    return "\n".join(lines)


def _definitions(
    parent: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _definitions(node, f"{prefix}{node.name}." if named else prefix)


def _measure(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef, blank: set[int]) -> Function:
    has_docstring = ast.get_docstring(node) is not None
    statements = node.body[1:] if has_docstring else node.body
    first = statements[0].lineno if statements else node.end_lineno + 1

    body = set(range(first, node.end_lineno + 1))
    for _, nested in _definitions(node, ""):
        body -= set(range(nested.lineno, nested.end_lineno + 1))
    return Function(name, node.end_lineno - node.lineno + 1, len(body), len(body & blank))


def _blank_lines(text: str, tree: ast.AST) -> set[int]:
    """Numbers of the blank lines that part statements; those inside a string do not."""
    blank = {number for number, line in enumerate(text.splitlines(), 1) if not line.strip()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            blank -= set(range(node.lineno, node.end_lineno + 1))
    return blank


def _largest(sizes: list[tuple[str, int]]) -> str:
    """The first of the largest, with its size; empty if there is none."""
    if not sizes:
        return ""
    name, lines = max(sizes, key=lambda size: size[1])
    return f"{name} ({lines})"


def main() -> None:
    """Parse, read, print."""
    parser = argparse.ArgumentParser(description="Print figures of a checkout's Python files.")
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=Path(),
        metavar="DIR",
        help="the checkout; default: the current directory",
    )
    parser.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="LABEL=REGEX",
        help=f"count the files under {TRACED_FOLDER}/ that mention REGEX; without LABEL= the "
        "expression is its own label; may be repeated",
    )
    arguments = parser.parse_args()

    try:
        sources = read_checkout(arguments.directory)
    except subprocess.CalledProcessError as error:
        parser.error(error.stderr.strip())

    print(figures_table(sources))
    if arguments.trace:
        print()
        print(trace_table(arguments.trace, sources))


if __name__ == "__main__":
    main()
