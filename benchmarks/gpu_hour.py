"""The first hour on a GPU: checks, whole runs and measurements, in steps of at most ten minutes.

    make gpu-hour
    python benchmarks/gpu_hour.py [--out DIR] [--minutes M] [--again [STEP ...]]

Each step is a process of its own with a limit of time. What it found is kept in DIR/results.json
and DIR/report.md as soon as it ends, and it is not run again unless `--again` names it, or names
nothing, which means all. So the hour may be stopped at any time and goes on. A step that fails
leaves the reason, and the next one runs. The steps that tell most come first; with `--minutes` the
program ends in time, and a step that was cut runs again with the next call. Nothing is downloaded.
DIR needs 40 GB of disk.

`--size tiny` tries the program on a CPU, without vLLM. This file knows how steps run;
`gpu_hour_steps.py` has the steps, and `gpu_hour_table.py` what their figures should be.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from gpu_hour_steps import FULL, TINY, Step, steps_of
from gpu_hour_table import report, targets
from gpu_record import write_json

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("megatron", "transformers", "pydantic", "yaml", "pyarrow", "sentencepiece", "xxhash")
LIMIT_S = 570.0  # of a step
STOPS = (signal.SIGTERM, signal.SIGINT)
_GRACE_S = 15.0
_CUT = "cut off"
_LEAST_S = 20.0  # in which a step may leave a row
_LONGEST_REASON = 300  # characters
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_ERROR = re.compile(r"\w*(Error|Exception)\b|\berror: ")
_SLOW = "more slowly"  # in each warning of mrlhf that it takes a slower way than it could


def main() -> int:
    """Run the steps that are not recorded; returns 1 if a step has failed or is left, else 0."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_hour"))
    parser.add_argument("--again", nargs="*", metavar="STEP", help="run these again; none: all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end within so many")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: a trial")
    arguments = parser.parse_args()
    missing = what_is_missing(arguments.size)
    if missing:
        print(f"skipped: gpu-hour: {missing}")
        return 0

    out = arguments.out.resolve()
    gpus = _names_of_gpus() if torch.cuda.is_available() else []
    steps = steps_of(FULL if arguments.size == "full" else TINY, out, len(gpus))
    names = [step.name for step in steps]
    again = [] if arguments.again is None else arguments.again or names
    unknown = set(again) - set(names)
    if unknown:
        parser.error(f"no step is called {', '.join(sorted(unknown))}; there are {names}")

    machine = {"size": arguments.size, "torch": torch.__version__, "gpus": gpus}
    try:
        lock = _claim(out)
        results = _results(out / "results.json", machine)
    except ValueError as error:
        parser.error(f"{error}: give another --out")
    for name in again:
        results["steps"].pop(name, None)
    write_json(out / "results.json", results)

    for number in STOPS:
        signal.signal(number, signal.default_int_handler)
    try:
        run_steps(steps, out, results, began + 60 * arguments.minutes)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on with the step that was stopped")
        return 130
    lock.close()
    print("", *targets(results["steps"]), "", f"more in {out / 'report.md'}", sep="\n")
    outcomes = [results["steps"].get(name, {"outcome": _CUT})["outcome"] for name in names]
    left = sum(outcome.startswith(_CUT) for outcome in outcomes)
    if left:
        print(f"{left} steps are left; the same command goes on with them")
    return int(any(outcome != "done" for outcome in outcomes))


def what_is_missing(size: str) -> str:
    """What the hour lacks on this machine, in one line; "" if it can run."""
    packages = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if packages:
        return f"{sys.executable} lacks {', '.join(packages)}; docs/gpu.md says what to install"
    if size == "tiny" or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is a build without CUDA; docs/gpu.md says which to install"
        )
    return f"torch {torch.__version__} sees no NVIDIA GPU; nvidia-smi tells whether there is one"


def run_steps(
    steps: Sequence[Step], out: Path, results: dict[str, Any], end: float = math.inf
) -> None:
    """Run the steps that `results` lacks, and write results and report after each.

    No step runs beyond `end`, in seconds of `time.monotonic`.
    """
    for number, step in enumerate(steps, start=1):
        place = f"{number}/{len(steps)} {step.name}"
        recorded = results["steps"].get(step.name, {"outcome": _CUT})["outcome"]
        if not recorded.startswith(_CUT):
            print(f"{place}: recorded: {recorded}", flush=True)
            continue
        left_s = end - time.monotonic()
        if left_s < _LEAST_S + _GRACE_S:
            return

        print(f"{place} ...", flush=True)
        limit_s = min(LIMIT_S, left_s - _GRACE_S)
        found = run(step, out / "steps" / f"{step.name}.log", limit_s)
        if limit_s < LIMIT_S:
            found["outcome"] = found["outcome"].replace("failed: it was stopped", _CUT)
        print(f"{place}: {found['outcome']} ({found['seconds']} s)", flush=True)
        results["steps"][step.name] = found
        write_json(out / "results.json", results)
        (out / "report.md").write_text(report(results), encoding="utf-8")


def run(step: Step, log: Path, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Run a step in a process of its own.

    Returns:
        Its outcome, its seconds, its warnings of slower ways, and what it found.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    if not step.goes_on:
        step.output.unlink(missing_ok=True)
    variables = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

    began = time.monotonic()
    # While Python starts a process it may lose the exception of a signal, so signals wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *step.command],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_prepare,
        )
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)

    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    outcome = "done"
    if code is None:
        outcome = f"failed: it was stopped after {limit_s:.0f} s; its log is {log}"
    elif code:
        outcome = f"failed: {_reason(lines)}; its log is {log}"
    return {
        "outcome": outcome,
        "seconds": round(time.monotonic() - began, 1),
        "slow": [line for line in lines if _SLOW in line],
        "found": step.found(),
    }


def _prepare() -> None:
    """In the new process: take signals, and ask the system to end it if this one is killed."""
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started, if any are left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)


def _reason(log: Sequence[str]) -> str:
    """The last line of a log that names an error, or else its last line."""
    lines = [line for line in log if line] or ["it printed nothing"]
    errors = [line for line in lines if _ERROR.search(line)]
    return (errors or lines)[-1][:_LONGEST_REASON]


def _claim(out: Path) -> TextIO:
    """Make the directory this process's own, until the file that is returned is closed."""
    out.mkdir(parents=True, exist_ok=True)
    lock = (out / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"another process uses {out}") from error
    return lock


def _results(file: Path, machine: dict[str, Any]) -> dict[str, Any]:
    """What is recorded so far, which must be of this machine."""
    if not file.is_file():
        return {"machine": machine, "steps": {}}
    recorded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if recorded["machine"] != machine:
        raise ValueError(f"{file} is of {recorded['machine']}, and here is {machine}")
    return recorded


def _names_of_gpus() -> list[str]:
    """Asked in a process of its own: one that uses CUDA holds memory of the GPU from then on."""
    program = (
        "import torch\n"
        "for number in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(number))"
    )
    command = [sys.executable, "-c", program]
    return subprocess.check_output(command, text=True).strip().splitlines()


if __name__ == "__main__":
    sys.exit(main())
