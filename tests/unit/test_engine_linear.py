"""The engine's matrix products against torch's, compiled and without a compiler."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.inference.native.linear import HostLinear, Linear, linear
from tests.compilers import without_compiler

SIZES = [(64, 48), (20, 33), (8, 1), (300, 161)]  # in, out


def _product(size: int, columns: int, biased: bool) -> tuple[Linear, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(columns, size, generator=generator) * size**-0.5
    bias = torch.randn(columns, generator=generator) if biased else None
    return linear(weight, bias), weight, bias


def _rows(count: int, size: int) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("size", "columns"), SIZES)
def test_products_equal_torch(size: int, columns: int, biased: bool, compiled: bool) -> None:
    with nullcontext() if compiled else without_compiler():
        product, weight, bias = _product(size, columns, biased)
    assert isinstance(product, HostLinear) == compiled, "this machine has no C++ compiler"

    for count in (0, 1, 2, 5, 13, 97, 200):
        x = _rows(count, size)
        torch.testing.assert_close(product(x), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    x = _rows(size, 7).t()
    torch.testing.assert_close(product(x), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "columns"), SIZES)
def test_a_row_has_the_same_product_whatever_is_beside_it(size: int, columns: int) -> None:
    product, _, _ = _product(size, columns, biased=True)
    x = _rows(230, size)
    together = product(x)
    for count in (1, 2, 7, 50, 101):
        assert torch.equal(product(x[3 : 3 + count]), together[3 : 3 + count])

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(product(x), together)
    finally:
        torch.set_num_threads(threads)
