"""The output layer on one shard, against torch in float64 and literal numbers."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrlhf.parallel import vocab, vocab_sums
from mrlhf.parallel.vocab import LossPart, OutputLayer, ReferenceTokens, Tokens, token_numbers
from mrlhf.parallel.vocab_sums import Normalisers, NumbersToCompute, TokenNumbers
from tests.token_loss import divergence, token_loss

VOCABULARY = 37
TOKENS = 11
HIDDEN = 8
TARGETS = torch.arange(TOKENS) * 3
LENGTHS = [3, 0, 1, 4, 3]
FACTORS = torch.randn(3, TOKENS, generator=torch.Generator().manual_seed(9))


def _random(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return (1.4 * numbers).to(dtype)


def _layer(
    seed: int,
    padded: int,
    scale: float,
    dtype: torch.dtype = torch.float32,
    cap: float | None = None,
) -> OutputLayer:
    weight = _random(padded, seed, dtype).requires_grad_()
    return OutputLayer(weight, None, VOCABULARY, scale, cap)


def _log_softmax(hidden: Tensor, weight: Tensor, scale: float, cap: float | None = None) -> Tensor:
    logits = (hidden @ weight.T)[:, :VOCABULARY]
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return torch.log_softmax(logits * scale, dim=-1)


def _weighted(part: LossPart, numbers: TokenNumbers) -> Tensor:
    """A loss with another factor at each number."""
    values = (numbers.logprobs, numbers.entropy, numbers.full_kl)
    factors = FACTORS[:, part.tokens]
    return sum((f @ value for f, value in zip(factors, values, strict=True) if value is not None))


def _small_chunks(monkeypatch: pytest.MonkeyPatch, rows: int, block: int) -> None:
    monkeypatch.setitem(vocab._CHUNK_BYTES, "cpu", 1)
    monkeypatch.setattr(vocab, "_LEAST_CHUNK_TOKENS", rows)
    monkeypatch.setitem(vocab_sums._BLOCK_ELEMENTS, "cpu", block)


def test_two_tokens_by_hand() -> None:
    hidden = torch.tensor([[1.0]])
    layer = OutputLayer(torch.tensor([[0.0], [math.log(3.0)]]), None, 2, 1.0)
    flat = OutputLayer(torch.zeros(2, 1), None, 2, 1.0)
    tokens = Tokens(hidden, torch.tensor([1]), [1], [ReferenceTokens(flat, hidden)])
    numbers = token_numbers(layer, tokens, NumbersToCompute(entropy=True, squares=True, kl=True))

    assert numbers.heads is None
    found = [float(number) for name, number in vars(numbers).items() if name != "heads"]
    # ln 0.75; -(0.25 ln 0.25 + 0.75 ln 0.75); ln 2 minus that; 0.25^2 + 0.75^2
    assert found == pytest.approx([math.log(0.75), 0.5623351, 0.1308120, 0.625], abs=1e-6)

    def of(beta: float) -> float:
        wanted = NumbersToCompute(kl=True, beta=beta)
        return float(token_numbers(layer, tokens, wanted).full_kl)

    # From the other side -ln 2 - (ln 0.25 + ln 0.75) / 2. With m = (0.375, 0.625) half of
    # 0.5 ln (0.5 / 0.375) + 0.5 ln (0.5 / 0.625) and of the same with 0.25 and 0.75.
    assert of(0.0) == pytest.approx(0.1438410, abs=1e-6)
    assert of(0.5) == pytest.approx((0.0322692 + 0.0353749) / 2, abs=1e-6)

    # Of three tokens the teacher's two likeliest count, the last two: the policy's 1/4 and 1/2 of
    # 1 are 1/3 and 2/3 of these, the teacher's 2/8 and 5/8 are 2/7 and 5/7. At half the logits
    # they are 1 and sqrt 2, sqrt 2 and sqrt 5, over their sums.
    layer = OutputLayer(torch.tensor([[1.0], [1.0], [2.0]]).log(), None, 3, 1.0)
    teacher = OutputLayer(torch.tensor([[1.0], [2.0], [5.0]]).log(), None, 3, 1.0)
    tokens = Tokens(hidden, torch.tensor([0]), [1], [ReferenceTokens(teacher, hidden)])
    for sharpness, wanted in ((1.0, 0.0053883), (0.5, 0.0014999)):
        numbers = token_numbers(
            layer, tokens, NumbersToCompute(kl=True, top_k=2, sharpness=sharpness)
        )
        assert float(numbers.full_kl) == pytest.approx(wanted, abs=1e-6)
        assert float(numbers.logprobs) == pytest.approx(math.log(0.25), abs=1e-6)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize(
    ("rows", "block", "parts", "sequence_parts"),
    [(1, 1, 11, 4), (2, 50, 7, 4), (4, 100, 3, 3), (128, 1 << 17, 1, 1)],
    ids=["one", "less than a sequence", "some", "all"],
)
@pytest.mark.parametrize(
    ("padded", "scale", "beta", "apart", "caps"),
    [
        (VOCABULARY, 1.0, 1.0, {}, (None, None)),
        (40, 1.6, 1.0, {}, (None, None)),
        (40, 1.6, 0.0, {}, (5.0, None)),
        (40, 1.6, 0.3, {}, (5.0, 3.0)),
        (40, 1.6, 1.0, {"top_k": 5, "sharpness": 0.7}, (5.0, 5.0)),
        (40, 1.6, 0.0, {"top_k": 5}, (None, None)),
        (40, 1.6, 0.3, {"top_k": 50, "sharpness": 1.3}, (None, 3.0)),
        (40, 1.6, 0.3, {"sharpness": 0.7}, (None, None)),
    ],
)
def test_numbers_and_gradients_equal_float64(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    block: int,
    parts: int,
    sequence_parts: int,
    padded: int,
    scale: float,
    beta: float,
    apart: dict[str, Any],
    caps: tuple[float | None, float | None],
    by_token: bool,
) -> None:
    """`caps` are those of the policy and of the first reference."""
    _small_chunks(monkeypatch, rows, block)
    layer = _layer(1, padded, scale, cap=caps[0])
    reference = _layer(2, padded, scale, cap=caps[1])
    hidden = _random(TOKENS, 3).requires_grad_()
    # The last tokens have another reference, with states of another size and a scale of its own.
    larger = OutputLayer(torch.cat([_random(padded, 5)] * 2, dim=1), None, VOCABULARY, scale / 3)
    ref_hidden = _random(TOKENS, 4)
    larger_hidden = torch.cat([_random(3, 6), _random(3, 7)], dim=1)
    references = [
        ReferenceTokens(reference, ref_hidden[:8]),
        ReferenceTokens(larger, larger_hidden),
    ]
    tokens = Tokens(hidden, TARGETS, LENGTHS, references)

    wanted = NumbersToCompute(entropy=True, squares=True, kl=True, beta=beta, **apart)
    numbers = token_numbers(layer, tokens, wanted)
    seen = []

    def objective(part: LossPart, current: TokenNumbers) -> Tensor:
        seen.append(current.logprobs.detach())
        return _weighted(part, current)

    wanted = NumbersToCompute(entropy=True, kl=True, beta=beta, **apart)
    loss = token_loss(layer, tokens, wanted, objective, by_token)
    (3 * loss).backward()

    slow_hidden = hidden.detach().double().requires_grad_()
    slow_weight = layer.weight.detach().double().requires_grad_()
    log_p = _log_softmax(slow_hidden, slow_weight, scale, caps[0])
    ref_weight = reference.weight.detach().double()
    log_q = torch.cat(
        [
            _log_softmax(ref_hidden[:8].double(), ref_weight, scale, caps[1]),
            _log_softmax(larger_hidden.double(), larger.weight.double(), scale / 3),
        ]
    )
    p = log_p.exp()
    expected = TokenNumbers(
        logprobs=log_p.gather(1, TARGETS[:, None])[:, 0],
        entropy=-(p * log_p).sum(dim=1),
        full_kl=divergence(log_p, log_q, beta, **apart),
        sum_of_squares=p.square().sum(dim=1),
    )
    numbers_32 = expected.map(lambda number: number.float())
    no_sums = Normalisers(torch.empty(0), torch.empty(0))
    everything = LossPart(slice(0, len(LENGTHS)), [slice(0, TOKENS)], numbers_32, no_sums)
    slow_loss = _weighted(everything, numbers_32)
    (3 * slow_loss).backward()

    for name in ("logprobs", "entropy", "full_kl", "sum_of_squares"):
        wanted = getattr(expected, name)
        found = getattr(numbers, name)
        assert found.dtype == torch.float32 and not found.requires_grad
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(loss, slow_loss, atol=3e-5, rtol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), slow_hidden.grad, atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(layer.weight.grad.double(), slow_weight.grad, atol=5e-5, rtol=1e-5)
    assert reference.weight.grad is None
    assert not layer.weight.grad[VOCABULARY:].any()
    # What training sees is what evaluation gave, bit for bit.
    assert torch.equal(torch.cat(seen), numbers.logprobs)
    assert len(seen) == (parts if by_token else sequence_parts)


def test_a_loss_of_sequences_gets_them_whole_and_their_logits_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _small_chunks(monkeypatch, 4, 100)
    layer = _layer(1, VOCABULARY, 1.0)
    tokens = Tokens(_random(TOKENS, 3).requires_grad_(), TARGETS, LENGTHS)
    parts = []
    products = []
    project = torch.mm

    def objective(part: LossPart, numbers: TokenNumbers) -> Tensor:
        parts.append((part.tokens.start, part.tokens.stop, part.rows.start, part.rows.stop))
        return numbers.logprobs.sum().square()

    def counted(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        products.append(out.shape[1])
        return project(left, right, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    token_loss(layer, tokens, NumbersToCompute(), objective, by_token=False)
    assert parts == [(0, 4, 0, 3), (4, 8, 3, 4), (8, 11, 4, 5)]
    assert products.count(VOCABULARY) == 3


def test_ranks_that_share_sequences_cut_between_the_same_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _small_chunks(monkeypatch, 4, 100)
    layer = _layer(1, VOCABULARY, 1.0)
    longest = [3, 0, 2, 5, 3, 1]
    parts: list[LossPart] = []

    def objective(part: LossPart, numbers: TokenNumbers) -> Tensor:
        parts.append(part)
        return numbers.logprobs.sum().square()

    for lengths in ([3, 0, 1, 5, 2, 0], [0, 0, 2, 0, 3, 1], [0] * 6):
        count = sum(lengths)
        hidden = _random(count, 3).requires_grad_()
        tokens = Tokens(hidden, TARGETS[:count], lengths, most_lengths=longest)
        token_loss(layer, tokens, NumbersToCompute(), objective, by_token=False).backward()

    # A chunk has four tokens: 3 + 2 are too many, 5 take two chunks, 3 + 1 fill one.
    rows = [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 6)]
    assert [part.rows for part in parts] == 3 * rows
    assert [part.tokens for part in parts[:4]] == [
        slice(0, 3),
        slice(3, 4),
        slice(4, 9),
        slice(9, 11),
    ]
    assert [part.tokens for part in parts[4:8]] == [
        slice(0, 0),
        slice(0, 2),
        slice(2, 2),
        slice(2, 6),
    ]


@pytest.mark.parametrize("used", ["logprobs", "entropy"])
def test_gradient_of_one_number_alone(used: str) -> None:
    layer = _layer(1, VOCABULARY, 1.0)
    hidden = _random(TOKENS, 3).requires_grad_()
    wanted = NumbersToCompute(entropy=True)

    def objective(part: LossPart, numbers: TokenNumbers) -> Tensor:
        return getattr(numbers, used).sum()

    token_loss(layer, Tokens(hidden, TARGETS, LENGTHS), wanted, objective, by_token=True).backward()
    slow = hidden.detach().double().requires_grad_()
    log_p = _log_softmax(slow, layer.weight.detach().double(), 1.0)
    chosen = log_p.gather(1, TARGETS[:, None]) if used == "logprobs" else -(log_p.exp() * log_p)
    chosen.sum().backward()
    torch.testing.assert_close(hidden.grad.double(), slow.grad, atol=3e-5, rtol=0)


def test_logprobs_do_not_depend_on_what_else_is_wanted() -> None:
    layer = _layer(1, VOCABULARY, 1.0)
    tokens = Tokens(_random(TOKENS, 3), TARGETS, LENGTHS)
    alone = token_numbers(layer, tokens, NumbersToCompute())
    both = token_numbers(layer, tokens, NumbersToCompute(entropy=True, squares=True))
    assert alone.entropy is None and alone.full_kl is None and alone.sum_of_squares is None
    assert torch.equal(alone.logprobs, both.logprobs)


def test_bfloat16_weights_give_float32_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    _small_chunks(monkeypatch, 4, 100)
    layer = _layer(1, VOCABULARY, 1.0, torch.bfloat16)
    hidden = _random(TOKENS, 3, torch.bfloat16).requires_grad_()
    tokens = Tokens(hidden, TARGETS, LENGTHS)
    numbers = token_numbers(layer, tokens, NumbersToCompute())
    token_loss(layer, tokens, NumbersToCompute(), lambda part, n: n.logprobs.sum(), True).backward()

    # Logits of bfloat16 would err by 0.01.
    logits = (hidden.double() @ layer.weight.double().T).detach().requires_grad_()
    expected = torch.log_softmax(logits, dim=-1).gather(1, TARGETS[:, None])[:, 0]
    expected.sum().backward()
    torch.testing.assert_close(numbers.logprobs.double(), expected, atol=1e-5, rtol=0)
    assert hidden.grad.dtype == layer.weight.grad.dtype == torch.bfloat16
    of_weight = logits.grad.T @ hidden.detach().double()
    torch.testing.assert_close(layer.weight.grad.double(), of_weight, atol=0.05, rtol=0.02)

    # With a sum in float32 the gradient is added to that, as it was before it was rounded.
    rounded = layer.weight.grad
    layer.weight.grad = None
    layer.weight.main_grad = torch.full(layer.weight.shape, 0.5)
    token_loss(layer, tokens, NumbersToCompute(), lambda part, n: n.logprobs.sum(), True).backward()
    assert layer.weight.grad is not None and not layer.weight.grad.any()
    added = layer.weight.main_grad - 0.5
    assert not torch.equal(added, added.bfloat16().float())
    torch.testing.assert_close(added, rounded.float(), atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize(
    ("dtype", "ref_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
    ids=["policy in float32", "policy in bfloat16"],
)
def test_policy_and_reference_of_different_dtypes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, ref_dtype: torch.dtype
) -> None:
    _small_chunks(monkeypatch, 4, 100)
    layer = _layer(1, VOCABULARY, 1.0, dtype)
    reference = _layer(2, VOCABULARY, 1.0, ref_dtype)
    hidden = _random(TOKENS, 3, dtype).requires_grad_()
    references = [ReferenceTokens(reference, _random(TOKENS, 4, ref_dtype))]
    tokens = Tokens(hidden, TARGETS, LENGTHS, references)
    wanted = NumbersToCompute(kl=True)
    numbers = token_numbers(layer, tokens, wanted)
    token_loss(layer, tokens, wanted, lambda part, n: n.full_kl.sum(), by_token=True).backward()

    # No model's logits are rounded to its own dtype.
    logits = (hidden.double() @ layer.weight.double().T).detach().requires_grad_()
    ref_logits = (_random(TOKENS, 4, ref_dtype).double() @ reference.weight.double().T).detach()
    log_p = torch.log_softmax(logits, dim=-1)
    kl = (log_p.exp() * (log_p - torch.log_softmax(ref_logits, dim=-1))).sum(dim=1)
    kl.sum().backward()
    torch.testing.assert_close(numbers.full_kl.double(), kl, atol=1e-5, rtol=0)
    of_hidden = logits.grad @ layer.weight.detach().double()
    tolerance = 3e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(hidden.grad.double(), of_hidden, atol=tolerance, rtol=0.02)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_kl_of_equal_distributions_is_exactly_zero(beta: float) -> None:
    layer = _layer(1, VOCABULARY, 1.4)
    hidden = _random(TOKENS, 3).requires_grad_()
    tokens = Tokens(hidden, TARGETS, LENGTHS, [ReferenceTokens(layer, hidden.detach())])
    seen = []

    def objective(part: LossPart, numbers: TokenNumbers) -> Tensor:
        assert numbers.full_kl is not None
        seen.append(numbers.full_kl.detach())
        return numbers.full_kl.sum()

    token_loss(
        layer, tokens, NumbersToCompute(kl=True, beta=beta), objective, by_token=True
    ).backward()
    assert torch.equal(torch.cat(seen), torch.zeros(TOKENS))
    assert not hidden.grad.any() and not layer.weight.grad.any()


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    tokens = Tokens(hidden, torch.tensor([1]), [1])
    layer = OutputLayer(weight, None, 3, 1.0)
    numbers = token_numbers(layer, tokens, NumbersToCompute(entropy=True))
    assert numbers.logprobs.item() == -2e4
    assert numbers.entropy is not None and numbers.entropy.item() == 0.0

    def objective(part: LossPart, current: TokenNumbers) -> Tensor:
        return (current.logprobs + current.entropy).sum()

    token_loss(layer, tokens, NumbersToCompute(entropy=True), objective, by_token=True).backward()
    assert torch.equal(weight.grad, torch.tensor([[-1.0], [1.0], [0.0]]))


def test_no_tokens_have_a_loss_without_effect() -> None:
    layer = _layer(1, VOCABULARY, 1.0)
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    tokens = Tokens(hidden, torch.zeros(0, dtype=torch.int64), [0, 0])
    assert token_numbers(layer, tokens, NumbersToCompute(entropy=True)).logprobs.shape == (0,)
    loss = token_loss(layer, tokens, NumbersToCompute(), lambda part, n: n.logprobs.sum(), True)
    loss.backward()
    assert loss.item() == 0.0 and not layer.weight.grad.any()


def test_a_loss_does_not_keep_its_gradients_after_its_backward_pass() -> None:
    layer = _layer(1, VOCABULARY, 1.0)
    hidden = _random(TOKENS, 3).requires_grad_()
    tokens = Tokens(hidden, TARGETS, LENGTHS)
    loss = token_loss(layer, tokens, NumbersToCompute(), lambda part, n: n.logprobs.sum(), True)
    shapes = (hidden.shape, layer.weight.shape)

    def alive() -> list[tuple[int, ...]]:
        tensors = [thing for thing in gc.get_objects() if type(thing) is Tensor]
        return [tuple(tensor.shape) for tensor in tensors if tensor.shape in shapes]

    before = len(alive())
    loss.backward(retain_graph=True)
    hidden.grad = layer.weight.grad = None
    assert len(alive()) == before - 2

    with pytest.raises(AssertionError, match="handed on"):
        loss.backward()


class _LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest storage that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def _largest(tokens: int, by_token: bool) -> int:
    hidden = torch.zeros(tokens, HIDDEN, requires_grad=True)
    layer = OutputLayer(torch.zeros(1000, HIDDEN, requires_grad=True), None, 1000, 1.0)
    targets = torch.zeros(tokens, dtype=torch.int64)
    references = [ReferenceTokens(layer, hidden.detach())]
    some = Tokens(hidden, targets, [tokens // 2] * 2, references)
    wanted = NumbersToCompute(entropy=True, kl=True)
    with _LargestTensor() as largest:
        token_numbers(layer, some, NumbersToCompute(entropy=True, squares=True, kl=True))
        token_loss(layer, some, wanted, lambda part, n: n.full_kl.sum(), by_token).backward()
    return largest.bytes


@pytest.mark.parametrize("by_token", [True, False])
def test_memory_does_not_grow_with_tokens_times_vocabulary(
    monkeypatch: pytest.MonkeyPatch, by_token: bool
) -> None:
    _small_chunks(monkeypatch, 16, 1 << 12)
    # A buffer of 16 rows: the logits of one model.
    assert _largest(64, by_token) == _largest(640, by_token) == 16 * 1000 * 4
