"""The collectives over gloo with three ranks, compared with what each rank is known to send."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mrlhf.parallel.collectives import all_gather_objects, all_gather_ragged, exchange
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]


def _rows(rank: int, dtype: torch.dtype, counts: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(counts[rank], 5, generator=generator) * 3).to(dtype)


def _ragged(rank: int, world: dist.ProcessGroup) -> None:
    for dtype in DTYPES:
        for counts in ([2, 0, 7], [4, 4, 4], [0, 0, 0], [0, 0, 1]):
            parts = all_gather_ragged(_rows(rank, dtype, counts), world)
            for other, part in enumerate(parts):
                assert part.dtype == dtype
                assert torch.equal(part, _rows(other, dtype, counts)), (dtype, counts, other)
    one_dimensional = all_gather_ragged(torch.full((rank,), float(rank)), world)
    assert [part.tolist() for part in one_dimensional] == [[], [1.0], [2.0, 2.0]]
    transposed = all_gather_ragged(torch.arange(6).view(2, 3).t() + rank, world)
    assert transposed[2].tolist() == [[2, 5], [3, 6], [4, 7]]


def _objects(rank: int, world: dist.ProcessGroup) -> None:
    assert all_gather_objects({"rank": rank}, world) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def _subgroup(rank: int) -> None:
    pair = dist.new_group([0, 2])
    alone = [dist.new_group([r]) for r in range(3)][rank]

    rows = torch.full((rank + 1, 2), rank)
    own = all_gather_ragged(rows, alone)
    assert torch.equal(own[0], rows) and own[0].data_ptr() != rows.data_ptr()
    if rank in (0, 2):
        assert [part.shape[0] for part in all_gather_ragged(rows, pair)] == [1, 3]


def _exchange(rank: int) -> None:
    """Each rank sends two messages to each other rank; their order decides which is which."""
    others = [peer for peer in range(3) if peer != rank]
    sends = [
        (peer, torch.full((3 + n,), 100 * rank + 10 * peer + n)) for peer in others for n in (0, 1)
    ]
    buffers = {(peer, n): torch.zeros(3 + n, dtype=torch.int64) for peer in others for n in (0, 1)}
    exchange(sends, [(peer, buffer) for (peer, _), buffer in buffers.items()])
    for (peer, n), buffer in buffers.items():
        assert buffer.tolist() == [100 * peer + 10 * rank + n] * (3 + n)
    exchange([], [])
    big = torch.full((1 << 20,), float(rank))
    received = torch.empty_like(big)
    exchange([((rank + 1) % 3, big)], [((rank - 1) % 3, received)])
    assert received.eq((rank - 1) % 3).all()


def _body(rank: int, world_size: int) -> None:
    world = dist.group.WORLD
    _ragged(rank, world)
    _objects(rank, world)
    _subgroup(rank)
    _exchange(rank)


def test_collectives_deliver_what_each_rank_sent() -> None:
    run_ranks(3, _body)
