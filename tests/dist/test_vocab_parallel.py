"""A vocabulary that is split over ranks gives the values and gradients that one rank computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel import vocab
from mrlhf.parallel.vocab import LossPart, OutputLayer, ReferenceTokens, Tokens, token_numbers
from mrlhf.parallel.vocab_sums import Normalisers, NumbersToCompute, TokenNumbers
from tests.ranks import run_ranks
from tests.rollouts import masks_of
from tests.token_loss import divergence, token_loss

TOKENS = 9
HIDDEN = 6
SCALE = 1.25
CAP = 6.0  # of the model's logits, not of the references'
LENGTHS = [3, 6]
OTHERS = 4  # inside the second sequence
FREE = 5  # the token at which all could be drawn
LEAST_ROWS = 4  # three chunks, of which the second sequence takes two
FACTORS = torch.randn(3, TOKENS, generator=torch.Generator().manual_seed(2))
HEAD_FACTORS = torch.randn(TOKENS, 2, generator=torch.Generator().manual_seed(5))
# Of the divergence: its beta, and the tokens and logits of which it is.
KINDS: list[tuple[float, dict[str, Any]]] = [
    (1.0, {}),
    (0.0, {}),
    (0.4, {}),
    (1.0, {"top_k": 4}),
    (0.4, {"top_k": 9, "sharpness": 0.8}),
]


def _random(rows: int, seed: int) -> Tensor:
    return 1.6 * torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def _weighted(part: LossPart, numbers: TokenNumbers) -> Tensor:
    values = torch.stack([numbers.logprobs, numbers.entropy, numbers.full_kl])
    of_heads = 0.0 if numbers.heads is None else (numbers.heads * HEAD_FACTORS[part.tokens]).sum()
    return (values * FACTORS[:, part.tokens]).sum() + of_heads


def _all_sizes(
    rank: int, world_size: int, vocab_sizes: tuple[int, ...]
) -> list[tuple[float, float, float]]:
    vocab._CHUNK_BYTES["cpu"] = 1
    vocab._LEAST_CHUNK_TOKENS = LEAST_ROWS
    return [
        _shard_results(rank, world_size, vocab_size, by_token, beta, apart, masked)
        for vocab_size in vocab_sizes
        for beta, apart in KINDS
        for by_token in (True, False)
        for masked in (False, True)
    ]


def _shard_results(
    rank: int,
    world_size: int,
    vocab_size: int,
    by_token: bool,
    beta: float,
    apart: dict[str, Any],
    masked: bool,
) -> tuple[float, float, float]:
    """Compare one shard with the whole vocabulary in float64; if `masked`, with some tokens of it.

    Returns:
        Largest errors of values and of gradients, over the largest of each, and the sum of the
        padding's gradients.
    """
    group = dist.group.WORLD
    shard = -(-vocab_size // world_size)
    mine = slice(rank * shard, (rank + 1) * shard)
    whole = _random(shard * world_size, 0)
    # The tokens from `OTHERS` on have a reference with states of another size.
    references = [(_random(shard * world_size, 1), _random(OTHERS, 4))]
    larger = [
        _random(rows, seed) for rows in (shard * world_size, TOKENS - OTHERS) for seed in (6, 7)
    ]
    references.append((torch.cat(larger[:2], dim=1) / 2, torch.cat(larger[2:], dim=1)))
    targets = torch.arange(TOKENS) * 5 % vocab_size

    hidden = _random(TOKENS, 3).requires_grad_()
    layer = OutputLayer(whole[mine].clone().requires_grad_(), group, vocab_size, SCALE, CAP)
    compared = [
        ReferenceTokens(OutputLayer(weight[mine].clone(), group, vocab_size, SCALE), states)
        for weight, states in references
    ]
    tokens = Tokens(hidden, targets, LENGTHS, compared)
    could = _could_be_drawn(targets, vocab_size)
    if masked:
        has_mask = torch.arange(TOKENS) != FREE
        could[FREE] = True
        heads = torch.stack([targets, could.int().argmax(dim=1)], dim=1)  # at times one token twice
        masks = masks_of(could[:, None], has_mask[:, None])
        tokens = replace(tokens, masks=masks, heads=heads)
    else:
        could[:] = True
    wanted = NumbersToCompute(entropy=True, squares=True, kl=True, beta=beta, **apart)
    numbers, calls = _counted(lambda: token_numbers(layer, tokens, wanted))
    each = 1 + (wanted.mixes and not apart) + masked
    of_chunks = 3 * 3 if apart else 0  # the likeliest tokens of each, sums over them, a divergence
    assert calls == each + of_chunks, "one gather for all chunks, and one sum of a mixture's"
    seen = []

    def objective(part: LossPart, current: TokenNumbers) -> Tensor:
        seen.append(current.logprobs.detach())
        return _weighted(part, current)

    trained = NumbersToCompute(entropy=True, kl=True, beta=beta, **apart)
    loss, calls = _counted(lambda: token_loss(layer, tokens, trained, objective, by_token))
    assert calls == each * (3 if by_token else 2) + of_chunks, (
        "as many for each part that has a loss"
    )
    assert torch.equal(torch.cat(seen), numbers.logprobs)
    loss.backward()
    dist.all_reduce(hidden.grad)  # as the model does

    slow, slow_hidden, expected = _slowly(whole, references, tokens, could, beta, apart)
    no_sums = Normalisers(torch.empty(0), torch.empty(0))
    everything = LossPart(slice(0, 2), [slice(0, TOKENS)], expected, no_sums)
    _weighted(everything, expected).backward()

    gradients = [layer.weight.grad, hidden.grad]
    exact = [slow.grad[mine], slow_hidden.grad]
    padding = gradients[0][max(0, vocab_size - rank * shard) :]
    found, of_whole = (
        [number for number in vars(each).values() if number is not None]
        for each in (numbers, expected)
    )
    values = _worst(found, of_whole)
    return values, _worst(gradients, exact), padding.abs().sum().item()


def _slowly(
    whole: Tensor,
    references: list[tuple[Tensor, Tensor]],
    tokens: Tokens,
    could: Tensor,
    beta: float,
    apart: dict[str, Any],
) -> tuple[Tensor, Tensor, TokenNumbers]:
    """The weight and states in float64, and the numbers of the tokens from whole distributions.

    Args:
        whole: the weight, [vocab with padding, hidden].
        references: their weights, and the states of their tokens.
        could: bool [tokens, vocab], the tokens that could be drawn.
    """
    vocab_size = could.shape[1]
    slow_hidden = _random(TOKENS, 3).double().requires_grad_()
    slow = whole.double().requires_grad_()
    logits = CAP * torch.tanh((slow_hidden @ slow.T)[:, :vocab_size] / CAP) * SCALE
    log_p = torch.log_softmax(logits.masked_fill(~could, -1e5), dim=-1)
    ref_logits = torch.cat([states.double() @ weight.double().T for weight, states in references])
    ref_logits = ref_logits[:, :vocab_size] * SCALE
    log_q = torch.log_softmax(ref_logits.masked_fill(~could, -1e5), dim=-1)
    p = log_p.exp()
    expected = TokenNumbers(
        logprobs=log_p.gather(1, tokens.targets[:, None])[:, 0],
        entropy=-(p * log_p).sum(dim=1),
        full_kl=divergence(log_p, log_q, beta, **apart),
        sum_of_squares=p.square().sum(dim=1),
        heads=None if tokens.heads is None else log_p.gather(1, tokens.heads),
    )
    return slow, slow_hidden, expected


def _worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest error, over the largest of what is wanted."""
    errors = [(mine - theirs).abs().max() for mine, theirs in zip(found, wanted, strict=True)]
    return float(max(errors) / max(theirs.abs().max() for theirs in wanted))


def _could_be_drawn(targets: Tensor, vocab_size: int) -> Tensor:
    """The target alone at one token, and more and more at those after it; bool [tokens, vocab]."""
    generator = torch.Generator().manual_seed(5)
    shares = torch.linspace(0, 0.9, TOKENS)[:, None]
    could = torch.rand(TOKENS, vocab_size, generator=generator) < shares
    return could.scatter(1, targets[:, None], True)


def _counted(function):
    """What the function gives, and how many collective operations it took."""
    calls = []
    originals = {name: getattr(dist, name) for name in ("all_gather", "all_reduce")}

    def counting(name):
        return lambda *args, **kwargs: calls.append(name) or originals[name](*args, **kwargs)

    for name in originals:
        setattr(dist, name, counting(name))
    result = function()
    for name, original in originals.items():
        setattr(dist, name, original)
    return result, len(calls)


@pytest.mark.parametrize(("world_size", "vocab_sizes"), [(2, (33,)), (4, (41, 5))])
def test_shards_equal_the_whole(world_size: int, vocab_sizes: tuple[int, ...]) -> None:
    """With 41 columns the last shard has padding; with 5 the last of four shards is all padding."""
    for results_of_rank in run_ranks(world_size, _all_sizes, vocab_sizes):
        assert len(results_of_rank) == 4 * len(KINDS) * len(vocab_sizes)
        for value_error, gradient_error, padding in results_of_rank:
            assert value_error < 1e-6
            assert gradient_error < 5e-6
            assert padding == 0.0
