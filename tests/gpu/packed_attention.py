"""Attention within packs without TransformerEngine, on any device, against a CPU in float32.

The lengths, head_dim and windows are such as torch's attention of sequences of any lengths takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlhf.models.attention import CoreAttention
from mrlhf.parallel.packed_sequences import PackedSequences

LENGTHS = [1, 5, 48, 97, 7, 203]
SHAPE = (sum(LENGTHS), 2, 5, 64)  # tokens, KV heads, three query heads with their k and v, head_dim


def _packed(device: torch.device) -> PackedSequences:
    edges = torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device)
    return PackedSequences(
        "thd",
        edges,
        edges,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
        position_ids=torch.cat([torch.arange(length) for length in LENGTHS]).to(device),
        sequences=len(LENGTHS),
    )


def _attention(window: int | None) -> CoreAttention:
    # mrlhf must be imported before megatron-core.
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=384,
        num_attention_heads=6,
        num_query_groups=2,
        kv_channels=64,
        attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
    )
    return CoreAttention(config, 1)


def _outputs(mixed: Tensor, slopes: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Output and gradient, in float32 on the host."""
    packed = _packed(mixed.device)
    rotation = packed.rotation(1.0 / 100 ** (torch.arange(0, 48, 2) / 48), 1.0)
    mixed = mixed.requires_grad_()
    output = _attention(window)((mixed,), rotation, packed)
    (gradient,) = torch.autograd.grad((output.float() * slopes).sum(), [mixed])
    return output.detach().float().cpu(), gradient.float().cpu()


def gaps(device: torch.device) -> dict[str, float]:
    """The largest differences, after they were found to be within what the dtype allows."""
    found = {}
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        for window in (None, 20):
            generator = torch.Generator().manual_seed(0)
            mixed = torch.randn(SHAPE, generator=generator).to(dtype)
            slopes = torch.randn(SHAPE[0], 384, generator=generator)

            wanted = _outputs(mixed.float(), slopes, window)
            given = _outputs(mixed.to(device), slopes.to(device), window)
            for name, value, expected in zip(("output", "gradient"), given, wanted, strict=True):
                torch.testing.assert_close(value, expected, atol=tolerance, rtol=tolerance)
                gap = float((value - expected).abs().max())
                found[f"{name}, {dtype}, window {window}"] = gap
    return found
