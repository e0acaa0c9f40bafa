"""The attention of a layer on compiled operators against the same on torch's."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mrlhf.inference.native.attention import Attention
from mrlhf.inference.native.linear import linear
from mrlhf.inference.native.operators import StepInputs
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.parallel.masks import Paged
from tests.compilers import both_ways
from tests.shards import tiny_spec

EPS = 1e-5
HIDDEN = 48
KV_HEADS = 2
PER_KV_HEAD = 3
DIM = 32
BLOCK = 16


def _passes() -> list[StepInputs]:
    """Three sequences: their prompts, and then one token of each."""
    lengths = torch.tensor([19, 5, 1], dtype=torch.int32)
    tables = torch.tensor([[4, 1], [0, 3], [2, 5]], dtype=torch.int32)
    passes = []
    for starts, counts in (([0, 0, 0], lengths.tolist()), (lengths.tolist(), [1, 1, 1])):
        positions = torch.cat(
            [torch.arange(s, s + count) for s, count in zip(starts, counts, strict=True)]
        )
        sequence = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
        blocks = tables[sequence, positions // BLOCK].long()
        ends = [0, *itertools.accumulate(counts)]
        passes.append(
            StepInputs(
                tokens=positions,
                positions=positions,
                cache_places=blocks * BLOCK + positions % BLOCK,
                mask=Paged(
                    query_edges=torch.tensor(ends, dtype=torch.int32),
                    lengths=torch.tensor(starts, dtype=torch.int32)
                    + torch.tensor(counts, dtype=torch.int32),
                    block_tables=tables,
                    most_queries=max(counts),
                    most_keys=20,
                ),
                last=torch.tensor(ends[1:]) - 1,
            )
        )

    return passes


def _layer(
    normed: bool,
    head_normed: bool,
    biased: bool,
    window: int | None,
    has_sinks: bool,
    cap: float | None,
) -> Attention:
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    angles = torch.outer(torch.arange(32.0), 1.0 / 100 ** (torch.arange(0, DIM, 2) / DIM))
    columns = KV_HEADS * (PER_KV_HEAD + 2) * DIM
    return Attention(
        spec=replace(
            tiny_spec("llama"),
            head_dim=DIM,
            norm_eps=EPS,
            qk_norm="head" if head_normed else "none",
            attention_multiplier=0.2,
            attention_cap=cap,
        ),
        parallel=TensorParallel(None),
        kv_heads=KV_HEADS,
        norm=1 + some(HIDDEN) if normed else None,
        qkv=linear(some(columns, HIDDEN), some(columns) if biased else None),
        norms=(1 + some(DIM), 1 + some(DIM)) if head_normed else None,
        tables=(angles.cos(), angles.sin()),
        window=window,
        proj=linear(some(HIDDEN, KV_HEADS * PER_KV_HEAD * DIM)),
        sinks=5 * some(KV_HEADS * PER_KV_HEAD) if has_sinks else None,
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("normed", "head_normed", "biased", "window", "has_sinks", "cap"),
    [
        (True, True, False, None, False, None),
        (True, False, True, 7, True, None),
        (False, True, True, None, True, None),
        (True, False, False, 7, False, 0.4),
    ],
)
def test_compiled_operators_give_what_those_of_torch_give(
    normed: bool,
    head_normed: bool,
    biased: bool,
    window: int | None,
    has_sinks: bool,
    cap: float | None,
    threads: int,
) -> None:
    layer = _layer(normed, head_normed, biased, window, has_sinks, cap)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for way in both_ways():
            generator = torch.Generator().manual_seed(5)
            cache = (torch.zeros(6, BLOCK, KV_HEADS, DIM), torch.zeros(6, BLOCK, KV_HEADS, DIM))
            own = []
            for inputs in _passes():
                hidden = torch.randn(len(inputs.tokens), HIDDEN, generator=generator)
                delta = torch.randn(len(inputs.tokens), HIDDEN, generator=generator)
                for added in (None, delta):
                    with way:
                        own += [layer(hidden, added, inputs, cache), hidden.clone()]
            results.append(own)
    finally:
        torch.set_num_threads(before)

    for one, torchs in zip(*results, strict=True):
        torch.testing.assert_close(one, torchs, rtol=1e-4, atol=1e-5)
        assert bool(one.abs().sum() > 1)
