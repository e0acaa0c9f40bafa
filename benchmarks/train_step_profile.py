"""Where the seconds of an update go, by category, as torch's profiler sees the operators of a rank.

An operator's own seconds, without those of the operators that it calls, go to one category. The
seconds in which no operator runs are Python's, but for those of waiting for other ranks. This file
knows the names of operators, and what it marks: optimizer, gradients and waiting.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import __version__ as TORCH
from torch.distributed import Work
from torch.profiler import ProfilerActivity, profile, record_function

OPTIMIZER = "benchmark: optimizer"
GRADIENTS = "benchmark: gradients"
WAITING = "benchmark: waiting"
_ACCUMULATE = "AccumulateGrad"

CATEGORIES = (
    "products",
    "output layer",
    "log-probs",
    "attention",
    "norms, activations, rotation",
    "optimizer",
    "gradients",
    "memory and copies",
    "waiting",
    "host",
)
_PRODUCTS = (
    "mm",
    "addmm",
    "addmm_",
    "bmm",
    "baddbmm",
    "linear",
    "linear_backward",
    "mkldnn_linear",
)
_MEMORY = (
    *("empty", "empty_like", "empty_strided", "new_empty", "zeros", "zeros_like", "new_zeros"),
    *("ones", "ones_like", "full", "full_like", "fill_", "zero_", "copy_", "clone", "contiguous"),
    *("cat", "stack", "to", "_to_copy", "index", "index_select", "index_put_", "gather"),
    *("_index_put_impl_", "scatter_add_", "scatter", "embedding", "embedding_dense_backward"),
    *("index_add_", "index_select_backward", "masked_select", "nonzero", "resize_", "pad"),
    *("constant_pad_nd", "select_backward", "slice_backward", "split_with_sizes_copy"),
)
# Compiled code and functions with a gradient of their own appear under the name of their class.
_CLASSES = {
    "attention": "attention",
    "logprob": "log-probs",
    "fullkl": "log-probs",
    "norm": "norms, activations, rotation",
    "gated": "norms, activations, rotation",
    "swiglu": "norms, activations, rotation",
    "silu": "norms, activations, rotation",
    "rotar": "norms, activations, rotation",
    "rotate": "norms, activations, rotation",
    "residual": "norms, activations, rotation",
}
_COLLECTIVES = ("gloo:", "nccl:", "c10d::", "record_param_comms")
_ATTENTION = ("attention", "varlen_attn", "_softmax")


def category(name: str, shapes: Sequence[Sequence[int]], around: Sequence[str], vocab: int) -> str:
    """The category of an operator.

    Args:
        name: as the profiler gives it, such as "aten::mm", or a function's class.
        shapes: of its tensors.
        around: the names of what it runs within.
        vocab: rows of the output layer on this rank.
    """
    short = name.rpartition("::")[2]
    if WAITING in around or name.startswith(_COLLECTIVES):
        return "waiting"
    if OPTIMIZER in around:
        return "optimizer"
    if GRADIENTS in around or any(_ACCUMULATE in outer for outer in around):
        return "gradients"
    if "::" not in name:
        kinds = [kind for part, kind in _CLASSES.items() if part in name.lower()]
        return kinds[0] if kinds else "host"
    if any(part in name for part in _ATTENTION) and not any(vocab in shape for shape in shapes):
        return "attention"

    # The embedding's weight has as many rows as the output layer's.
    if any(vocab in shape for shape in shapes) and "embedding" not in short:
        return "output layer" if short in _PRODUCTS else "log-probs"
    if short in _PRODUCTS:
        return "products"
    return "memory and copies" if short in _MEMORY else "norms, activations, rotation"


@contextmanager
def ranges(engines: Sequence[Any]) -> Iterator[None]:
    """Mark the optimizers of these engines, the filling of gradients' buffers, and waiting."""
    optimizers = [engine.optimizer for engine in engines]
    chunks = [chunk for engine in engines for chunk in engine.chunks]
    for optimizer in optimizers:
        optimizer.step = _marked(OPTIMIZER, optimizer.step)
    for chunk in chunks:
        chunk.zero_grad_buffer = _marked(GRADIENTS, chunk.zero_grad_buffer)
    try:
        with mock.patch.object(Work, "wait", _marked(WAITING, Work.wait)):
            yield
    finally:
        for optimizer in optimizers:
            del optimizer.step
        for chunk in chunks:
            del chunk.zero_grad_buffer


def _marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return marked


def seconds_by_category(work: Callable[[], object], vocab: int) -> dict[str, float]:
    """Profile `work`; its seconds by category, and their sum as "total".

    Args:
        work: runs its operators in this thread.
        vocab: as for `category`.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        began = time.perf_counter()
        with record_function("benchmark: work"):
            work()
        total = time.perf_counter() - began

    events = profiler.events()
    main = next(event.thread for event in events if event.name == "benchmark: work")
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for event in events:
        if event.thread != main:
            continue
        if event.name == WAITING:
            seconds["waiting"] += event.cpu_time_total / 1e6
        elif _is_operator(event.name):
            kind = category(event.name, event.input_shapes, _around(event), vocab)
            if kind != "waiting":
                seconds[kind] += event.self_cpu_time_total / 1e6

    busy = sum(seconds[name] for name in CATEGORIES if name not in ("waiting", "host"))
    seconds["host"] = max(0.0, total - busy - seconds["waiting"])
    return {**seconds, "total": total}


def _is_operator(name: str) -> bool:
    """Whether an event is an operator, and no range, whose own time is that of Python."""
    return not name.startswith(("autograd::engine", "benchmark: ", "Optimizer."))


def _around(event: Any) -> list[str]:
    names = []
    outer = event.cpu_parent
    while outer is not None:
        names.append(outer.name)
        outer = outer.cpu_parent
    return names


def print_tables(table: Sequence[str], rows: Sequence[dict[str, Any]], *remarks: str) -> None:
    """Print a table of results, the profiles of its rows if there are any, and the machine."""
    print("\n".join(table))
    profiles = [row for row in rows if "profile" in row]
    if profiles:
        print("\n".join(["", *profile_table(profiles)]))
    for remark in (*remarks, f"{platform.processor() or platform.machine()}, torch {TORCH}"):
        print(f"\n{remark}")


def profile_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The profiles of some rows of results as lines of a table, in percent of the update.

    Args:
        rows: each with "title" and "profile", the result of `seconds_by_category`.
    """
    lines = [f"| case | {' | '.join(CATEGORIES)} |", "|---" * (len(CATEGORIES) + 1) + "|"]
    for row in rows:
        profiled = row["profile"]
        shares = [f"{profiled[name] / profiled['total']:.0%}" for name in CATEGORIES]
        lines.append(f"| {row['title']} | {' | '.join(shares)} |")
    return lines
