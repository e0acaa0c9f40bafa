"""Writes the report of one run, or of several to compare, as one HTML file.

Usage: tools/report.py RUN_DIR [RUN_DIR ...] [--out FILE]
"""

import argparse
import sys
from pathlib import Path

from mrlhf.errors import MrlhfError
from mrlhf.report.write import write_report
from mrlhf.run.directory import REPORT


def main() -> int:
    """Parse, write, and say which file to open."""
    parser = argparse.ArgumentParser(
        description="Write one HTML file with the curves, rollouts and phases of runs. It needs no "
        "network and no server: open it in a browser."
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="output directory of a run"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"default: {REPORT} in the first RUN_DIR"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=5000,
        metavar="N",
        help="most samples of all runs together (default: 5000)",
    )
    arguments = parser.parse_args()
    if arguments.samples < len(arguments.runs):
        parser.error(f"--samples {arguments.samples} is less than one for each of the runs")

    output = arguments.out or arguments.runs[0] / REPORT
    try:
        size = write_report(arguments.runs, output, arguments.samples)
    except MrlhfError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or output}: {error.strerror}\n")
        return 2

    print(f"report: {output} ({size / 1e6:.1f} MB); open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
