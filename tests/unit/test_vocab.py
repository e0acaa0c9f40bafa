"""Log-probabilities, entropy and KL on one shard, against torch in float64 and literal numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mrlhf.parallel import vocab
from mrlhf.parallel.vocab import vocab_parallel_kl, vocab_parallel_logprobs

VOCABULARY = 37


def random_logits(
    padded: int = VOCABULARY, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(11, padded, generator=generator)).to(dtype).requires_grad_()


def slow_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits.double()[:, :VOCABULARY] / temperature, dim=-1)


def test_two_tokens_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    logprobs, entropy = vocab_parallel_logprobs(
        logits, torch.tensor([1]), None, 1.0, 2, with_entropy=True
    )
    assert entropy is not None
    assert logprobs.item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert entropy.item() == pytest.approx(0.5623351, abs=1e-6)  # -(0.25 ln 0.25 + 0.75 ln 0.75)
    kl = vocab_parallel_kl(logits, torch.zeros(1, 2), None, 1.0, 2)
    assert kl.item() == pytest.approx(0.1308120, abs=1e-6)  # ln 2 - 0.5623351


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("padded", [VOCABULARY, 40])
@pytest.mark.parametrize("chunk_elements", [1, 100, 1 << 24])
def test_equals_float64(
    monkeypatch: pytest.MonkeyPatch, temperature: float, padded: int, chunk_elements: int
) -> None:
    monkeypatch.setitem(vocab._CHUNK_ELEMENTS, "cpu", chunk_elements)
    logits = random_logits(padded)
    untouched = random_logits(padded).detach()
    targets = torch.arange(11) * 3
    weight = torch.randn(11)
    entropy_weight = torch.randn(11)

    logprobs, entropy = vocab_parallel_logprobs(
        logits, targets, None, temperature, VOCABULARY, with_entropy=True
    )
    assert entropy is not None
    (logprobs @ weight + entropy @ entropy_weight).backward()

    slow = logits.detach().clone().requires_grad_()
    log_p = slow_log_softmax(slow, temperature)
    expected = log_p.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(log_p.exp() * log_p).sum(dim=1)
    (expected @ weight.double() + expected_entropy @ entropy_weight.double()).backward()

    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits.grad, slow.grad, atol=1e-5, rtol=0)
    assert torch.equal(logits.detach(), untouched)


def test_gradient_of_one_output_alone() -> None:
    targets = torch.arange(11)
    for used in (0, 1):
        logits = random_logits()
        outputs = vocab_parallel_logprobs(logits, targets, None, 1.0, VOCABULARY, with_entropy=True)
        output = outputs[used]
        assert output is not None
        output.sum().backward()

        slow = random_logits()
        log_p = slow_log_softmax(slow, 1.0)
        expected = log_p.gather(1, targets[:, None]) if used == 0 else -(log_p.exp() * log_p)
        expected.sum().backward()
        torch.testing.assert_close(logits.grad, slow.grad, atol=1e-5, rtol=0)


def test_without_entropy_gives_none_and_the_same_logprobs() -> None:
    targets = torch.arange(11)
    alone, entropy = vocab_parallel_logprobs(
        random_logits(), targets, None, 1.0, VOCABULARY, with_entropy=False
    )
    both, _ = vocab_parallel_logprobs(
        random_logits(), targets, None, 1.0, VOCABULARY, with_entropy=True
    )
    assert entropy is None
    assert torch.equal(alone, both)


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits = random_logits(dtype=torch.bfloat16)
    logprobs, _ = vocab_parallel_logprobs(
        logits, torch.arange(11), None, 1.0, VOCABULARY, with_entropy=False
    )
    expected = slow_log_softmax(logits, 1.0)[torch.arange(11), torch.arange(11)]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)
    logprobs.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_kl_equals_float64(temperature: float) -> None:
    logits = random_logits(40)
    reference = random_logits(40, seed=1)
    weight = torch.randn(11, generator=torch.Generator().manual_seed(2))
    kl = vocab_parallel_kl(logits, reference, None, temperature, VOCABULARY)
    (kl @ weight).backward()

    slow = logits.detach().clone().requires_grad_()
    log_p = slow_log_softmax(slow, temperature)
    log_q = slow_log_softmax(reference.detach(), temperature)
    expected = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    (expected @ weight.double()).backward()

    torch.testing.assert_close(kl.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits.grad, slow.grad, atol=1e-5, rtol=1e-5)
    assert reference.grad is None


def test_kl_of_equal_distributions_is_exactly_zero() -> None:
    logits = random_logits()
    kl = vocab_parallel_kl(logits, logits.detach().clone(), None, 0.7, VOCABULARY)
    kl.sum().backward()
    assert torch.equal(kl, torch.zeros(11))
    assert torch.equal(logits.grad, torch.zeros(11, VOCABULARY))


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(
        logits, torch.tensor([1]), None, 1.0, 3, with_entropy=True
    )
    assert entropy is not None
    (logprobs + entropy).sum().backward()
    assert logprobs.item() == -2e4 and entropy.item() == 0.0
    assert torch.equal(logits.grad, torch.tensor([[-1.0, 1.0, 0.0]]))
