"""A contender of `train_step.py` as a process that waits for a word and answers with seconds.

One contender works at a time. What it prints itself goes to standard error, since standard output
is for its answers. It also measures the limit of matrix products. This file knows no contender.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import torch

LIMIT = "limit"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Turns:
    """The contender's side of the conversation."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def answer(self, answer: Any) -> None:
        """Give what was asked for, or a first sign that the contender is ready."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def __iter__(self) -> Iterator[str]:
        """The words, until there are no more; `limit` is answered here, for every contender."""
        while line := sys.stdin.readline().strip():
            word, _, arguments = line.partition(" ")
            if word == LIMIT:
                self.answer(product_speeds(**json.loads(arguments)))
            else:
                yield word


class Stopwatch:
    """Measures seconds since it was made, those of the clock and those of this process's cores."""

    def __init__(self) -> None:
        self._clock = time.perf_counter()
        self._cpu = time.process_time()

    def read(self) -> dict[str, float]:
        """The seconds; "cpu" is hardly disturbed by other programs on the same machine."""
        return {
            "clock": time.perf_counter() - self._clock,
            "cpu": time.process_time() - self._cpu,
        }


def product_speeds(
    shapes: Sequence[tuple[int, int]], rows: int, dtype: str, seconds: float
) -> list[float]:
    """Floating-point operations a second of [rows, inputs] x [inputs, outputs], for each shape.

    It is the fastest of the calls within `seconds`, in the dtype or in float32, whichever this
    machine does faster.
    """
    kinds = {_DTYPES[dtype], torch.float32}
    return [max(_speed(*shape, rows, kind, seconds) for kind in kinds) for shape in shapes]


def _speed(inputs: int, outputs: int, rows: int, dtype: torch.dtype, seconds: float) -> float:
    x = torch.randn(rows, inputs).to(dtype)
    weight = torch.randn(outputs, inputs).to(dtype)
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        best = min(best, time.perf_counter() - began)
    return 2 * rows * inputs * outputs / best
