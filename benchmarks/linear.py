"""GFLOP/s of x @ weight.T on this machine.

    OMP_NUM_THREADS=1 python benchmarks/linear.py

It compares torch's plain product, oneDNN's product with packed weights, the engine's compiled one,
and bfloat16. They take turns, and the table gives medians. The choices in
`mrlhf/inference/native/linear.py` rest on it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.inference.native.linear import HostLinear, linear

# On a machine that others load, the processor time of a process with one thread tells more.
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
SHAPES = ((192, 192), (256, 1024), (768, 2304), (768, 32000))  # in, out
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall")
    arguments = parser.parse_args()
    clock = CLOCKS[arguments.clock]

    processor = torch.backends.cpu.get_cpu_capability()
    print(f"{torch.get_num_threads()} threads, {processor}, torch {torch.__version__}\n")
    print("| in | out | rows | plain | oneDNN | compiled | compiled / oneDNN | plain bfloat16 |")
    print("|---|---|---|---|---|---|---|---|")

    for size, columns in SHAPES:
        weight = torch.randn(columns, size)
        for rows in map(int, arguments.rows.split(",")):
            operations = 2 * rows * size * columns
            medians = measure(weight, torch.randn(rows, size), arguments.repeats, clock)
            plain, packed, compiled, half = (operations / seconds / 1e9 for seconds in medians)
            ratio = f"{compiled / packed:.2f}"
            speeds = f"{plain:.0f} | {packed:.0f} | {compiled:.0f} | {ratio} | {half:.0f}"
            print(f"| {size} | {columns} | {rows} | {speeds} |")


@torch.inference_mode()
def measure(weight: Tensor, x: Tensor, repeats: int, clock: Callable[[], float]) -> list[float]:
    """Median seconds of the plain, the packed, the compiled and the bfloat16 product."""
    compiled = linear(weight)
    if not isinstance(compiled, HostLinear):
        raise SystemExit("there is no C++ compiler on this machine: install g++")
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 32)
    half_weight = weight.bfloat16()
    half = x.bfloat16()
    contenders: list[Callable[[], Tensor]] = [
        lambda: F.linear(x, weight),
        lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
        lambda: compiled(x),
        lambda: F.linear(half, half_weight),
    ]

    seconds: list[list[float]] = [[] for _ in contenders]
    for turn in range(repeats + 1):
        for contender, measured in zip(contenders, seconds, strict=True):
            began = clock()
            contender()
            if turn > 0:  # the first turn warms up
                measured.append(clock() - began)

    return [statistics.median(measured) for measured in seconds]


if __name__ == "__main__":
    main()
