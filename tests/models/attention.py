"""Attention without a model around it, and the packs that it works on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mrlhf.models.self_attention import CoreAttention
from mrlhf.parallel.packed_sequences import PackedSequences

HOST = torch.device("cpu")


def packed(
    lengths: Sequence[int], queries: Sequence[int] | None = None, device: torch.device = HOST
) -> PackedSequences:
    """Whole sequences; or of each the last tokens alone, so many, as with context parallelism."""
    counts = lengths if queries is None else queries
    positions = [torch.arange(n)[n - count :] for n, count in zip(lengths, counts, strict=True)]
    return PackedSequences(
        "thd",
        torch.tensor([0, *counts]).cumsum(0).int().to(device),
        torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        max_seqlen_q=max(counts),
        max_seqlen_kv=max(lengths),
        position_ids=torch.cat(positions).to(device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
    )


def core_attention(heads: int, kv_heads: int, dim: int, window: int | None) -> CoreAttention:
    """The attention of a layer; None: each token sees all before it."""
    # mrlhf must be imported before megatron-core.
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * dim,
        num_attention_heads=heads,
        num_query_groups=kv_heads,
        kv_channels=dim,
        attention_dropout=0.0,
        window_size=None if window is None else (window - 1, 0),
    )
    return CoreAttention(config, 1)
