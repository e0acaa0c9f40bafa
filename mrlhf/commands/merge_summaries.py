"""Merges the summaries of runs that follow each other (SFT, reward model, PPO) into one file.

Usage: mrlhf-merge-summaries --out DIR RUN_DIR [RUN_DIR ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mrlhf.checkpoint.summary import combine_summaries
from mrlhf.errors import MrlhfError
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
    try:
        combined = combine_summaries(options.runs, options.out)
        show(json.dumps(combined, indent=2))
    except MrlhfError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or options.out}: {error.strerror}\n")
        return 2
    return 0
