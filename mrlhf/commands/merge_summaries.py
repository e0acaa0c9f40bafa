"""Merges the summaries of runs that follow each other (SFT, reward model, PPO) into one file.

Usage: mrlhf-merge-summaries --out DIR RUN_DIR [RUN_DIR ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from mrlhf.checkpoint.summary import combine_summaries
from mrlhf.commands.endings import end_command
from mrlhf.printable import show
from mrlhf.version import add_version_option


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Merge the summary.json of several runs; the later run wins a name."
    )
    add_version_option(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the merged summary.json goes"
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="output directories, in order"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge and print; 0 when done, 2 on bad input."""
    options = parse(arguments)

    def merge() -> int:
        show(json.dumps(combine_summaries(options.runs, options.out), indent=2))
        return 0

    return end_command(merge, options.out)
