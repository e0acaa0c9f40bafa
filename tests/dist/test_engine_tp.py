"""The native engine on two and four tensor-parallel ranks, against one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engine_loop import requests_for
from mrlhf.inference.base import Sample, SamplingParams
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
DELTA = "qwen3-next"
SHARED = ("qwen2-tied", "qwen3")  # two KV heads: on four ranks, each is on two
# By the number of ranks: models, and over how many parts experts are split. Of models with other
# features than the rest, phi3 has two KV heads, olmo3 a norm over the heads of all ranks, gemma4
# two KV heads in some layers and one in others, gemma4-linked layers that share two KV heads. Each
# expert is split over all ranks, or whole on one of them, or both.
GREEDY = {
    2: [
        *((name, 1) for name in (*FEATURE_MODELS, *MIXTURES)),
        *((name, 2) for name in MIXTURES),
        *((DELTA, 2), ("qwen3-5-moe", 2), ("qwen3-5", 1), ("glm-moe-dsa", 2)),
    ],
    4: [
        *(("phi3", 1), ("olmo3", 1), ("gemma4", 1), ("gemma4-linked", 1), ("gemma4-moe", 2)),
        *(("qwen2-moe", 1), ("qwen3-moe", 2), ("mixtral", 2), ("glm4-moe", 4), ("gpt-oss", 2)),
        ("deepseek-v32", 1),
    ],
}
# Norms of small states enlarge what is rounded.
TOLERANCES = dict.fromkeys((DELTA, "qwen3-5-moe", "qwen3-5"), 3e-4)
# With adapters, on ranks that share a KV head too, and with experts split, whole or both.
ADAPTED = {
    2: [
        *(("phi3", 1), ("olmo3", 1), ("gemma4", 1), ("gemma4-linked", 1)),
        *(("gemma4-moe", 2), ("mixtral", 2)),
        *((DELTA, 1), ("qwen3-5", 1)),
    ],
    4: [("qwen3", 1), ("qwen2-moe", 2)],
}
# On the second of two ranks, and on the last of four, no column may be drawn.
NEVER = (3, 20, *range(60, 131))
Results = dict[tuple[str, int], list[Sample]]


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
            results[name, number] = samples

    engine = make_engine(hf_model("qwen3", dtype), group, dtype=dtype, never=NEVER)
    for number, sampling in enumerate(DRAWS):
        samples = answer(engine, PROMPTS, UIDS, sampling)
        assert not {token for sample in samples for token in sample.token_ids} & set(NEVER)
        results["qwen3 without some tokens", number] = samples
    return results


def _greedy(
    group: dist.ProcessGroup | None, cases: Sequence[tuple[str, int]], adapted: bool
) -> dict[tuple[str, int], list[Sample]]:
    """Greedy responses, by model and over how many parts its experts are split; one rank has all of
    them. With adapters, if asked for.
    """
    found = {}
    for name, ep in cases:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "adapter"
            model = adapted_model(name, file) if adapted else hf_model(name)
        engine = make_engine(model, group, ep=1 if group is None else ep)
        found[name, ep] = answer(engine, PROMPTS, UIDS, DRAWS[0])
    return found


@cache
def _alone(name: str, adapted: bool) -> list[Sample]:
    """What one rank gives, which is what transformers gives."""
    return _greedy(None, [(name, 1)], adapted)[name, 1]


def _assert_as_alone(results: dict[tuple[str, int], list[Sample]], adapted: bool) -> None:
    for (name, _), samples in results.items():
        assert_same(samples, _alone(name, adapted), tolerance=TOLERANCES.get(name, 2e-5))


def _assert_like(samples: list[Sample], others: list[Sample]) -> None:
    """The same samples of the same requests, in the same order."""
    assert_same(samples, others, tolerance=2e-5)
    for one, other in zip(samples, others, strict=True):
        assert replace(one, logprobs=[]) == replace(other, logprobs=[])


def _step_by_step(group: dist.ProcessGroup | None) -> tuple[list[Sample], list[Sample]]:
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
    return samples, engine.cancel().samples


def _body(rank: int, world_size: int) -> tuple[Any, ...]:
    group = dist.group.WORLD
    return (
        _generate(group),
        _generate(group, torch.bfloat16),
        _step_by_step(group),
        _greedy(group, GREEDY[2], adapted=False),
        _greedy(group, ADAPTED[2], adapted=True),
    )


def _body_of_four(rank: int, world_size: int) -> tuple[Any, ...]:
    group = dist.group.WORLD
    return (
        _generate(group, models=SHARED),
        _greedy(group, GREEDY[4], adapted=False),
        _greedy(group, ADAPTED[4], adapted=True),
    )


def test_ranks_that_share_a_kv_head_give_the_tokens_and_logprobs_of_one() -> None:
    alone = _generate(None, models=SHARED)
    for results, greedy, adapted in run_ranks(4, _body_of_four):
        _assert_as_alone(greedy, adapted=False)
        _assert_as_alone(adapted, adapted=True)
        for case, samples in alone.items():
            _assert_like(results[case], samples)


def test_two_ranks_give_the_tokens_and_logprobs_of_one() -> None:
    (first, first_bf16, stepped, greedy, adapted), others = run_ranks(2, _body)
    assert (first, first_bf16, stepped) == others[:3]
    _assert_as_alone(greedy, adapted=False)
    _assert_as_alone(adapted, adapted=True)

    for samples, wanted in zip(stepped, _step_by_step(None), strict=True):
        assert samples
        _assert_like(samples, wanted)
    for case, wanted in _generate(None).items():
        _assert_like(first[case], wanted)
    assert len(first_bf16) == len(first)
    assert all(sample.token_ids for sample in first_bf16["llama", 2])
