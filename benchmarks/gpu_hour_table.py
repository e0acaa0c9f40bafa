"""Puts the figures of the first hour on a GPU beside what they should be, as markdown.

It knows what the steps of `gpu_hour_steps.py` leave. What a step has not left is "not measured".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpu_hour_steps import LONG_RUN

Steps = Mapping[str, Mapping[str, Any]]
"""By the step's name: "outcome", "seconds", "slow", and what it "found"."""

RUNS = ("ppo-small", "ppo-large", "ppo-resumed")
WARM = 10  # steps of a run until memory is no longer expected to grow
# Of the rows of gpu.py.
SPEEDS = (
    *("size", "what", "sequences", "tokens_per_s", "mfu", "share_of_memory_limit", "peak_bytes"),
    *("eager_share", "host_us", "compilations", "compile_seconds"),
    *("pinned_bytes_asked", "pinned_bytes_taken"),
)
# benchmarks/baselines of PrimeIntellect-ai/prime-rl at 767aaadf: one H100, all weights of
# Qwen3-0.6B, two packs a step, FlashAttention 3, activations computed again.
PRIME_RL = (
    {"trainer": "rl", "tokens of a pack": 16384, "tokens_per_s": 11896.0, "mfu": 0.1108},
    {"trainer": "rl", "tokens of a pack": 65536, "tokens_per_s": 10147.5, "mfu": 0.2680},
    {"trainer": "sft", "tokens of a pack": 16384, "tokens_per_s": 25486.1, "mfu": 0.2374},
)


@dataclass(frozen=True)
class Target:
    """A figure and what it should be."""

    what: str
    wanted: str
    value: Callable[[Steps], float | None]  # may raise LookupError or TypeError: not measured
    is_met: Callable[[float], bool]
    form: str = "{:.1%}"


def report(results: Mapping[str, Any]) -> str:
    """The page of an hour."""
    machine = results["machine"]
    steps = results["steps"]
    outcomes = [
        {"step": name, "outcome": step["outcome"], "seconds": step["seconds"]}
        for name, step in steps.items()
    ]
    facts = _found(steps, "facts") or {}
    profiled = _found(steps, "profile") or {"phases": {}, "costs": []}
    phases = [{"phase": name, **phase} for name, phase in profiled["phases"].items()]

    tables: dict[str, Iterator[str]] = {
        "Beside the targets": targets(steps),
        "Steps": _table(outcomes),
        "Slower ways that were taken": _table(_slow_ways(steps)),
        "The machine": _table([{"fact": name, "is": value} for name, value in facts.items()]),
        "Whole steps of PPO, medians": _table(_medians(steps)),
        "Update, log-probabilities, decoding": _table(_speeds(steps)),
        "Updates that prime-rl publishes for Qwen3-0.6B on an H100": _table(PRIME_RL),
        "Decoding beside others": _table(_contest(steps)),
        "The kernel of paged attention: as it is, and the best of the sweep": _table(_best(steps)),
        "One step, profiled, by phase": _table(phases),
        "Its largest costs": _table(profiled["costs"]),
    }
    where = ", ".join(machine["gpus"]) or "A CPU: this is a trial"
    lines = ["# The first hour on a GPU", "", f"{where}; torch {machine['torch']}."]
    for title, table in tables.items():
        lines += ["", f"## {title}", "", *table]
    return "\n".join(lines) + "\n"


def targets(steps: Steps) -> Iterator[str]:
    """The table of targets."""
    rows = []
    for target in TARGETS:
        try:
            value = target.value(steps)
        except (LookupError, TypeError):
            value = None
        row = {"figure": target.what, "measured": "not measured", "wanted": target.wanted}
        if value is not None:
            row["measured"] = target.form.format(value)
            row["verdict"] = "met" if target.is_met(value) else "**missed**"
        rows.append(row)
    return _table(rows)


def _failed_checks(steps: Steps) -> float | None:
    checks = steps["checks"]["found"]["checks"]
    failed = sum(check["outcome"] != "passed" for check in checks)
    # If the process was ended, the other checks might have failed.
    return failed if failed or steps["checks"]["outcome"] == "done" else None


def _figure(what: str, key: str, size: str, steps: Steps) -> float | None:
    """A figure of the row of `gpu.py` that has it."""
    rows = steps[f"speed-{size}"]["found"]["benchmarks"]
    found: dict[str, float | None] = {row["what"]: row[key] for row in rows if key in row}
    return found[what]


def _over_vllm(steps: Steps) -> float | None:
    """The smallest ratio of any workload."""
    speeds = {(row["workload"], row["engine"]): row["tokens_per_s"] for row in _contest(steps)}
    names = {workload for workload, engine in speeds if engine == "vllm"}
    return min((speeds[name, "native"] / speeds[name, "vllm"] for name in names), default=None)


def _logprob_gap(steps: Steps) -> float:
    """The root of the mean square, which for small gaps is that of twice the k3 estimate."""
    k3 = [row["rollout_corr/k3_kl"] for row in steps["ppo-large"]["found"]]
    return float((2 * statistics.fmean(k3)) ** 0.5)


def _growth(steps: Steps) -> float:
    """How far the peak of memory rose between two steps of the long run."""
    rows = steps["ppo-small"]["found"]
    peaks = {row["step"]: row["perf/max_memory_allocated_gb"] for row in rows}
    return float(peaks[LONG_RUN] / peaks[WARM] - 1)


TARGETS = (
    Target("failed checks of tests/gpu", "none", _failed_checks, lambda x: x == 0, "{:.0f}"),
    Target("slower ways", "none", lambda s: len(_slow_ways(s)), lambda x: x == 0, "{:.0f}"),
    Target(
        "MFU of the update, 0.6B, 16k tokens",
        ">= 35 %",
        partial(_figure, "update", "mfu", "0.6B"),
        (0.35).__le__,
    ),
    Target(
        "MFU of the update, 1.7B",
        ">= 35 %",
        partial(_figure, "update", "mfu", "1.7B"),
        (0.35).__le__,
    ),
    Target("decoding over vLLM's, its worst batch", ">= 90 %", _over_vllm, (0.9).__le__),
    Target(
        "eager passes while rows wait",
        "<= 5 %",
        partial(_figure, "mixed", "eager_share", "0.6B"),
        (0.05).__ge__,
    ),
    # What tests/gpu allow between bfloat16 and float32.
    Target("log-probs, engine to trainer", "<= 0.03", _logprob_gap, (0.03).__ge__, "{:.4f}"),
    Target(f"growth of memory, steps {WARM} to {LONG_RUN}", "none", _growth, (0.001).__ge__),
)


def _slow_ways(steps: Steps) -> list[dict[str, str]]:
    return [{"step": name, "warning": text} for name in steps for text in steps[name]["slow"]]


def _medians(steps: Steps) -> Iterator[dict[str, Any]]:
    """A row for each metric, a column for each run."""
    runs = {name: _found(steps, name) or [] for name in RUNS}
    names = {name for rows in runs.values() for row in rows for name in row} - {"step"}
    for name in sorted(names):
        values = {run: [row[name] for row in rows if name in row] for run, rows in runs.items()}
        medians = {run: statistics.median(own) if own else None for run, own in values.items()}
        yield {"metric": name, **medians}


def _speeds(steps: Steps) -> Iterator[dict[str, Any]]:
    for name in steps:
        if name.startswith("speed-") and steps[name]["found"]:
            for row in steps[name]["found"]["benchmarks"]:
                yield {key: row.get(key) for key in (*SPEEDS, "outcome")}


def _contest(steps: Steps) -> Iterator[dict[str, Any]]:
    for name in ("decode-native", "decode-vllm"):
        found = _found(steps, name) or {"workloads": [], "failed": {}}
        for workload in found["workloads"]:
            for engine, run in workload["contenders"].items():
                speed = run["tokens_per_second"]
                yield {"workload": workload["name"], "engine": engine, "tokens_per_s": speed}
        for engine, reason in found["failed"].items():
            yield {"workload": f"left out: {reason}", "engine": engine, "tokens_per_s": None}


def _best(steps: Steps) -> Iterator[dict[str, Any]]:
    cases: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in _found(steps, "paged") or []:
        if "us" in row:
            case = (row["kind"], row["sequences"], row["context"])
            cases.setdefault(case, []).append(row)
    for rows in cases.values():
        yield from rows[:1]  # as it is
        yield min(rows, key=lambda row: row["us"])


def _found(steps: Steps, name: str) -> Any:
    return steps[name]["found"] if name in steps else None


def _table(rows: Sequence[Mapping[str, Any]] | Iterator[Mapping[str, Any]]) -> Iterator[str]:
    """A table with a column for each key of the rows; one word if there are none."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        yield "None."
        return
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(_cell(row.get(name)) for name in columns)} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = str(value)
    if isinstance(value, float):
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return text.replace("|", "/").replace("\n", "<br>")
