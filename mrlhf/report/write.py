"""Writes the report of one or several runs as one HTML file that needs nothing else.

The page's own files are in `page/`; this file puts them together with the data. It does not know
what the page shows.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrlhf.data.sample_table import written_whole
from mrlhf.report.run_files import RunFiles, differing_keys, read_run
from mrlhf.report.samples import PackedSamples, pack_samples
from mrlhf.run.terminal import PHASES

_ORIGIN = ("began", "updated", "ranks", "host", "command", "code")  # keys of the two files
_PAGE = Path(__file__).with_name("page")
_STYLES = ("uplot/uPlot.min.css", "report.css")
_SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "elements.js",
    "data.js",
    "charts.js",
    "held_out.js",
    "overview.js",
    "curves.js",
    "histograms.js",
    "turns.js",
    "tokens.js",
    "inspector.js",
    "timeline.js",
    "main.js",
)


def write_report(directories: Sequence[Path], output: Path, most_samples: int) -> int:
    """Write the report of runs as one file, and return its size in bytes.

    `most_samples` is for all runs together; they share the room equally.

    Raises:
        DataError: a directory holds no run, or a file of it is damaged.
    """
    runs = [read_run(directory) for directory in directories]
    differing = differing_keys(runs)
    samples = [pack_samples(run.dumps, most_samples // len(runs)) for run in runs]
    described = [
        _describe(run, packed, output.parent) for run, packed in zip(runs, samples, strict=True)
    ]

    title = ", ".join(run.name for run in runs)
    data = {"title": title, "differing": differing, "runs": described, "phases": {**PHASES}}
    blocks = [*_phases(runs), *_blocks(samples)]
    text = _page(title, data, "\n".join(blocks))
    with written_whole(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return output.stat().st_size


def _describe(run: RunFiles, packed: PackedSamples, folder: Path) -> dict[str, Any]:
    """The part of a run that the page loads at once; tokens and texts are in blocks.

    `folder` is that of the page, to which links to other files are relative.
    """
    return {
        "name": run.name,
        "steps": [record["step"] for record in run.records],
        "metrics": run.metrics(),
        "config": run.config,
        "summary": run.summary,
        "origin": {key: run.origin.get(key) for key in _ORIGIN},
        "checkpoints": run.checkpoints,
        "alarms": run.alarms,
        "processes": run.processes,
        "validations": run.validations,
        "profiles": [os.path.relpath(file, folder) for file in run.profiles],
        "samples": packed.columns,
        "quantities": packed.quantities,
        "textBlocks": len(packed.text_blocks),
        "leftOut": packed.left_out,
    }


def _phases(runs: Sequence[RunFiles]) -> list[str]:
    """The elements with the phases of all runs, which the page reads when they are first used."""
    return [
        f'<script type="application/json" id="phases-{number}">{script_text(run.phases)}</script>'
        for number, run in enumerate(runs)
    ]


def _blocks(samples: Sequence[PackedSamples]) -> list[str]:
    """The elements with the blocks of all runs; base64 needs no escapes."""
    elements = []
    for run, packed in enumerate(samples):
        for kind, blocks in (("tokens", packed.token_blocks), ("texts", packed.text_blocks)):
            for number, block in enumerate(blocks):
                name = f"{kind}-{run}-{number}"
                elements.append(
                    f'<script type="application/octet-stream" id="{name}">{block}</script>'
                )
    return elements


def _page(title: str, data: Any, blocks: str) -> str:
    style = "\n".join(_file(name) for name in _STYLES)
    script = "\n".join(_file(name) for name in _SCRIPTS)
    fields = {
        "TITLE": html.escape(title),
        "POLICY": _policy(style, script),
        "STYLE": style,
        "DATA": script_text(data),
        "BLOCKS": blocks,
        "SCRIPT": script,
    }

    parts = _file("report.html").split("@@")
    assert set(parts[1::2]) == set(fields), f"the page's places are {parts[1::2]}"
    parts[1::2] = [fields[name] for name in parts[1::2]]
    return "".join(parts)


def script_text(data: Any) -> str:
    """JSON that may stand in a script element: no text in it can end the element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str)
    # A command may hold bytes that are no text.
    return text.encode("utf-8", "replace").decode().replace("<", "\\u003c")


def _policy(style: str, script: str) -> str:
    """The content policy of the page: the browser may run and load this style and script alone."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _file(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")
