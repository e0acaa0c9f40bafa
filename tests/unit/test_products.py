"""Products of bfloat16 in float32: the same but for rounding, and nowhere left out in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrlhf.host import products
from mrlhf.parallel.vocab import OutputLayer, Tokens
from mrlhf.parallel.vocab_sums import NumbersToCompute
from tests.token_loss import token_loss

# rows, inner, columns
SIZES = [(5, 3, 7), (1, 64, 8), (40, 200, 33), (0, 4, 4), (4, 0, 3), (300, 17, 2)]
HALF_STEP = 2**-8  # a number of bfloat16 is rounded by at most so much of itself, twice


@pytest.fixture(params=[True, False], ids=["widened", "as it is"])
def widens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(products, "float32_is_faster", lambda: request.param)
    monkeypatch.setattr(products, "_MOST_WIDENED", 1000)  # several parts
    return bool(request.param)


def _draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16()


def _assert_rounded(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.bfloat16 and found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, rtol=HALF_STEP, atol=1e-5)


@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
def test_a_product_is_the_exact_one_rounded(
    widens: bool, rows: int, inner: int, columns: int
) -> None:
    a = _draw(rows, inner)
    b = _draw(columns, inner).t()
    exact = a.double() @ b.double()
    assert products.is_widened(a) == widens
    _assert_rounded(products.matmul(a, b), exact)
    _assert_rounded(products.mm(a, b.contiguous(), a.new_empty(rows, columns)), exact)
    _assert_rounded(products.matmul(a[:, None], b), exact[:, None])

    total = torch.ones(rows, columns)
    products.add_mm(total, a, b)
    torch.testing.assert_close(total.double(), exact + 1, rtol=2 * HALF_STEP, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_formats_are_left_alone(widens: bool, dtype: torch.dtype) -> None:
    a = _draw(6, 5).to(dtype)
    b = _draw(5, 4).to(dtype)
    assert torch.equal(products.matmul(a, b), a @ b)
    out = products.mm(a, b, a.new_empty(6, 4))
    assert torch.equal(out, a @ b) and torch.equal(products.linear(a, b.t()), a @ b)


@pytest.mark.parametrize("trained", [True, False])
def test_gradients_are_those_of_the_product(widens: bool, trained: bool) -> None:
    x = _draw(12, 20).requires_grad_()
    weight = _draw(9, 20).requires_grad_(trained)
    grad = _draw(12, 9)
    products.linear(x, weight).backward(grad)
    assert x.grad is not None
    _assert_rounded(x.grad, grad.double() @ weight.detach().double())
    if not trained:
        assert weight.grad is None
        return
    assert weight.grad is not None
    _assert_rounded(weight.grad, grad.double().t() @ x.detach().double())


class _Products(TorchDispatchMode):
    """Notes the formats of the matrices that torch multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm,
            torch.ops.aten.addmm_,
            torch.ops.aten.bmm,
        ):
            self.seen.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


def test_training_multiplies_in_the_faster_format_alone(widens: bool) -> None:
    from megatron.core.tensor_parallel.layers import (  # after mrlhf, which rewrites it
        linear_with_frozen_weight,
        linear_with_grad_accumulation_and_async_allreduce,
    )

    x = _draw(6, 1, 16).requires_grad_()
    weight = torch.nn.Parameter(_draw(8, 16))
    weight.main_grad = torch.zeros(8, 16)
    frozen = _draw(16, 8)
    with _Products() as seen:
        for fused in (True, False):
            inner = linear_with_grad_accumulation_and_async_allreduce(
                x, weight, None, fused, allreduce_dgrad=False, sequence_parallel=False
            )
            hidden = linear_with_frozen_weight(inner, frozen, None, False, False, False, None)
            hidden.sum().backward()

        states = _draw(5, 16).requires_grad_()
        output = torch.nn.Parameter(_draw(40, 16))
        layer = OutputLayer(output, None, 40, 1.0)
        token_loss(
            layer,
            Tokens(states, torch.arange(5), [3, 2]),
            NumbersToCompute(),
            lambda _, numbers: numbers.logprobs.sum(),
            by_token=True,
        ).backward()
    # Logits are float32 anywhere.
    assert seen.seen == {torch.float32} | (set() if widens else {torch.bfloat16})
    assert weight.main_grad.any() and output.grad is not None and output.grad.any()


@pytest.mark.parametrize(
    ("tiles", "bfloat16", "vendor", "widens"),
    [
        (True, True, "GenuineIntel", False),
        (False, True, "GenuineIntel", True),
        (False, True, "AuthenticAMD", False),
        (False, False, "AuthenticAMD", True),
    ],
)
def test_instructions_decide(
    monkeypatch: pytest.MonkeyPatch, tiles: bool, bfloat16: bool, vendor: str, widens: bool
) -> None:
    """A clock could decide otherwise on another rank, or when a run goes on."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(products, "processor_says", lambda name: vendor)
    assert products.float32_is_faster.__wrapped__() == widens
