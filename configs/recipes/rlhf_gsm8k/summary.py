"""Merges the summaries of runs that follow each other (SFT, reward model, PPO) into one file.

Usage: python configs/recipes/rlhf_gsm8k/summary.py --out DIR RUN_DIR [RUN_DIR ...]

The later run wins a name, and seconds add up.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

SUMMARY = "summary.json"


def main() -> int:
    """Merge and print; 0 when done, 2 if a run has no summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR")
    options = parser.parse_args()

    combined: dict[str, Any] = {"seconds": 0.0}
    for run in options.runs:
        if not (run / SUMMARY).is_file():
            sys.stderr.write(f"error: {run} has no {SUMMARY}; run that stage first\n")
            return 2
        summary = json.loads((run / SUMMARY).read_text(encoding="utf-8"))
        combined |= {**summary, "seconds": combined["seconds"] + summary["seconds"]}

    combined["seconds"] = round(combined["seconds"], 1)
    text = json.dumps(combined, indent=2) + "\n"
    (options.out / SUMMARY).write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
