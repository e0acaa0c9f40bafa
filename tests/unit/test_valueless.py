"""Tensors without values: which they are, what is read from them, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.simulation.valueless import Exchange, Valueless, with_values, without_values


@pytest.fixture
def mode() -> Iterator[Valueless]:
    with without_values(lambda: "now") as mode:
        yield mode


def test_floating_point_numbers_lose_their_values_and_integers_keep_them(mode: Valueless) -> None:
    weights = torch.zeros(2**40, 3, dtype=torch.bfloat16)  # more than any machine has
    assert isinstance(weights, FakeTensor) and weights.nbytes == 2**41 * 3
    assert isinstance(weights[:5] @ torch.ones(3, 4, dtype=torch.bfloat16), FakeTensor)
    assert torch.arange(3).cumsum(0).tolist() == [0, 1, 3]
    assert torch.tensor([0.5]).item() == 0.5
    assert with_values(lambda: torch.ones(2)).tolist() == [1, 1]


def test_a_module_without_values_trains(mode: Valueless) -> None:
    layer = torch.nn.Linear(2**20, 2**20).bfloat16()
    assert layer.weight.dtype == torch.bfloat16
    layer(torch.ones(1, 2**20, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.shape == (2**20, 2**20)
    assert float(layer.weight.grad.norm()) == 0.0


def test_what_is_read_has_the_shape_that_real_masks_and_numbers_give(mode: Valueless) -> None:
    table = torch.zeros(4, 6)
    mask = torch.tensor([True, False, True, True])
    assert table[mask].shape == (3, 6)
    assert table.masked_select(mask[:, None].expand(4, 6)).shape == (18,)
    table[mask] = 1.0
    assert (table > 0).nonzero().shape == (24, 2)
    assert table.numpy().tolist() == [[0.0] * 6] * 4
    assert bool((table > 0).all())


def test_the_largest_are_spread_evenly(mode: Valueless) -> None:
    chosen = torch.zeros(12, 8).topk(2, dim=-1).indices
    assert chosen.flatten().bincount().tolist() == [3] * 8
    assert all(len(set(row)) == 2 for row in chosen.tolist())


def test_messages_are_counted_and_not_sent(mode: Valueless) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        dist.all_reduce(torch.zeros(10))
        dist.all_reduce(torch.zeros(10))
        dist.all_gather_into_tensor(torch.zeros(40), torch.zeros(10))
        dist.send(torch.zeros(3), 1)
        counts = torch.tensor([1, 2, 3, 4])
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
    finally:
        dist.destroy_process_group()
    assert arriving.tolist() == [1, 2, 3, 4]
    assert dict(mode.calls) == {
        Exchange("now", "allreduce", 4): 2,
        Exchange("now", "allgather_base", 4): 1,
        Exchange("now", "send", 4): 1,
        Exchange("now", "alltoall_base", 4): 1,
    }
    assert sorted(mode.nbytes.values()) == [12, 32, 80, 160]
