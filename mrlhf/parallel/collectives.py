"""Exchanges between ranks: ragged and object gathers, and batched point-to-point.

Everything works on gloo (host tensors) and NCCL (device tensors) alike; payloads travel as bytes,
so any dtype goes. Every rank of a group makes the same calls in the same order. This file creates
no group and knows nothing of roles, weights or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Peer = tuple[int, Tensor]


def all_gather_ragged(rows: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The `rows` of every rank of the group, in group order.

    Args:
        rows: [rows of this rank, ...]; the first dimension may differ between ranks and may be 0,
            the others and the dtype are the same everywhere.
        group: the ranks that take part.
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


def all_gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """The picklable `value` of every rank of the group, in group order."""
    gathered: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered  # type: ignore[return-value]


def connect(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Wait for every rank of the group, and have NCCL make its communicator, which `exchange`
    needs.

    NCCL makes it at a group's first call on device tensors, in which all ranks must take part, and
    an exchange may leave some out.
    """
    dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def exchange(
    sends: Sequence[Peer], receives: Sequence[Peer], group: dist.ProcessGroup | None = None
) -> None:
    """Send and receive contiguous tensors, all at once, and wait for all of them; receives are
    filled in place.

    Peers are global ranks and never the rank itself. Messages between two ranks are matched by
    order: the k-th that one lists for the other is the k-th that the other lists for it. Either
    list may be empty. Call `connect` once before.
    """
    finish_exchange(start_exchange(sends, receives, group))


def start_exchange(
    sends: Sequence[Peer], receives: Sequence[Peer], group: dist.ProcessGroup | None = None
) -> list[dist.Work]:
    """The first half of `exchange`: the tensors are under way until `finish_exchange` returns."""
    operations = [
        dist.P2POp(operation, _as_bytes(tensor), peer, group)
        for operation, peers in ((dist.isend, sends), (dist.irecv, receives))
        for peer, tensor in peers
        if tensor.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def finish_exchange(works: Sequence[dist.Work]) -> None:
    """The second half of `exchange`: on a GPU, what is queued after it sees the tensors that have
    arrived.
    """
    for work in works:
        work.wait()


def _as_bytes(tensor: Tensor) -> Tensor:
    """A flat view of the bytes of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
