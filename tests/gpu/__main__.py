"""Runs the checks of a GPU without pytest: `python -m tests.gpu`, or `make test-gpu`.

It needs torch, transformers, megatron-core and pydantic alone. Without a GPU it skips all checks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu_record import record
from tests.gpu.checks import CHECKS, prepared


def main() -> int:
    """Run all checks; returns the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures of all checks to this file")
    parser.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="cpu tries the checks themselves"
    )
    arguments = parser.parse_args()
    if arguments.device == "auto" and not torch.cuda.is_available():
        for name in CHECKS:
            print(f"skipped: {name}: needs a CUDA GPU")
        return 0

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root, prepared(arguments.device, Path(root)) as place:
        for name, check in CHECKS.items():
            row: dict[str, Any] = {"check": name, "device": str(place.device)}
            began = time.perf_counter()
            try:
                row["figures"] = check(place)
                row["outcome"] = "passed"
            except Exception as error:
                traceback.print_exc()
                row["outcome"] = f"failed: {error}"
            row["seconds"] = round(time.perf_counter() - began, 2)
            print(f"{row['outcome']}: {name} ({row['seconds']} s)", flush=True)
            rows.append(row)
            if arguments.json is not None:
                record(arguments.json, "checks", rows)
    return sum(row["outcome"] != "passed" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
