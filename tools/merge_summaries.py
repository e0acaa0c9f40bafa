"""Merges the summaries of runs that follow each other (SFT, reward model, PPO) into one file.

Usage: tools/merge_summaries.py --out DIR RUN_DIR [RUN_DIR ...]
"""

import argparse
import json
import sys
from pathlib import Path

from mrlhf.errors import MrlhfError
from mrlhf.run.summary import combine_summaries


def main() -> int:
    """Parse, merge, print."""
    parser = argparse.ArgumentParser(
        description="Merge the summary.json of several runs; the later run wins a name."
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the merged summary.json goes"
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="output directories, in order"
    )
    arguments = parser.parse_args()

    try:
        combined = combine_summaries(arguments.runs, arguments.out)
    except MrlhfError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: {error.filename or arguments.out}: {error.strerror}\n")
        return 2

    print(json.dumps(combined, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
