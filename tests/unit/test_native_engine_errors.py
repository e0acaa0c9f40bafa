"""What the native engine refuses, and what an error leaves behind."""

import pytest

from benchmarks.engine_loop import generate, requests_for
from mrlhf.errors import EngineError
from mrlhf.inference.base import SamplingParams
from mrlhf.inference.native import sampler, sequences
from tests.models.engines import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    UIDS,
    VOCABULARY,
    answer,
    assert_same,
    empty_engine,
    hf_model,
    make_engine,
    tight,
)


def test_bad_requests_are_refused_in_one_line():
    engine = make_engine(hf_model("llama"))
    with pytest.raises(
        EngineError,
        match=r"request 1: a prompt of 51 tokens \+ max_tokens 14 exceed.*64.*"
        r"data.max_prompt_length",
    ):
        answer(engine, [[1], [1] * 51], [0, 1], GREEDY)
    assert len(answer(engine, [[1] * 50], [0], GREEDY)[0].token_ids) == 14

    with pytest.raises(EngineError, match="prompt of request 0 is empty"):
        answer(engine, [[]], [0], GREEDY)
    with pytest.raises(EngineError, match=f"vocabulary is {VOCABULARY}"):
        answer(engine, [[VOCABULARY]], [0], GREEDY)

    with pytest.raises(EngineError, match="no weights yet"):
        answer(empty_engine(hf_model("llama")), [[1]], [0], GREEDY)
    assert answer(engine, [], [], GREEDY) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_are_not_finite_are_named_and_leave_nothing_behind(temperature):
    model = hf_model("llama")
    engine = make_engine(model)
    good = engine.weight_slots()[0].parameter.clone()
    engine.weight_slots()[0].parameter.fill_(float("nan"))
    engine.commit(2)
    sampling = SamplingParams(temperature=temperature, max_tokens=3, seed=0)
    for prompts in (PROMPTS, [[1] * 16] * 4):
        with pytest.raises(EngineError, match="NaN or inf; before the first update look at the m"):
            answer(engine, prompts, range(len(prompts)), sampling)

    engine.weight_slots()[0].parameter.copy_(good)
    engine.commit(3)
    whole = answer(make_engine(model), PROMPTS, UIDS, GREEDY)
    assert_same(answer(engine, PROMPTS, UIDS, GREEDY), whole, 0)


def test_a_cache_that_is_too_small_is_refused_with_both_numbers():
    model = hf_model("llama")
    with pytest.raises(
        EngineError, match=r"room for 60 tokens.*may have 64 tokens.*rollout.kv_cache_mb"
    ):
        answer(tight(model, 15), [[1]], [0], GREEDY)
    assert len(answer(tight(model, 16), [[1]], [0], GREEDY)[0].token_ids) == 14


def test_an_error_in_the_middle_leaves_an_engine_that_works():
    engine = make_engine(hf_model("llama"), decode=lambda ids: 1 / 0)
    before = answer(engine, PROMPTS, UIDS, SAMPLED)
    with pytest.raises(ZeroDivisionError):
        answer(
            engine,
            PROMPTS,
            UIDS,
            SamplingParams(temperature=0.0, max_tokens=14, seed=0, stop=("x",)),
        )
    assert_same(answer(engine, PROMPTS, UIDS, SAMPLED), before)


@pytest.mark.parametrize("older", [0, 2])
def test_a_submit_that_fails_leaves_nothing(monkeypatch, older):
    engine = make_engine(hf_model("llama"))
    requests = requests_for(PROMPTS, UIDS, SAMPLED)
    before = generate(engine, requests[:older]).samples
    engine.submit(requests[:older])

    def refuse(*_):
        raise MemoryError("no room")

    for owner, function in ((sequences, "enlarged"), (sampler, "sample_keys")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, function, refuse)
            with pytest.raises(MemoryError, match="no room"):
                engine.submit(requests[older:])
        assert engine.in_flight == 3 * older

    samples = []
    while engine.in_flight:
        engine.step()
        samples += engine.collect().samples
    samples.sort(key=lambda sample: (sample.request_id, sample.sample_index))
    assert_same(samples, before)
    # The next batch may draw in another way than the one that was refused.
    assert len(answer(engine, PROMPTS, UIDS, GREEDY)) == len(PROMPTS)


def test_generate_reports_the_first_error(monkeypatch):
    engine = make_engine(hf_model("llama"))

    def fail(message):
        def raise_it():
            raise RuntimeError(message)

        return raise_it

    monkeypatch.setattr(engine, "step", fail("the first"))
    monkeypatch.setattr(engine, "cancel", fail("a later one"))
    with pytest.raises(RuntimeError, match="the first"):
        answer(engine, PROMPTS, UIDS, GREEDY)
