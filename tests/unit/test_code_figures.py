"""The figures of a checkout, counted by hand on sources that are spelled out here."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.code_figures import (
    Function,
    SourceFile,
    figures_row,
    figures_table,
    files_that_mention,
    functions_of,
    read_checkout,
    trace_table,
)

NESTED = '''\
import os


class Place:
    def name(self, path):
        """One line.

        And another.
        """
        # why
        first = path

        def inner(x):
            text = """a

            b"""
            return x + text

        return inner(first)

    async def empty(self): ...
'''
FLAT = "def flat():\n" + "    x = 1\n" * 15
BROKEN = "def broken():\n" + "    x = 1\n" * 7 + "\n" + "    x = 1\n" * 7
SHORT = "def short():\n" + "    x = 1\n" * 14


def test_a_body_is_without_docstring_and_nested_functions() -> None:
    assert functions_of(NESTED) == [
        # `first = path`, the blank lines around `inner`, and the return.
        Function("Place.name", lines=15, body_lines=4, blank_lines=2),
        # The blank line stands in a string.
        Function("Place.name.inner", lines=5, body_lines=4, blank_lines=0),
        Function("Place.empty", lines=1, body_lines=1, blank_lines=0),
    ]


def test_a_function_of_only_a_docstring_has_no_body() -> None:
    source = 'def f():\n    """Nothing.\n\n    At all.\n    """\n'
    assert functions_of(source) == [Function("f", lines=5, body_lines=0, blank_lines=0)]


def test_figures_of_several_files() -> None:
    wide = "x = 1  # " + "-" * 91 + "\n"
    assert len(wide) == 101  # 100 columns and the line's end

    sources = [
        SourceFile("a/one.py", FLAT + BROKEN + SHORT),
        SourceFile("a/b/two.py", wide + "#" + wide),
    ]

    assert figures_row("a", sources) == [
        *("a", "2", "49", "a/one.py (47)", "a/one.py: flat (16)", "1 of 2 (50 %)", "1")
    ]
    assert figures_row("none", []) == ["none", "0", "0", "", "", "0 of 0", "0"]


def test_one_row_a_folder_and_one_for_all() -> None:
    sources = [
        SourceFile("setup.py", "x = 1\n"),
        SourceFile("mrlhf/one.py", FLAT),
        SourceFile("mrlhf/two.py", BROKEN),
    ]
    assert figures_table(sources).splitlines()[2:] == [
        "| . | 1 | 1 | setup.py (1) |  | 0 of 0 | 0 |",
        "| mrlhf | 2 | 32 | mrlhf/one.py (16) | mrlhf/one.py: flat (16) | 1 of 2 (50 %) | 0 |",
        "| all | 3 | 33 | mrlhf/one.py (16) | mrlhf/one.py: flat (16) | 1 of 2 (50 %) | 0 |",
    ]


def test_a_trace_counts_files_of_the_package_alone() -> None:
    sources = [
        SourceFile("mrlhf/one.py", "clip_ratio_high = 1\nclip_ratio_high = 2\n"),
        SourceFile("mrlhf/rl/two.py", "Slot = clip_ratio = 1\n"),
        SourceFile("tests/three.py", "clip_ratio_high = Slot = 1\n"),
    ]
    assert files_that_mention("slots|Slot", sources) == ["mrlhf/rl/two.py"]
    traces = ["clip_ratio_high", "a clip=clip_ratio", "equal=clip_ratio = 1"]
    assert trace_table(traces, sources).splitlines()[2:] == [
        "| clip_ratio_high | 1 |",
        "| a clip | 2 |",
        "| equal | 1 |",
    ]


def test_only_tracked_python_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("package/kept.py", "package/new.py", "package/gone.py", "notes.md"):
        (tmp_path / name).write_text("x = 1\n")
    tracked = ["package/kept.py", "package/gone.py", "notes.md"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", *tracked], check=True)
    (tmp_path / "package" / "gone.py").unlink()
    assert read_checkout(tmp_path) == [SourceFile("package/kept.py", "x = 1\n")]
