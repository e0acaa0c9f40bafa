"""Compares how many tokens a second the native engine, vLLM and `transformers` generate.

    python benchmarks/generate.py [--quick] [--json FILE]

All have the same weights and prompts: random weights, prompts of 64 random tokens (of 40 in the
workload with 8 samples of each prompt), temperature 1.
Each model size, dtype and number of threads runs in its own process, in which the contenders take
turns; the tables give medians. "13M-MoE-16of4" is a mixture of which a token goes through 4 of 16
experts. In a workload "~N" the responses end at random, after N tokens in
the mean, so that the longest is more than ten times the shortest.

The two limits are the speeds at which the workload would run if only matrix products, or only
reading weights and cache, took time. Both are measured in the same run. This file knows no engine:
`generation_case.py` measures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PROMPT_LENGTH = 64
SAMPLES = {"8 x 8 x 40": (8, 40)}  # samples of each prompt, and its tokens
# prompts, longest response, mean response (None: all are of the longest length)
WORKLOADS = {
    "32 x 64": (32, 64, None),
    "64 x 128": (64, 128, None),
    "64 x ~64": (64, 256, 64),
}
REAL = {"32 x 64": (32, 64, None), "8 x 8 x 40": (8, 40, None)}
# A machine without bfloat16 instructions takes minutes for what float32 does in seconds.
SLOW = {"8 x 16": (8, 16, None)}
QUICK = {"8 x 16": (8, 16, None), "32 x ~8": (32, 32, 8)}
NAMES = ("native", "vllm", "transformers")
DEFAULT_SIZES = (
    "3M",
    "110M",
    "13M-MoE-8of2",
    "13M-MoE-16of4",
    "13M-MoE-64of8",
    "110M-MoE-32of4",
)
SPEED_HEADS = (
    "model",
    "dtype",
    "threads",
    "workload",
    "native, tokens/s",
    "vLLM",
    "transformers",
    "native / vLLM",
    "native / transformers",
    "native of GEMM limit",
    "of memory limit",
)
LIMIT_HEADS = (
    "model",
    "parameters",
    "dtype",
    "threads",
    "GEMM, GFLOP/s",
    "read, GB/s",
    "greedy tokens as transformers",
)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there too")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: the small model, float32, little work"
    )
    parser.add_argument("--sizes", default=",".join(DEFAULT_SIZES))
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", default="1,2", help="on a GPU: 1")
    parser.add_argument("--contenders", default=",".join(NAMES))
    parser.add_argument("--workloads", default="", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: seconds of the processor, for one thread on a machine that others load",
    )
    arguments = parser.parse_args()

    results = []
    for case in _cases(arguments):
        sys.stderr.write(f"{case['size']} {case['dtype']} {case['threads']} threads\n")
        results.append(_run(case))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")

    print("\n".join([*_speed_table(results), "", *_limit_table(results), *_notes(results)]))


def _cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The cases to measure, each in its own process."""
    sizes = arguments.sizes.split(",")
    dtypes = arguments.dtypes.split(",")
    threads = [int(count) for count in arguments.threads.split(",")]
    repeats = arguments.repeats
    if torch.cuda.is_available():
        threads = threads[:1]
    if arguments.quick:
        sizes = ["3M"]
        dtypes = ["float32"]
        threads = [1]
        repeats = 2

    for size, dtype, count in itertools.product(sizes, dtypes, threads):
        workloads = QUICK if arguments.quick else _workloads_for(size, dtype)
        names = [name for name in arguments.workloads.split(",") if name] or list(workloads)
        yield {
            "size": size,
            "dtype": dtype,
            "threads": count,
            "contenders": arguments.contenders.split(","),
            "repeats": repeats,
            "clock": arguments.clock,
            "workloads": [_workload(name, *workloads[name]) for name in names if name in workloads],
        }


def _workloads_for(size: str, dtype: str) -> dict[str, tuple[int, int, int | None]]:
    """All workloads, or a short one where they would take minutes."""
    slow = size.startswith("110M") and dtype == "bfloat16"
    if slow and not torch.cuda.is_available() and not _has_bfloat16():
        return SLOW
    return REAL if size.startswith("SmolLM2") else WORKLOADS


def _workload(name: str, prompts: int, max_tokens: int, mean_tokens: int | None) -> dict[str, Any]:
    samples, prompt_length = SAMPLES.get(name, (1, PROMPT_LENGTH))
    return {
        "name": name,
        "prompts": prompts,
        "samples": samples,
        "prompt_length": prompt_length,
        "max_tokens": max_tokens,
        "mean_tokens": mean_tokens,
    }


def _has_bfloat16() -> bool:
    """Whether the CPU has instructions that multiply bfloat16."""
    file = Path("/proc/cpuinfo")
    flags = file.read_text() if file.is_file() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _run(case: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a case in its own process."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(case["threads"])}
    script = Path(__file__).with_name("generation_case.py")

    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        # Standard output is for the tables alone: what the contenders print goes to standard error.
        subprocess.run(
            [sys.executable, str(script), json.dumps(case), str(out)],
            env=environment,
            stdout=sys.stderr,
            check=True,
        )
        result: dict[str, Any] = json.loads(out.read_text())

    return result


def _speed_table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield _row(SPEED_HEADS)
    yield "|---" * len(SPEED_HEADS) + "|"
    for result in results:
        for workload in result["workloads"]:
            measured = workload["contenders"]
            native = measured.get("native", {})
            speeds = {}
            for name in NAMES:
                speeds[name] = measured[name]["tokens_per_second"] if name in measured else None

            cells = [result["size"], result["dtype"], str(result["threads"]), workload["name"]]
            cells += [_number(speeds[name], ",.0f") for name in NAMES]
            cells += [_number(_ratio(speeds["native"], speeds[name]), ".2f") for name in NAMES[1:]]
            cells += [_number(native.get(share), ".0%") for share in ("gemm_share", "memory_share")]
            yield _row(cells)


def _limit_table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield _row(LIMIT_HEADS)
    yield "|---" * len(LIMIT_HEADS) + "|"
    for result in results:
        limits = result["limits"]
        shares = result["greedy_agreement"].items()

        cells = [
            result["size"],
            f"{result['parameters'] / 1e6:.1f}M",
            result["dtype"],
            str(result["threads"]),
            f"{limits['gemm_flops'] / 1e9:.1f}",
            f"{limits['read_bandwidth'] / 1e9:.1f}",
            ", ".join(f"{name} {share:.1%}" for name, share in shares),
        ]
        yield _row(cells)


def _notes(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield ""
    yield f"{results[0]['device']}, torch {torch.__version__}; medians of {results[0]['repeats']}."

    for result in results:
        case = f"{result['size']} {result['dtype']} {result['threads']} threads"
        for workload in result["workloads"]:
            if workload["mean_tokens"] is None:
                continue
            spread = []
            for name, run in workload["contenders"].items():
                lengths = f"{run['shortest']} to {run['longest']}"
                spread.append(f"{name} {lengths}, {run['tokens']} in all")
            title = f"Response tokens in the median run of {case}, {workload['name']}"
            yield f"{title}: {'; '.join(spread)}."

    for result in results:
        for name, note in result["notes"].items():
            if note:
                case = f"{result['size']} {result['dtype']} {result['threads']} threads"
                yield f"{name} of {case}: {note}."

    failed = set()
    for result in results:
        failed.update(result["failed"].items())
    for name, reason in failed:
        yield f"{name} was left out: {reason}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    main()
