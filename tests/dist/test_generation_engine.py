"""A rollout of a real engine in two replicas: each row is what one engine alone answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrlhf.batch import Prompts
from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.reshard.execute import ReshardStats
from mrlhf.rollout.drawing import mix_seed
from mrlhf.rollout.generator import Generator
from tests.fake_engine import FakeResharder
from tests.models.engines import answer, fill, hf_model, make_prompts, spec_of
from tests.ranks import run_ranks

N = 3
SEED = 11
UIDS = [40, 7, 7000, 3, 12]
SAMPLING = {
    "n": N,
    "temperature": 1.0,
    "max_tokens": 12,
    "stop_token_ids": (0, 1, 2, 3),
    "stop": ("77", "9,1"),
}
LIMITS = EngineLimits(max_num_seqs=8, max_length=64, max_prefill_tokens=16, cache_bytes=2**22)


def _text(token_ids: Any) -> str:
    return "".join(f"{token}," for token in token_ids)


def _engine(model: Any) -> NativeEngine:
    engine = NativeEngine(
        spec_of(model), None, torch.device("cpu"), torch.float32, LIMITS, decode=_text
    )
    fill(engine.weight_slots(), model)
    engine.wake()
    engine.commit(5)
    return engine


def _in_ranks(rank: int, world_size: int) -> tuple[Any, ...]:
    model = hf_model("llama")
    tokens = make_prompts(5)
    texts = [""] * len(tokens)
    prompts = Prompts(tokens, UIDS, texts, texts, texts, [{} for _ in texts])

    groups = GroupFactory(timeout_s=600.0).engine_groups(
        EngineLayout.inside(ParallelLayout(tp=2, pp=1, dp=1), 1)
    )
    resharder: Any = FakeResharder(None, ReshardStats(0, 0, 0, 0.0))  # type: ignore[arg-type]
    generator = Generator(_engine(model), groups, resharder, SEED)
    generated = generator.generate(prompts, SamplingParams(**SAMPLING, seed=0), "train", step=2)
    rollout = generated.rollout

    alone = answer(
        _engine(model), tokens, UIDS, SamplingParams(**SAMPLING, seed=mix_seed(SEED, "train 2"))
    )

    rows = zip(rollout.response_ids.tolist(), rollout.response_lengths, strict=True)
    found = [row[:length] for row, length in rows], rollout.stopped.tolist()
    return *found, [list(sample.token_ids) for sample in alone], generated.engine_metrics[0]


@pytest.fixture(scope="module")
def ranks() -> list[tuple[Any, ...]]:
    return run_ranks(2, _in_ranks)


def test_replicas_answer_as_one_engine(ranks: list[tuple[Any, ...]]) -> None:
    for rows, _, alone, metrics in ranks:
        assert rows == alone
        assert len({tuple(row) for row in rows}) > 10
        assert metrics == ranks[0][3]
        assert metrics["rollout/kv_cache_bytes"] > 0
        assert metrics["rollout/prefix_hit_rate"] > 0.5  # three samples share a prompt


def test_a_stop_string_stops_a_response(ranks: list[tuple[Any, ...]]) -> None:
    rows, stopped, _, _ = ranks[0]
    by_string = 0
    for row, flag in zip(rows, stopped, strict=True):
        contains = [string in _text(row) for string in SAMPLING["stop"]]
        assert flag == (row[-1] < 4 or any(contains))
        assert not any(string in _text(row[:-1]) for string in SAMPLING["stop"])
        by_string += any(contains)
    assert by_string > 0 and {*stopped} == {True, False}
