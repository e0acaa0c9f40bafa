"""Tokens a second of generation: the native engine, vLLM and `transformers`, on the same weights
and prompts.

    python benchmarks/generate.py [--quick] [--json FILE]

Each model size, dtype and number of threads runs in a process of its own, in which the contenders
alternate; the tables give medians. Random weights, prompts of 64 random tokens, temperature 1. With
"~N" the responses end at random, after N tokens in the mean, which spreads their lengths more than
tenfold. Shares are of the seconds that the workload would take if nothing but matrix products, or
nothing but reading weights and cache, cost time, at the speed measured in that run.
"""

from __future__ import annotations

import argparse
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
# prompts, longest response, mean response (None: all are of the longest length)
WORKLOADS = {
    "32 x 64": (32, 64, None),
    "64 x 128": (64, 128, None),
    "64 x ~64": (64, 256, 64),
}
# A machine without bfloat16 instructions takes minutes for what float32 does in seconds.
SLOW = {"8 x 16": (8, 16, None)}
QUICK = {"8 x 16": (8, 16, None), "32 x ~8": (32, 32, 8)}
NAMES = ("native", "vllm", "transformers")


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there too")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: the small model, float32, little work"
    )
    parser.add_argument("--sizes", default="3M,110M")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", default="1,2", help="on a GPU: 1")
    parser.add_argument("--contenders", default=",".join(NAMES))
    parser.add_argument("--workloads", default="", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    results = []
    for case in _cases(arguments):
        sys.stderr.write(f"{case['size']} {case['dtype']} {case['threads']} threads\n")
        results.append(_run(case))
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join([*_speed_table(results), "", *_limit_table(results), *_notes(results)]))


def _cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One a process."""
    gpu = torch.cuda.is_available()
    sizes, dtypes = arguments.sizes.split(","), arguments.dtypes.split(",")
    threads, repeats = [int(n) for n in arguments.threads.split(",")], arguments.repeats
    if arguments.quick:
        sizes, dtypes, threads, repeats = ["3M"], ["float32"], [1], 2
    for size in sizes:
        for dtype in dtypes:
            for count in threads[:1] if gpu else threads:
                slow = size == "110M" and dtype == "bfloat16" and not gpu and not _has_bfloat16()
                chosen = QUICK if arguments.quick else SLOW if slow else WORKLOADS
                names = [name for name in arguments.workloads.split(",") if name] or list(chosen)
                yield {
                    "size": size,
                    "dtype": dtype,
                    "threads": count,
                    "contenders": arguments.contenders.split(","),
                    "repeats": repeats,
                    "workloads": [
                        _workload(name, *chosen[name]) for name in names if name in chosen
                    ],
                }


def _workload(name: str, prompts: int, max_tokens: int, mean_tokens: int | None) -> dict[str, Any]:
    return {
        "name": name,
        "prompts": prompts,
        "prompt_length": PROMPT_LENGTH,
        "max_tokens": max_tokens,
        "mean_tokens": mean_tokens,
    }


def _has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 itself."""
    file = Path("/proc/cpuinfo")
    flags = file.read_text() if file.is_file() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _run(case: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a case in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(case["threads"])}
    script = Path(__file__).with_name("generation_case.py")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        # What the contenders print goes to standard error, so that standard output has the tables
        # alone.
        subprocess.run(
            [sys.executable, str(script), json.dumps(case), str(out)],
            env=environment,
            stdout=sys.stderr,
            check=True,
        )
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def _speed_table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| model | dtype | threads | workload | native, tokens/s | vLLM | transformers | native / vLLM | native / transformers | native of GEMM limit | of memory limit |"  # noqa: E501
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for result in results:
        for workload in result["workloads"]:
            found = workload["contenders"]
            speeds = {
                name: found[name]["tokens_per_second"] if name in found else None for name in NAMES
            }
            cells = [result["size"], result["dtype"], str(result["threads"]), workload["name"]]
            cells += [_number(speeds[name], ",.0f") for name in NAMES]
            cells += [_number(_ratio(speeds["native"], speeds[name]), ".2f") for name in NAMES[1:]]
            native = found.get("native", {})
            cells += [_number(native.get(share), ".0%") for share in ("gemm_share", "memory_share")]
            yield f"| {' | '.join(cells)} |"


def _limit_table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| model | parameters | dtype | threads | GEMM, GFLOP/s | read, GB/s | greedy tokens as transformers |"
    yield "|---|---|---|---|---|---|---|"
    for result in results:
        limits = result["limits"]
        agreement = ", ".join(
            f"{name} {share:.1%}" for name, share in result["greedy_agreement"].items()
        )
        yield (
            f"| {result['size']} | {result['parameters'] / 1e6:.1f}M | {result['dtype']} | {result['threads']} | "
            f"{limits['gemm_flops'] / 1e9:.1f} | {limits['read_bandwidth'] / 1e9:.1f} | {agreement} |"
        )


def _notes(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield ""
    yield f"{results[0]['device']}, torch {torch.__version__}; medians of {results[0]['repeats']}."
    for result in results:
        for workload in result["workloads"]:
            if workload["mean_tokens"] is not None:
                spread = "; ".join(
                    f"{name} {found['shortest']} to {found['longest']}, {found['tokens']} in all"
                    for name, found in workload["contenders"].items()
                )
                case = f"{result['size']} {result['dtype']} {result['threads']} threads, {workload['name']}"
                yield f"Response tokens in the median run of {case}: {spread}."
    for name, reason in {item for result in results for item in result["failed"].items()}:
        yield f"{name} was left out: {reason}"


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


if __name__ == "__main__":
    main()
