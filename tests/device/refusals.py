"""What the simulated device must refuse and count, one function for each; they run on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from tests.simulated_device.counts import Counts
from tests.simulated_device.state import DEVICE

CUDA = "cuda"


def refused() -> dict[str, str]:
    """By name of the mistake, what the device says; "" if it says nothing."""
    return {name: _error(call) for name, call in MISTAKES.items()}


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _captured(call: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(4, device=CUDA)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        call(x)


def _late_read() -> None:
    host = torch.ones(4, device=CUDA).to("cpu", non_blocking=True)
    host.sum()


def _early_write() -> None:
    host = torch.ones(4).pin_memory()
    host.to(CUDA, non_blocking=True)
    host.zero_()


def _attention(**changed: Any) -> None:
    query = torch.ones(4, 2, 16, dtype=torch.bfloat16, device=CUDA)
    edges = torch.tensor([0, 4], dtype=torch.int32, device=CUDA)
    values = {"query": query, "key": query, "value": query, "cu": edges} | changed
    cu = values.pop("cu")
    varlen_attn(*values.values(), cu, cu, 4, 4, window_size=(-1, 0))


MISTAKES: dict[str, Callable[[], Any]] = {
    "two devices": lambda: torch.ones(2, device=CUDA) + torch.ones(2),
    "two devices in a product": lambda: torch.ones(2, 2, device=CUDA) @ torch.ones(2, 2),
    "out of another device": lambda: torch.add(torch.ones(2, device=CUDA), 1, out=torch.empty(2)),
    "host generator": lambda: torch.rand(2, device=CUDA).uniform_(generator=torch.Generator()),
    "numpy": lambda: torch.ones(2, device=CUDA).numpy(),
    "item in a capture": lambda: _captured(lambda x: x.sum().item()),
    "copy to the host in a capture": lambda: _captured(lambda x: x.cpu()),
    "new tensor of host numbers in a capture": lambda: _captured(
        lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=CUDA)
    ),
    "synchronize in a capture": lambda: _captured(lambda x: torch.cuda.synchronize()),
    "nonzero in a capture": lambda: _captured(lambda x: x.nonzero()),
    "read before the copy is done": _late_read,
    "write before the copy is done": _early_write,
    "memory": lambda: torch.empty(DEVICE.memory.total + 1, dtype=torch.uint8, device=CUDA),
    "attention in float32": lambda: _attention(query=torch.ones(4, 2, 16, device=CUDA)),
    "attention with int64 lengths": lambda: _attention(cu=torch.tensor([0, 4], device=CUDA)),
    "attention with host lengths": lambda: _attention(cu=torch.tensor([0, 4], dtype=torch.int32)),
}


def counted() -> dict[str, Counts]:
    """By name, what is counted for a piece of code."""
    found = {}
    for name, call in COUNTED.items():
        x = torch.arange(6.0, device=CUDA)
        with DEVICE.counted() as counts:
            call(x)
        found[name] = counts
    return found


def _pinned_round_trip(x: torch.Tensor) -> None:
    there = torch.ones(6).pin_memory().to(CUDA, non_blocking=True)
    back = (x + there).to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert back.sum() == 21


COUNTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "an operator": lambda x: x + 1,
    "views": lambda x: x.view(2, 3).t()[0],
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "a condition": lambda x: bool(x[0] > 1),
    "copy to the host": lambda x: x.cpu(),
    "copy to the device": lambda x: torch.ones(6).to(CUDA),
    "pinned copies": _pinned_round_trip,
    "boolean index": lambda x: x[x > 1],
    "number at a mask": lambda x: x.masked_fill_(x > 1, 0.0),
    "numbers of a list": lambda x: torch.tensor([x[0], x[1]]),
    "norm": lambda x: torch.nn.functional.rms_norm(x, (6,)),
}


def graph() -> dict[str, Any]:
    """A graph reads its inputs when it is replayed, and gives nothing before."""
    x = torch.arange(3.0, device=CUDA)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = x * 2 + 1

    before = y.cpu()
    captured.replay()
    first = y.cpu()
    x += 10
    captured.replay()

    return {
        "before": before.isnan().all().item(),
        "first": first.tolist(),
        "second": y.tolist(),
        "kernels": captured.kernels.total(),
        "replays": DEVICE.counts.replays,
        "replayed": DEVICE.counts.replayed,
    }


def memory() -> dict[str, int]:
    """What is allocated, and the peaks of two phases."""
    start = DEVICE.memory.allocated
    with DEVICE.phase("large"):
        x = torch.empty(1000, device=CUDA)
        del x

    with DEVICE.phase("small"):
        y = torch.empty(100, device=CUDA)
        view = y[:10]
        del y
        held = DEVICE.memory.allocated - start
        del view

    return {
        "held": held,
        "after": DEVICE.memory.allocated - start,
        "reserved": DEVICE.memory.reserved - start,
        **{name: peak - start for name, peak in DEVICE.memory.phase_peaks.items()},
    }
