"""Grouped products against one product a group, on the CPU's version of the kernel."""

from __future__ import annotations

import pytest
import torch

from mrlhf.models.grouped_products import grouped_products, has_kernel

OUT = 24
IN = 16


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="an older torch")
@pytest.mark.parametrize("counts", [(5, 0, 16, 3), (0, 0)], ids=str)
def test_outputs_and_gradients_equal_those_of_single_products(counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().requires_grad_()

    rows = draw(sum(counts), IN)
    matrices = [draw(OUT, IN) for _ in counts]
    weights = draw(sum(counts), OUT).detach()
    ends = torch.tensor(counts).cumsum(0).int()

    (grouped_products(rows, ends, matrices) * weights).sum().backward()
    parts = zip(rows.detach().float().split(counts), matrices, weights.split(counts), strict=True)
    grad_rows = []
    for part, matrix, weight in parts:
        grad_rows.append(weight.float() @ matrix.detach().float())
        assert matrix.grad is not None
        wanted = weight.float().t() @ part
        torch.testing.assert_close(matrix.grad.float(), wanted, rtol=2e-2, atol=5e-2)
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad.float(), torch.cat(grad_rows), rtol=2e-2, atol=5e-2)


def test_a_cpu_computes_one_product_after_the_other() -> None:
    assert not has_kernel(torch.zeros(8, 8, dtype=torch.bfloat16), 8, 8)
