"""What determines each picture of README and docs that is taken of a page or a terminal, as a hash.

`tools/screenshots.py` writes it into the PNG, so that it cannot be brought up to date without the
picture; `tests/unit/test_pictures.py` compares. The hash is of what is seen, not of whole files:
of the page, the declarations of its script that draw the view, with all that they name, its style,
and the data that a made-up run gives it; of the terminal, what is drawn of a made-up board.
Comments, indents and numbers do not count.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import struct
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from mrlhf.metrics.table import COLUMNS as CURVES
from mrlhf.report.write import write_report
from mrlhf.run.alarms.watch import Alarm
from mrlhf.run.board import Board, ShownSample
from mrlhf.run.terminal import render
from tools.report_run import RunSize, write_run

COLUMNS, ROWS = 110, 32  # of the terminal
VIEWS = {"english.png": "overview", "report.png": "overview", "rollouts.png": "inspector"}
TERMINAL = "terminal.png"
# The functions and constants of tools/screenshots.py that take them.
_TAKEN_BY = {
    "english.png": ("WINDOW", "_picture_overview"),
    "report.png": ("WINDOW", "_picture_overview"),
    "rollouts.png": ("WINDOW", "_picture_rollouts"),
    TERMINAL: ("TERMINAL_PAGE", "_picture_terminal", "_lines", "_color"),
}
_KEYWORD = b"mrlhf-drawn-by"
_PNG_HEADER = 33  # bytes of the signature and the first chunk
_DECLARATION = re.compile(r"(?:async )?(?:function\*?|const|let|class|var) (\w+)")
_LIBRARY = "uPlot"  # one declaration, whose short names are its own


def drawn_by(picture: str, page: str | None = None) -> str:
    """The hash of what determines a picture; `page` is the report, if it is of one."""
    tools = (Path(__file__).with_name("screenshots.py")).read_text(encoding="utf-8")
    parts = [_plain(_definition(tools, name)) for name in _TAKEN_BY[picture]]
    if picture in VIEWS:
        text, data = made_up_page()
        parts += [*parts_of_view(page or text, VIEWS[picture]), data]
    else:
        parts.append(_without_numbers(terminal_text()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def mark(file: Path, digest: str) -> None:
    """Write the hash into a PNG, as a chunk of text."""
    png = file.read_bytes()
    chunk = b"tEXt" + _KEYWORD + b"\0" + digest.encode("ascii")
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    file.write_bytes(png[:_PNG_HEADER] + chunk + png[_PNG_HEADER:])


def mark_of(file: Path) -> str | None:
    """The hash in a PNG; None if it has none."""
    found = re.search(_KEYWORD + b"\0([0-9a-f]{64})", file.read_bytes())
    return found[1].decode("ascii") if found else None


def made_up_page() -> tuple[str, str]:
    """The report of a small made-up run, and its data without numbers."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        write_run(run, RunSize(steps=2, samples=2, tokens=4, ranks=1))
        write_report([run], Path(directory) / "report.html", most_samples=10)
        page = (Path(directory) / "report.html").read_text(encoding="utf-8")
    data = page.partition('<script type="application/json" id="report">')[2]
    data = data.partition("</script>")[0].replace(Path(directory).name, "")
    return page, _without_numbers(data)


def parts_of_view(page: str, view: str) -> list[str]:
    """The style and the declarations of the script that draw a view of a page."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    script = page.partition("<script>")[2].partition("</script>")[0]
    # The last file has the frame around all views, and names them.
    *files, frame = re.split(r'^"use strict";$', script, flags=re.MULTILINE)
    declared = _declarations("\n".join(files))

    seen = {view}
    to_follow = [view]
    while to_follow:
        name = to_follow.pop()
        words = set() if name == _LIBRARY else set(re.findall(r"\w+", declared[name]))
        found = (words & declared.keys()) - seen
        seen |= found
        to_follow += found
    return [_plain(style), *(declared[name] for name in sorted(seen)), _plain(frame)]


def _declarations(script: str) -> Mapping[str, str]:
    """Each declaration of a script that stands in no other, by its name."""
    lines: dict[str, list[str]] = {}
    name = ""
    for line in script.splitlines():
        if found := _DECLARATION.match(line):
            name = found[1]
        lines.setdefault(name, []).append(line)
    return {name: _plain("\n".join(some)) for name, some in lines.items()}


def terminal_text() -> str:
    """What a terminal shows of a made-up run, with the style of each piece.

    The codes of colors would depend on what the process has drawn before: rich keeps them.
    """
    alarm = Alarm(3, "truncation", "warning", "some are cut off", "long", "data.x", "docs")
    board = Board(
        state="training",
        step=15,
        steps=60,
        seconds_left=96.0,
        curves={label: [0.0, 1.0, 0.5] for label, _ in CURVES},
        alarms=[alarm],
        sample=ShownSample("held-out", "held-out prompts, greedy", "prompt\nresponse"),
    )
    board.phases.name = "update_actor"
    board.phases.advance(3, 4, "mini-batches")
    console = Console(
        file=io.StringIO(),
        width=COLUMNS,
        height=ROWS,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
    )
    pieces = console.render(render(board, "runs/demo-again"))
    return "".join(f"[{piece.style}]{piece.text}" for piece in pieces)


def _definition(source: str, name: str) -> str:
    """The source of a function or a constant of a file."""
    for node in ast.parse(source).body:
        names = [ast.unparse(target) for target in getattr(node, "targets", [])]
        if name in (*names, getattr(node, "name", None)):
            return ast.get_source_segment(source, node) or ""
    raise LookupError(name)


def _plain(text: str) -> str:
    """Code without comments on lines of their own, blank lines and indents."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(("//", "# ")))


def _without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.]*(e[+-]?\d+)?", "0", text).replace("-0", "0")
