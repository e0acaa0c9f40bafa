"""Attention within packs without TransformerEngine, on any device, against a CPU in float32.

The lengths, head_dim and windows are such as torch's attention of sequences of any lengths takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.models.attention import core_attention, packed

LENGTHS = [1, 5, 48, 97, 7, 203]
SHAPE = (sum(LENGTHS), 2, 5, 64)  # tokens, KV heads, three query heads with their k and v, head_dim


def _outputs(mixed: Tensor, slopes: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Output and gradient, in float32 on the host."""
    pack = packed(LENGTHS, device=mixed.device)
    rotation = pack.rotation(1.0 / 100 ** (torch.arange(0, 48, 2) / 48), 1.0)
    mixed = mixed.requires_grad_()
    query, key, value = mixed.split([3, 1, 1], dim=2)
    output = core_attention(6, 2, 64, window)(
        query, key.squeeze(2), value.squeeze(2), rotation, pack
    )
    (gradient,) = torch.autograd.grad((output.float() * slopes).sum(), [mixed])
    return output.detach().float().cpu(), gradient.float().cpu()


def _outputs_of_last_tokens(
    mixed: Tensor, slopes: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """The same of the last tokens alone; the gradient is that in the keys and values."""
    queries = [-(-length // 3) for length in LENGTHS]
    pack = packed(LENGTHS, queries, mixed.device)
    tokens = sum(queries)
    query = mixed[:tokens, :, :-2]
    both = mixed[:, :, -2:].clone().requires_grad_()
    output = core_attention(6, 2, 64, window)(query, both[:, :, 0], both[:, :, 1], None, pack)
    (gradient,) = torch.autograd.grad((output.float() * slopes[:tokens]).sum(), [both])
    return output.detach().float().cpu(), gradient.float().cpu()


COMPUTED = (
    (_outputs_of_last_tokens, ("output of last tokens", "gradient of their keys")),
    (_outputs, ("output", "gradient")),
)


def gaps(device: torch.device) -> dict[str, float]:
    """The largest differences, after they were found to be within what the dtype allows."""
    found = {}
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        for window in (None, 20):
            generator = torch.Generator().manual_seed(0)
            mixed = torch.randn(SHAPE, generator=generator).to(dtype)
            slopes = torch.randn(SHAPE[0], 384, generator=generator)

            on_device = (mixed.to(device), slopes.to(device), window)
            for compute, names in COMPUTED:
                wanted = compute(mixed.float(), slopes, window)
                given = compute(*on_device)
                for name, value, expected in zip(names, given, wanted, strict=True):
                    torch.testing.assert_close(value, expected, atol=tolerance, rtol=tolerance)
                    gap = float((value - expected).abs().max())
                    found[f"{name}, {dtype}, window {window}"] = gap
    return found
