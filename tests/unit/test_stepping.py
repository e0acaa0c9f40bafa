"""Driving the native engine by hand.

Requests come late, samples come as they end, and the driver may stop half-way.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.engine_loop import generate, requests_for
from mrlhf.errors import EngineError
from mrlhf.inference.base import EngineStats, InferenceEngine, Request, Sample, SamplingParams
from mrlhf.inference.native.rows import RowNumbers, enlarged
from tests.models.engines import PROMPTS, SAMPLED, UIDS, answer, assert_same, hf_model, make_engine

REQUESTS = requests_for(PROMPTS, UIDS, SAMPLED)
BLOCK_BYTES = 2 * 3 * 4 * 2 * 12 * 4  # keys and values, layers, tokens, KV heads, head_dim, float32
CROWDED = {"max_num_seqs": 6, "block_size": 4, "cache_bytes": 18 * BLOCK_BYTES}


def drive(
    engine: InferenceEngine, late: Callable[[int], list[Request]]
) -> tuple[list[Sample], EngineStats]:
    """Step until nothing is in flight; after step k, `late(k)` is submitted."""
    samples: list[Sample] = []
    stats = EngineStats()
    step = 0
    while engine.in_flight:
        engine.step()
        step += 1
        before = engine.in_flight
        finished = engine.collect()
        assert engine.in_flight == before - len(finished.samples)
        samples += finished.samples
        stats += finished.stats
        engine.submit(late(step))
    return samples, stats


def in_order(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda sample: (sample.request_id, sample.sample_index))


def test_a_sample_gives_lists_and_keeps_arrays():
    sample = Sample(3, 0, [1, 70_000], [-0.5, -2.0], stopped=True, version=4)
    prompt = [9]
    assert sample.token_ids == [1, 70_000]
    assert prompt + sample.token_ids == [9, 1, 70_000]
    assert json.dumps([sample.token_ids, sample.logprobs]) == "[[1, 70000], [-0.5, -2.0]]"
    assert [numbers.itemsize for numbers in sample.arrays] == [4, 4]

    assert pickle.loads(pickle.dumps(sample)) == sample
    assert dataclasses.replace(sample, token_ids=[1]).token_ids == [1]
    assert dataclasses.asdict(sample)["logprobs"] == [-0.5, -2.0]
    assert "token_ids=[1, 70000]" in repr(sample)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.token_ids = [1]


@pytest.mark.parametrize("limits", [{}, {"max_prefill_tokens": 5}, CROWDED])
def test_requests_that_come_late_get_the_tokens_of_all_at_once(limits):
    model = hf_model("llama")
    whole = generate(make_engine(model), REQUESTS)

    engine = make_engine(model, **limits)
    engine.submit(REQUESTS[:3])
    samples, stats = drive(
        engine, lambda step: REQUESTS[3:7] if step == 4 else REQUESTS[7:] if step == 9 else []
    )

    assert_same(in_order(samples), whole.samples)
    # They come as they end, not in the order of the requests.
    assert [sample.request_id for sample in samples] != [s.request_id for s in whole.samples]
    assert stats.generated_tokens == whole.stats.generated_tokens
    assert stats.prompt_tokens == whole.stats.prompt_tokens
    assert stats.peak_cache_bytes <= stats.cache_bytes
    assert (stats.preemptions > 0) == (limits is CROWDED)

    # The engine is as before.
    assert_same(answer(engine, PROMPTS, UIDS, SAMPLED), whole.samples)


def test_an_engine_that_is_never_empty_uses_its_rows_again():
    model = hf_model("llama")
    requests = [dataclasses.replace(REQUESTS[i % 9], id=i, uid=1000 + i) for i in range(60)]
    whole = generate(make_engine(model), requests)
    engine = make_engine(model)
    engine.submit(requests[:2])
    waiting = requests[2:]

    def next_one(step: int) -> list[Request]:
        assert engine._batch is None or len(engine._batch._scheduler.lengths) <= 24
        return [waiting.pop(0)] if waiting and engine.in_flight < 6 else []

    samples, _ = drive(engine, next_one)
    assert not waiting
    assert_same(in_order(samples), whole.samples)


def test_the_next_turn_of_a_conversation_has_its_own_seed_and_limit():
    engine = make_engine(hf_model("llama"))
    engine.submit(REQUESTS[:4])
    second = SamplingParams(
        temperature=0.8, max_tokens=5, seed=6, stop_token_ids=SAMPLED.stop_token_ids
    )
    turns: list[Request] = []

    def next_turn(step: int) -> list[Request]:
        if step != 3:
            return []
        longer = [*PROMPTS[1], 3, 5, 8]
        turns.append(Request(id=50, prompt=longer, uid=7, samples=range(1), sampling=second))
        return turns

    samples, _ = drive(engine, next_turn)
    (turn,) = (sample for sample in samples if sample.request_id == 50)
    (alone,) = answer(engine, [turns[0].prompt], [7], second)
    assert turn.token_ids == alone.token_ids and len(turn.token_ids) <= 5


def test_cancelling_keeps_what_has_ended_and_leaves_no_block_behind():
    engine = make_engine(hf_model("llama"), max_num_seqs=5)
    whole = generate(engine, REQUESTS)
    ends = {(s.request_id, s.sample_index): s for s in whole.samples}

    engine.submit(REQUESTS)
    for _ in range(8):
        engine.step()

    assert engine.in_flight == len(whole.samples)
    finished = engine.cancel()
    assert 0 < len(finished.samples) < len(whole.samples)
    for sample in finished.samples:
        assert sample.token_ids == ends[sample.request_id, sample.sample_index].token_ids

    assert finished.stats.steps == 8
    assert finished.stats.generated_tokens == sum(len(s.token_ids) for s in finished.samples)
    assert engine.in_flight == 0 and engine._runner.manager.held == 0
    assert engine.cancel().samples == []
    assert_same(generate(engine, REQUESTS).samples, whole.samples)


def test_weights_and_cache_stay_while_samples_are_in_flight():
    engine = make_engine(hf_model("llama"))
    engine.submit(REQUESTS[:2])
    for call in (lambda: engine.commit(2), engine.sleep, lambda: generate(engine, REQUESTS[2:])):
        with pytest.raises(EngineError, match=r"6 samples .*collect\(\) or cancel\(\) them first"):
            call()
    assert engine.version == 1
    samples, _ = drive(engine, lambda step: [])
    assert_same(in_order(samples), generate(engine, REQUESTS[:2]).samples)
    engine.commit(2)
    engine.sleep()


def test_requests_that_do_not_go_together_are_refused_and_the_others_go_on():
    engine = make_engine(hf_model("llama"))
    whole = generate(engine, REQUESTS[:2])
    engine.submit(REQUESTS[:2])
    engine.step()
    hotter = dataclasses.replace(SAMPLED, temperature=1.0)
    with pytest.raises(EngineError, match=r"request 5 has temperature 1.0, .* in flight have 0.8"):
        engine.submit([REQUESTS[4], dataclasses.replace(REQUESTS[5], sampling=hotter)])
    with pytest.raises(EngineError, match="the id 1; give each its own"):
        engine.submit([REQUESTS[2], REQUESTS[1]])
    with pytest.raises(EngineError, match="the id 3; give each its own"):
        engine.submit([REQUESTS[3], REQUESTS[3]])
    with pytest.raises(EngineError, match="request 9 is empty"):
        engine.submit([REQUESTS[2], dataclasses.replace(REQUESTS[2], id=9, prompt=[])])

    assert engine.in_flight == 6
    samples, _ = drive(engine, lambda step: [])
    assert_same(in_order(samples), whole.samples)

    # With nothing in flight, another temperature may be used.
    assert len(answer(engine, PROMPTS, UIDS, hotter)) == 27


def test_a_refused_first_request_leaves_nothing_in_flight():
    engine = make_engine(hf_model("llama"))
    with_stop = dataclasses.replace(SAMPLED, stop=("x",))
    with pytest.raises(EngineError, match="stop strings need a decoder"):
        engine.submit(requests_for(PROMPTS, UIDS, with_stop))
    assert engine.in_flight == 0
    assert len(answer(engine, PROMPTS, UIDS, SAMPLED)) == 27


def test_an_error_in_a_step_drops_what_is_in_flight_and_the_engine_works_on(monkeypatch):
    engine = make_engine(hf_model("llama"))
    whole = generate(engine, REQUESTS)
    engine.submit(REQUESTS)
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._sampler, "draw", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.in_flight == 0
    engine.step()
    assert engine.collect().samples == []
    assert_same(generate(engine, REQUESTS).samples, whole.samples)


def test_an_interrupted_generate_leaves_nothing_in_flight(monkeypatch):
    engine = make_engine(hf_model("llama"))
    whole = generate(engine, REQUESTS)
    collect = engine.collect
    calls = []

    def interrupted():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return collect()

    monkeypatch.setattr(engine, "collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, REQUESTS)
    assert engine.in_flight == 0 and engine._runner.manager.held == 0
    assert_same(generate(engine, REQUESTS).samples, whole.samples)


def test_statistics_are_added_and_sizes_compared():
    total = EngineStats(1, 2, 3, 4, 5, 60, 7) + EngineStats(10, 20, 30, 40, 50, 6, 70)
    assert total == EngineStats(11, 22, 33, 44, 55, 60, 70)


def test_row_numbers_are_used_again_and_arrays_grow_with_zeros():
    numbers = RowNumbers()
    assert numbers.take(3) == [0, 1, 2]
    numbers.give_back(1)
    numbers.give_back(0)
    assert numbers.take(3) == [1, 0, 3]
    array = enlarged(np.ones((2, 3), dtype=np.int32), 3, 2)
    assert array.tolist() == [[1, 1, 1]] * 2 + [[0, 0, 0]] * 2
    assert enlarged(array, 4, 3) is array
