"""The experts that the native engine records are those that transformers' routers choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.engine_loop import generate, requests_for
from mrlhf.inference.base import Sample, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from tests.models.engines import PROMPTS, UIDS, hf_model, make_engine, spec_of
from tests.models.mixtures import MIXTURES, router_of

RECORDED = SamplingParams(
    n=2, temperature=0.8, max_tokens=14, seed=5, stop_token_ids=(7, 20), record_experts=True
)
# Long prompts of one beginning, which share blocks; some end where a block ends.
SHARED = [PROMPTS[3] + PROMPTS[2][:4], PROMPTS[3] + PROMPTS[4], PROMPTS[3]]


def _routed(model: Any, tokens: list[int]) -> NDArray[Any]:
    """The experts that transformers sends tokens to, sorted, [tokens, mixtures, per_token]."""
    chosen: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        chosen.append(output[2])

    experts = spec_of(model).experts
    assert experts is not None
    hooks = []
    for layer, is_mixture in zip(model.model.layers, experts.layers, strict=True):
        if is_mixture:
            hooks.append(router_of(layer).register_forward_hook(keep))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).sort(dim=-1).values.numpy()


def _assert_recorded(model: Any, prompts: list[list[int]], samples: list[Sample]) -> None:
    experts = spec_of(model).experts
    assert experts is not None
    for sample in samples:
        tokens = [*prompts[sample.request_id], *sample.token_ids]
        assert sample.experts is not None and sample.experts.dtype == np.uint8
        assert sample.experts.shape == (len(tokens) - 1, experts.mixtures, experts.per_token)
        assert (np.sort(sample.experts, axis=-1) == _routed(model, tokens)[:-1]).all()


def _answer(engine: NativeEngine, prompts: list[list[int]]) -> tuple[list[Sample], int]:
    """The samples, and how many sequences had to be computed again."""
    finished = generate(engine, requests_for(prompts, UIDS[: len(prompts)], RECORDED))
    return finished.samples, finished.stats.preemptions


@pytest.mark.parametrize("name", MIXTURES)
def test_records_are_what_transformers_chooses(name: str) -> None:
    model = hf_model(name)
    engine = make_engine(model, block_size=4, max_prefill_tokens=10)
    for prompts in (PROMPTS, SHARED, SHARED):  # the last ones have been computed before
        samples, _ = _answer(engine, prompts)
        assert len(samples) == 2 * len(prompts)
        _assert_recorded(model, prompts, samples)
    assert len({row.tobytes() for sample in samples for row in sample.experts}) > 5


def test_a_sequence_that_is_computed_again_is_recorded_again() -> None:
    model = hf_model("qwen3-moe")
    spec = spec_of(model)
    assert spec.experts is not None
    pairs = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 4
    block_bytes = 4 * (pairs + 3 * 3)  # three mixtures, three experts of one byte each

    engine = make_engine(model, block_size=4, cache_bytes=16 * block_bytes)
    samples, preemptions = _answer(engine, PROMPTS)
    assert preemptions > 0
    assert engine.cache_bytes == 16 * block_bytes
    _assert_recorded(model, PROMPTS, samples)


def test_nothing_is_recorded_unless_it_is_asked_for() -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=3, seed=0)
    for name in ("qwen3-moe", "llama"):
        engine = make_engine(hf_model(name))
        samples = generate(engine, requests_for(PROMPTS, UIDS, plain)).samples
        assert all(sample.experts is None for sample in samples)


@pytest.mark.parametrize(("count", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_numbers_of_experts_take_as_few_bytes_as_they_can(count: int, dtype: torch.dtype) -> None:
    experts = spec_of(hf_model("mixtral")).experts
    assert experts is not None
    many = replace(experts, count=count, per_token=8)
    assert many.record_dtype == dtype
    assert many.record_bytes == 4 * 8 * dtype.itemsize
    assert [many.number_of(layer) for layer in range(4)] == [0, 1, 2, 3]
