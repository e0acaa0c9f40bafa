"""The native engine on two and four tensor-parallel ranks, against one rank."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrlhf.inference.base import Sample, SamplingParams, requests_for
from tests.models.engines import (
    MODELS,
    adapted_model,
    answer,
    assert_same,
    hf_model,
    make_engine,
    make_prompts,
)
from tests.models.features import FEATURE_MODELS
from tests.models.mixtures import MIXTURES
from tests.ranks import run_ranks

PROMPTS = make_prompts()
UIDS = list(range(len(PROMPTS)))
DRAWS = (
    SamplingParams(temperature=0.0, max_tokens=10, seed=0),
    SamplingParams(n=2, temperature=1.1, max_tokens=10, seed=2, stop_token_ids=(3, 50, 90)),
    SamplingParams(
        n=3,
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        max_tokens=10,
        seed=1,
        stop_token_ids=(3, 50, 90),
    ),
)
SHARED = ("qwen2-tied", "qwen3")  # two KV heads: on four ranks, each is on two
# The first has two KV heads, the second a norm over the heads of all ranks.
FEATURES_OF_FOUR = ("phi3", "olmo3")
# Each expert split over all ranks, or whole on one of them, or both: over how many parts.
MIXTURES_OF_TWO = [(name, ep) for name in MIXTURES for ep in (1, 2)]
# With adapters, on ranks that share a KV head too, and with experts split, whole or both.
ADAPTED = {2: (("phi3", 1), ("olmo3", 1), ("mixtral", 2)), 4: (("qwen3", 1), ("qwen2-moe", 2))}
MIXTURES_OF_FOUR = [("qwen2-moe", 1), ("qwen3-moe", 2), ("mixtral", 2), ("glm4-moe", 4)]
# On the second of two ranks, and on the last of four, no column may be drawn.
NEVER = (3, 20, *range(60, 131))
Results = dict[tuple[str, int], list[dict]]


def _generate(
    group: dist.ProcessGroup | None,
    dtype: torch.dtype = torch.float32,
    models: tuple[str, ...] = MODELS,
) -> Results:
    results = {}
    for name in models:
        engine = make_engine(hf_model(name, dtype), group, max_num_seqs=10, dtype=dtype)
        for number, sampling in enumerate(DRAWS):
            samples = answer(engine, PROMPTS, UIDS, sampling)
            results[name, number] = _as_dicts(samples)

    engine = make_engine(hf_model("qwen3", dtype), group, dtype=dtype, never=NEVER)
    for number, sampling in enumerate(DRAWS):
        samples = answer(engine, PROMPTS, UIDS, sampling)
        assert not {token for sample in samples for token in sample.token_ids} & set(NEVER)
        results["qwen3 without some tokens", number] = _as_dicts(samples)
    return results


def _greedy(
    group: dist.ProcessGroup | None, models: tuple[str, ...] = FEATURE_MODELS
) -> dict[str, list[Sample]]:
    """Responses of the models with other features than the rest, which decode in the same way."""
    return {
        name: answer(make_engine(hf_model(name), group), PROMPTS, UIDS, DRAWS[0]) for name in models
    }


def _mixtures(
    group: dist.ProcessGroup | None, cases: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], list[Sample]]:
    """Responses of models with mixtures of experts, by model and number of parts."""
    return {
        (name, ep): answer(make_engine(hf_model(name), group, ep=ep), PROMPTS, UIDS, DRAWS[0])
        for name, ep in cases
    }


def _adapted(
    group: dist.ProcessGroup | None, cases: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], list[Sample]]:
    """Responses of models with adapters, by model and number of parts."""
    found = {}
    for name, ep in cases:
        with tempfile.TemporaryDirectory() as directory:
            model = adapted_model(name, Path(directory) / "adapter")
        engine = make_engine(model, group, ep=1 if group is None else ep)
        found[name, ep] = answer(engine, PROMPTS, UIDS, DRAWS[0])
    return found


def _assert_adapted(results: dict[tuple[str, int], list[Sample]]) -> None:
    """As one rank gives them, which is as transformers does."""
    for case, samples in _adapted(None, list(results)).items():
        assert_same(results[case], samples, tolerance=2e-5)


def _assert_mixtures(results: dict[tuple[str, int], list[Sample]]) -> None:
    """As one rank gives them, which is as transformers does."""
    alone = _mixtures(None, [(name, 1) for name in MIXTURES])
    for (name, _), samples in results.items():
        assert_same(samples, alone[name, 1], tolerance=2e-5)


def _step_by_step(group: dist.ProcessGroup | None) -> tuple[list[dict], list[dict]]:
    """The samples of requests that partly come late, and those left after a cancel.

    Both are in the order in which they ended.
    """
    engine = make_engine(hf_model("qwen3"), group, max_num_seqs=10)
    requests = requests_for(PROMPTS, UIDS, DRAWS[1])
    engine.submit(requests[:4])
    late = requests[4:]
    samples = []
    while engine.in_flight:
        engine.step()
        samples += engine.collect().samples
        if late:
            engine.submit([late.pop(0)])
    engine.submit(requests)
    for _ in range(6):
        engine.step()
    return _as_dicts(samples), _as_dicts(engine.cancel().samples)


def _as_dicts(samples: list[Sample]) -> list[dict]:
    return [dataclasses.asdict(sample) for sample in samples]


def _body(rank: int, world_size: int) -> tuple[Any, ...]:
    group = dist.group.WORLD
    return (
        _generate(group),
        _generate(group, torch.bfloat16),
        _step_by_step(group),
        _greedy(group),
        _mixtures(group, MIXTURES_OF_TWO),
        _adapted(group, ADAPTED[2]),
    )


def _body_of_four(rank: int, world_size: int) -> tuple[Any, ...]:
    group = dist.group.WORLD
    return (
        _generate(group, models=SHARED),
        _greedy(group, FEATURES_OF_FOUR),
        _mixtures(group, MIXTURES_OF_FOUR),
        _adapted(group, ADAPTED[4]),
    )


def test_ranks_that_share_a_kv_head_give_the_tokens_and_logprobs_of_one():
    alone = _generate(None, models=SHARED)
    greedy = _greedy(None, FEATURES_OF_FOUR)
    for results, features, mixtures, adapted in run_ranks(4, _body_of_four):
        _assert_mixtures(mixtures)
        _assert_adapted(adapted)
        for name, samples in greedy.items():
            assert_same(features[name], samples, tolerance=2e-5)
        for case, samples in alone.items():
            for one, four in zip(samples, results[case], strict=True):
                assert four["logprobs"] == pytest.approx(one["logprobs"], abs=2e-5), case
                assert four["token_ids"] == one["token_ids"], case


def test_two_ranks_give_the_tokens_and_logprobs_of_one():
    ranks = run_ranks(2, _body)
    first, first_bf16, stepped, features, mixtures, adapted = ranks[0]
    second, second_bf16, stepped_too = ranks[1][:3]
    _assert_mixtures(mixtures)
    _assert_adapted(adapted)

    for name, samples in _greedy(None).items():
        assert_same(features[name], samples, tolerance=2e-5)

    assert first == second and first_bf16 == second_bf16
    assert stepped == stepped_too
    for samples, others in zip(stepped, _step_by_step(None), strict=True):
        assert 0 < len(samples) == len(others)
        for one, two in zip(others, samples, strict=True):
            assert two["logprobs"] == pytest.approx(one.pop("logprobs"), abs=2e-5)
            assert {key: two[key] for key in one} == one

    alone = _generate(None)
    for case, samples in alone.items():
        for one, two in zip(samples, first[case], strict=True):
            assert two["logprobs"] == pytest.approx(one.pop("logprobs"), abs=2e-5), case
            assert {key: two[key] for key in one} == one, case

    assert len(first_bf16) == len(first) and all(
        len(s["token_ids"]) >= 1 for s in first_bf16["llama", 2]
    )
