"""Compares the seconds that `mrlhf plan` predicts for small real runs with those that they take.

    python benchmarks/plan_seconds.py [--only NUMBER ...] [--json FILE] [--from FILE]

Each of twelve configurations is started as a user starts it, and makes a few steps; the median
seconds of each phase, without the first step, are compared with the plan's for the same layout, at
the run's own mean lengths. The rates come from `mrlhf plan --measure` with as many ranks, taken
before and after every three runs; a prediction is the mean of both. Three configurations, marked *,
were kept out when the shares in mrlhf/planning/gpus.py were chosen. `--from` predicts again from
files of `--json`, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

# The plan is that of this checkout, whether or not an mrlhf is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plan_seconds_cases import CASES, STEPS, Case, write_case, write_models, write_shapes

from mrlhf.config.load import read_any
from mrlhf.planning.machine_file import gpu_of
from mrlhf.planning.seconds import Lengths, estimate
from mrlhf.preflight.footprint import footprint
from mrlhf.preflight.model_checks import check_models

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.25
TOGETHER = 3  # runs between two measurements

# The phases of the plan, and the runs' own that they stand for.
PHASES = {
    "hand-over": ("reshard",),
    "generation": ("gen",),
    "scoring": ("reward", "ref", "old_log_prob", "values"),
    "update of critic": ("update_critic",),
    "update of actor": ("update_actor",),
    "update of model": ("step",),
}


def main() -> None:
    """Measure, run, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="from 1 to 12")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    parser.add_argument("--from", type=Path, nargs="+", metavar="FILE", dest="given")
    arguments = parser.parse_args()

    numbers = arguments.only or list(range(1, len(CASES) + 1))
    cases = {number: CASES[number - 1] for number in numbers}
    if arguments.given is not None:
        found = {"rates": {}, "runs": {}}
        for file in arguments.given:
            for kind, values in json.loads(file.read_text()).items():
                found[kind] |= values
        cases = {number: case for number, case in cases.items() if case.name in found["runs"]}
    else:
        with tempfile.TemporaryDirectory() as directory:
            found = _measure(list(cases.values()), Path(directory))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(_table(cases, found)))


def _measure(cases: Sequence[Case], directory: Path) -> dict[str, Any]:
    """By the name of each run the rates before and after it, and the metrics of its steps."""
    write_models(directory)
    rates: dict[str, list[str]] = {}
    runs: dict[str, Any] = {}
    for ranks in sorted({case.ranks for case in cases}):
        own = [case for case in cases if case.ranks == ranks]
        before = _rates(ranks, directory)
        for first in range(0, len(own), TOGETHER):
            group = own[first : first + TOGETHER]
            for case in group:
                runs[case.name] = _steps(case, directory)
            after = _rates(ranks, directory)
            rates |= {case.name: [before, after] for case in group}
            before = after
    return {"rates": rates, "runs": runs}


def _rates(ranks: int, directory: Path) -> str:
    """The file that `mrlhf plan --measure` writes now."""
    _say(f"measuring, ranks: {ranks}")
    file = directory / "measured.yaml"
    plan = [sys.executable, "-m", "mrlhf", "plan", "--measure", str(file)]
    _run([*plan, "--ranks", str(ranks)])
    return file.read_text()


def _steps(case: Case, directory: Path) -> list[dict[str, float]]:
    """The metrics of a run's steps without the first."""
    _say(f"running {case.name}")
    place = Path(tempfile.mkdtemp(dir=directory))
    file = place / "config.yaml"
    file.write_text(yaml.safe_dump(write_case(case, directory, place)))
    command = [sys.executable, "-m", "mrlhf", f"train-{case.program}", "-n", str(case.ranks)]
    _run([*command, "--config", str(file)])
    lines = (place / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:STEPS]]


def _run(command: Sequence[str]) -> None:
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def _table(cases: Mapping[int, Case], found: Mapping[str, Any]) -> list[str]:
    """The rows of the table, and the errors of the whole."""
    heads = ("", "configuration", "phase", "predicted s", "measured s", "error")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    errors = []
    for number, case in cases.items():
        steps = found["runs"][case.name]
        before, after = (_predict(case, steps, rates) for rates in found["rates"][case.name])
        predicted = {phase: (before[phase] + after[phase]) / 2 for phase in before}
        measured = _measured(steps)
        phases = [phase for phase in PHASES if phase in predicted and phase in measured]
        for phase in ["step", *phases] if len(phases) > 1 else ["step"]:
            error = predicted[phase] / measured[phase] - 1
            if phase == "step":
                errors.append(error)
            mark = "*" if case.is_kept_out else ""
            name = f"{case.name}{mark}" if phase == "step" else ""
            count = str(number) if phase == "step" else ""
            figures = f"{predicted[phase]:.2f} | {measured[phase]:.2f} | {error:+.0%}"
            lines.append(f"| {count} | {name} | {phase} | {figures} |")
    inside = sum(abs(error) <= LIMIT for error in errors)
    worst = max(errors, key=abs)
    lines.append(f"\n{inside} of {len(errors)} steps within {LIMIT:.0%}; the worst {worst:+.0%}")
    return lines


def _measured(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median seconds of the phases of a run."""

    def median(*names: str) -> float:
        return statistics.median(
            sum(step.get(f"timing_s/{name}", 0.0) for name in names) for step in steps
        )

    found = {phase: median(*names) for phase, names in PHASES.items()}
    return {phase: seconds for phase, seconds in found.items() if seconds} | {
        "step": median("step")
    }


def _predict(case: Case, steps: Sequence[Mapping[str, float]], rates: str) -> dict[str, float]:
    """The plan's seconds of the same layout, at the run's own mean lengths."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "measured.yaml").write_text(rates)
        gpu = gpu_of(str(directory / "measured.yaml"))
        write_shapes(directory)
        file = directory / "config.yaml"
        file.write_text(yaml.safe_dump(write_case(case, directory, directory)))
        config = read_any(case.program, [str(file)], [f"distributed.device={gpu.device}"])
        specs = {role: spec for role, spec in check_models(config).items() if spec is not None}

        sizes = footprint(config, specs, case.ranks)
        room = int(1e9 * gpu.memory_gb)
        lengths = _lengths(case, steps)
        time = estimate(config, specs, sizes, case.ranks, gpu, lengths, room)
    return time.seconds | {"step": time.step}


def _lengths(case: Case, steps: Sequence[Mapping[str, float]]) -> Lengths:
    sequences = case.batch * (case.n if case.program == "ppo" else 1)
    if case.program in ("rm", "dpo"):
        sequences *= 2
    tokens = statistics.mean(step["perf/total_num_tokens"] for step in steps)
    return Lengths(case.prompt, tokens / sequences - case.prompt)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    main()
