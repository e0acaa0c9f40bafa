"""A vocabulary that is split over ranks gives the values and gradients that one rank computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.vocab import (
    vocab_parallel_kl,
    vocab_parallel_logprobs,
    vocab_parallel_sum_of_squares,
)
from tests.ranks import run_ranks

TOKENS = 9
TEMPERATURE = 0.8


def _logits(columns: int, seed: int) -> Tensor:
    return 4 * torch.randn(TOKENS, columns, generator=torch.Generator().manual_seed(seed))


def _all_sizes(
    rank: int, world_size: int, vocab_sizes: tuple[int, ...]
) -> list[tuple[float, float, float, int]]:
    return [_shard_results(rank, world_size, vocab_size) for vocab_size in vocab_sizes]


def _shard_results(rank: int, world_size: int, vocab_size: int) -> tuple[float, float, float, int]:
    """Compare one shard with the whole vocabulary in float64.

    Returns:
        Largest error of the values, largest error of the gradients, sum of the padding's gradients,
        and number of all-reduces.
    """
    group = dist.group.WORLD
    shard = -(-vocab_size // world_size)
    mine = slice(rank * shard, (rank + 1) * shard)
    whole = _logits(shard * world_size, 0)
    reference = _logits(shard * world_size, 1)
    targets = torch.arange(TOKENS) * 5 % vocab_size
    weights = torch.randn(3, TOKENS, generator=torch.Generator().manual_seed(2))

    calls = 0
    all_reduce = dist.all_reduce

    def counting(*args, **kwargs):
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counting
    logits = whole[:, mine].clone().requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(
        logits, targets, group, TEMPERATURE, vocab_size, with_entropy=True
    )
    kl = vocab_parallel_kl(logits, reference[:, mine].clone(), group, TEMPERATURE, vocab_size)
    values = torch.stack([logprobs, entropy, kl])
    (values * weights).sum().backward()
    squares = vocab_parallel_sum_of_squares(logits, group, TEMPERATURE, vocab_size)
    assert not squares.requires_grad
    dist.all_reduce = all_reduce

    slow = whole.double().requires_grad_()
    log_p = torch.log_softmax(slow[:, :vocab_size] / TEMPERATURE, dim=-1)
    log_q = torch.log_softmax(reference.double()[:, :vocab_size] / TEMPERATURE, dim=-1)
    p = log_p.exp()
    expected = torch.stack(
        [
            log_p.gather(1, targets[:, None])[:, 0],
            -(p * log_p).sum(dim=1),
            (p * (log_p - log_q)).sum(dim=1),
        ]
    )
    (expected * weights).sum().backward()

    worst_gradient = (logits.grad - slow.grad[:, mine]).abs().max().item()
    padding = logits.grad[:, max(0, vocab_size - rank * shard) :]
    squares_error = (squares - p.square().sum(dim=1)).abs().max().item()
    worst_value = max((values - expected).abs().max().item(), squares_error)
    return worst_value, worst_gradient, padding.abs().sum().item(), calls


@pytest.mark.parametrize(("world_size", "vocab_sizes"), [(2, (33,)), (4, (41, 5))])
def test_shards_equal_the_whole(world_size: int, vocab_sizes: tuple[int, ...]) -> None:
    """With 41 columns the last shard has padding; with 5 the last of four shards is all padding."""
    for results_of_rank in run_ranks(world_size, _all_sizes, vocab_sizes):
        assert len(results_of_rank) == len(vocab_sizes)
        for value_error, gradient_error, padding, calls in results_of_rank:
            assert value_error < 1e-5
            assert gradient_error < 1e-5
            assert padding == 0.0
            # two each for log-probabilities with entropy, for the KL, for the squares
            assert calls == 6
