"""Attention within packs without TransformerEngine, on any device, against a CPU in float32.

The lengths, head_dim and windows are such as torch's attention of sequences of any lengths takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlhf.models.self_attention import CoreAttention
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
        lengths=edges.diff(),
    )


def _last_tokens(device: torch.device) -> PackedSequences:
    """Fewer queries than keys, as with context parallelism: the last tokens of each sequence."""
    queries = [-(-length // 3) for length in LENGTHS]
    return PackedSequences(
        "thd",
        torch.tensor([0, *queries]).cumsum(0).int().to(device),
        torch.tensor([0, *LENGTHS]).cumsum(0).int().to(device),
        max_seqlen_q=max(queries),
        max_seqlen_kv=max(LENGTHS),
        position_ids=torch.zeros(sum(queries), dtype=torch.int64, device=device),
        lengths=torch.tensor(LENGTHS, device=device),
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
    query, key, value = mixed.split([3, 1, 1], dim=2)
    output = _attention(window)(query, key.squeeze(2), value.squeeze(2), rotation, packed)
    (gradient,) = torch.autograd.grad((output.float() * slopes).sum(), [mixed])
    return output.detach().float().cpu(), gradient.float().cpu()


def _outputs_of_last_tokens(
    mixed: Tensor, slopes: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """The same of the last tokens alone; the gradient is that in the keys and values."""
    packed = _last_tokens(mixed.device)
    tokens = int(packed.cu_seqlens_q[-1])
    query = mixed[:tokens, :, :-2]
    both = mixed[:, :, -2:].clone().requires_grad_()
    output = _attention(window)(query, both[:, :, 0], both[:, :, 1], None, packed)
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
