"""Writes the report of one run, or of several to compare, as one HTML file.

Usage: mrlhf-report RUN_DIR [RUN_DIR ...] [--out FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mrlhf.checkpoint.output_files import REPORT
from mrlhf.commands.endings import end_command
from mrlhf.printable import show
from mrlhf.report.write import write_report
from mrlhf.version import add_version_option


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Write one HTML file with the curves, rollouts and phases of runs. It needs no "
        "network and no server: open it in a browser."
    )
    add_version_option(parser)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN_DIR", help="output directory of a run")
    add("--out", type=Path, metavar="FILE", help=f"default: {REPORT} in the first RUN_DIR")
    most = "most samples of all runs together (default: 5000)"
    add("--samples", type=int, default=5000, metavar="N", help=most)

    options = parser.parse_args(arguments)
    if options.samples < len(options.runs):
        parser.error(f"--samples {options.samples} is less than one for each of the runs")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, and say which file to open; 0 when done, 2 on bad input."""
    options = parse(arguments)
    output = options.out or options.runs[0] / REPORT

    def write() -> int:
        size = write_report(options.runs, output, options.samples)
        show(f"report: {output} ({size / 1e6:.1f} MB); open it in a browser")
        return 0

    return end_command(write, output)
