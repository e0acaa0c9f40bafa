"""Sweeps the kernel of paged attention while decoding: keys at a time, warps and stages.

    PYTHONPATH=. python benchmarks/gpu_paged.py --json FILE

The heads are those of Qwen3-0.6B, in bfloat16, then those of DeepSeek-V3's latent attention: 16, as
on each of 8 ranks, and 64. A row says how many bytes of keys and values a
second one choice reads, for so many sequences of so many tokens; the row "as it is" is what the
engine takes. Few short sequences lie in the GPU's cache, and so read faster than memory allows.
`--size tiny` tries the program on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpu_record import write_json
from torch import Tensor

PAGE = 64


class Sweep(NamedTuple):
    """What is swept, and how often each choice runs."""

    kind: str
    heads: int
    kv_heads: int
    dim: int
    sequences: tuple[int, ...]
    contexts: tuple[int, ...]
    keys: tuple[int, ...]
    warps: tuple[int, ...]
    stages: tuple[int, ...]
    calls: int
    more: int = 0  # numbers of a key after its first `dim`, which are its value


_FEW = ((1, 64), (1024, 8192), (16, 32, 64), (4, 8), (2, 3), 20, 64)
SWEEPS = {
    "tiny": [
        Sweep("pairs", 2, 1, 32, (2,), (128,), (32, 64), (4,), (2,), 1),
        Sweep("latents", 2, 1, 32, (2,), (128,), (16,), (4,), (2,), 1, more=16),
    ],
    "0.6B": [
        Sweep(
            *("pairs", 16, 8, 128, (1, 16, 64, 256), (1024, 8192)),
            *((32, 64, 128), (2, 4, 8), (2, 3), 20),
        ),
        Sweep("latents, 16 heads", 16, 1, 512, *_FEW),
        Sweep("latents, 64 heads", 64, 1, 512, *_FEW),
    ],
}


def main() -> None:
    """Write a row for each choice as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--size", choices=SWEEPS, default="0.6B")
    arguments = parser.parse_args()
    if arguments.size == "tiny":
        os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are defined
    elif not torch.cuda.is_available():
        print("skipped: the sweep of paged attention needs a CUDA GPU")
        return

    found = []
    for sweep in SWEEPS[arguments.size]:
        for row in rows(sweep, "cpu" if arguments.size == "tiny" else "cuda"):
            print(row, flush=True)
            found.append(row)
            write_json(arguments.json, found)


def rows(sweep: Sweep, device: str) -> Iterator[dict[str, Any]]:
    """What each choice reads in a second; one that a GPU has no room for says so."""
    from mrlhf.gpu import attention_kernels

    real = attention_kernels.paged_attention
    choices = itertools.product(sweep.keys, sweep.warps, sweep.stages)
    named = [dict(zip(("KEYS", "num_warps", "num_stages"), c, strict=True)) for c in choices]
    for sequences, context in itertools.product(sweep.sequences, sweep.contexts):
        call, read = _case(sweep, sequences, context, device)
        for choice in [{}, *named]:
            about = {"kind": sweep.kind, "sequences": sequences, "context": context}
            about |= choice or {"as it is": True}
            with mock.patch.object(attention_kernels, "paged_attention", _Chosen(real, choice)):
                try:
                    seconds = _seconds(call, sweep.calls, device)
                except Exception as error:  # of Triton, whose name differs from version to version
                    yield {**about, "outcome": f"{type(error).__name__}: {error}".splitlines()[0]}
                else:
                    yield {**about, "us": 1e6 * seconds, "bytes_per_s": read / seconds}


class _Chosen:
    """A kernel that is launched with other constants."""

    def __init__(self, kernel: Any, choice: dict[str, int]) -> None:
        self._kernel = kernel
        self._choice = choice

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self._launch, self._kernel[grid])

    def _launch(self, launch: Callable[..., Any], *arguments: Any, **constants: Any) -> Any:
        return launch(*arguments, **{**constants, **self._choice})


def _case(
    sweep: Sweep, sequences: int, context: int, device: str
) -> tuple[Callable[[], Tensor], int]:
    """A step of decoding, and the bytes of its keys and values."""
    from mrlhf.gpu import launch

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    pages = context // PAGE
    generator = torch.Generator(device).manual_seed(0)
    new = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    q = new(sequences, sweep.heads, sweep.dim + sweep.more)
    stores = new(1 if sweep.more else 2, sequences * pages, PAGE, sweep.kv_heads, q.shape[-1])
    keys, values = stores[0], stores[-1][..., : sweep.dim]
    of_int = partial(torch.arange, dtype=torch.int32, device=device)
    tables = of_int(sequences * pages).view(sequences, pages)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=device)

    scale = sweep.dim**-0.5
    starts = of_int(sequences + 1)
    arguments = (q, keys, values, tables, starts, lengths, 1, context, 0, scale)
    return partial(launch.paged_attention, *arguments), stores.nbytes


def _seconds(call: Callable[[], Tensor], calls: int, device: str) -> float:
    """Of one call, among several in a CUDA graph: the host's launches do not count."""
    call()  # compiles

    def run() -> None:
        for _ in range(calls):
            call()

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
        run()

    wait()
    began = time.perf_counter()
    run()
    wait()
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    main()
