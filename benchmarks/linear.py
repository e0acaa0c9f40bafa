"""GFLOP/s of x @ weight.T on this machine.

    OMP_NUM_THREADS=1 python benchmarks/linear.py

It compares torch's plain product, oneDNN's product with packed weights, and bfloat16. They take
turns, and the table gives medians. The choices in `mrlhf/inference/native/linear.py` rest on it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SHAPES = ((192, 192), (256, 1024), (768, 2304), (768, 32000))  # in, out
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()

    processor = torch.backends.cpu.get_cpu_capability()
    print(f"{torch.get_num_threads()} threads, {processor}, torch {torch.__version__}\n")
    print("| in | out | rows | plain | packed | packed / plain | plain bfloat16 |")
    print("|---|---|---|---|---|---|---|")

    for size, columns in SHAPES:
        weight = torch.randn(columns, size)
        for rows in ROWS:
            operations = 2 * rows * size * columns
            medians = measure(weight, torch.randn(rows, size), arguments.repeats)
            plain, packed, half = (operations / seconds / 1e9 for seconds in medians)
            speeds = f"{plain:.0f} | {packed:.0f} | {packed / plain:.2f} | {half:.0f}"
            print(f"| {size} | {columns} | {rows} | {speeds} |")


@torch.inference_mode()
def measure(weight: Tensor, x: Tensor, repeats: int) -> list[float]:
    """Median seconds of the plain, the packed and the bfloat16 product."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    half_weight = weight.bfloat16()
    half = x.bfloat16()
    contenders: list[Callable[[], Tensor]] = [
        lambda: F.linear(x, weight),
        lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
        lambda: F.linear(half, half_weight),
    ]

    seconds: list[list[float]] = [[] for _ in contenders]
    for turn in range(repeats + 1):
        for contender, measured in zip(contenders, seconds, strict=True):
            began = time.perf_counter()
            contender()
            if turn > 0:  # the first turn warms up
                measured.append(time.perf_counter() - began)

    return [statistics.median(measured) for measured in seconds]


if __name__ == "__main__":
    main()
