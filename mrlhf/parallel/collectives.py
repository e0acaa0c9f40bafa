"""Gathers of ragged tensors and of objects, and batched point-to-point messages between ranks.

Everything works both on gloo (host tensors) and on NCCL (device tensors). Tensors travel as bytes,
so every dtype works. Every rank of a group makes the same calls in the same order. This file
creates no group and does not know roles, weights or batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Message = tuple[int, Tensor]
_PATIENCE = timedelta(days=30)


def wait_for_all(group: dist.ProcessGroup | None) -> None:
    """Wait for every rank of the group, all ranks of the job if it is None, however long it takes.

    Call it where data or storage decide when a rank comes: a wait within any other collective ends
    the job after `distributed.timeout_s`. A rank that dies meanwhile still ends it at once.
    """
    options = dist.AllreduceOptions()
    options.timeout = _PATIENCE  # before torch 2.9 gloo takes the group's own
    group = group or dist.group.WORLD
    assert group is not None
    group.allreduce([torch.zeros(1, dtype=torch.float32, device="cpu")], options).wait()


def all_gather_ragged(rows: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The `rows` of every rank of the group, in group order.

    Their first dimension may differ between ranks and may be 0; the other dimensions and the dtype
    are the same on all ranks.
    """
    rows = rows.detach().contiguous()
    size = dist.get_world_size(group)
    if size == 1:
        return [rows.clone()]

    count = torch.tensor([rows.shape[0]], dtype=torch.int64, device=rows.device)
    gathered = [torch.empty_like(count) for _ in range(size)]
    dist.all_gather(gathered, count, group=group)
    counts = [int(n) for n in torch.cat(gathered).tolist()]

    padded = torch.zeros((max(counts), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in range(size)]
    if padded.numel():
        dist.all_gather([_as_bytes(part) for part in parts], _as_bytes(padded), group=group)
    return [part[:n] for part, n in zip(parts, counts, strict=True)]


def all_gather_objects(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The picklable `value` of every rank of the group, in group order."""
    gathered: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered  # type: ignore[return-value]


def from_first(value: T, group: dist.ProcessGroup | None) -> T:
    """The picklable `value` of the first rank of the group, on all of its ranks."""
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def raise_together(
    error: str | None, kind: type[Exception], group: dist.ProcessGroup | None
) -> None:
    """Raise the error of the first rank that has one, as a `kind`, on every rank of the group."""
    wait_for_all(group)  # for one that has read or written files
    for other in all_gather_objects(error, group):
        if other is not None:
            raise kind(other)


@contextmanager
def together(kind: type[Exception], group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise a `kind` that the body raises on one rank on every rank of the group."""
    error = None
    try:
        yield
    except kind as failure:
        error = str(failure)
    raise_together(error, kind, group)


def all_max(value: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """The largest `value` of all ranks of the group; all ranks of the job if it is None."""
    largest = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return int(largest.item())


def connect(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Wait for every rank of the group, and make NCCL create the communicator for `exchange`."""
    # NCCL creates it at a group's first call on device tensors, in which all ranks must take part.
    dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def exchange(
    sends: Sequence[Message], receives: Sequence[Message], group: dist.ProcessGroup | None = None
) -> None:
    """Send and receive contiguous tensors, all at once, and wait for all of them.

    Each message names the other global rank, never this one, and the tensor to send or to fill.
    Messages between two ranks are matched by order: the k-th tensor that one rank sends to the
    other fills the k-th tensor that the other receives from it. Call `connect` once before.
    """
    finish_exchange(start_exchange(sends, receives, group))


def start_exchange(
    sends: Sequence[Message], receives: Sequence[Message], group: dist.ProcessGroup | None = None
) -> list[dist.Work]:
    """The first half of `exchange`: the tensors are under way until `finish_exchange` returns."""
    operations: list[dist.P2POp] = []
    for operation, messages in ((dist.isend, sends), (dist.irecv, receives)):
        for peer, tensor in messages:
            if tensor.numel():
                operations.append(dist.P2POp(operation, _as_bytes(tensor), peer, group))
    return dist.batch_isend_irecv(operations) if operations else []


def finish_exchange(works: Sequence[dist.Work]) -> None:
    """Wait for the tensors of `exchange`; on a GPU the stream waits and not the host."""
    for work in works:
        work.wait()


def _as_bytes(tensor: Tensor) -> Tensor:
    """A flat view of the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
