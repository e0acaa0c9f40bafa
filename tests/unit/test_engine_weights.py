"""Weights of the native engine: new ones, training's own, and those that sleep frees."""

from dataclasses import replace

import pytest
import torch

from mrlhf.errors import EngineError
from mrlhf.inference.base import InferenceEngine
from mrlhf.inference.native.parameters import Parameters
from mrlhf.models.lora import is_adapter
from mrlhf.models.spec import Lora
from mrlhf.parallel.engine_layout import ReplicaPlace
from tests.models.engines import (
    GREEDY,
    PROMPTS,
    SAMPLED,
    UIDS,
    answer,
    assert_same,
    empty_engine,
    fill,
    hf_model,
    make_engine,
    spec_of,
)


def test_commit_serves_the_new_weights_and_no_cache_of_the_old():
    first = hf_model("llama", seed=0)
    second = hf_model("llama", seed=1)
    engine = make_engine(first, block_size=4)
    old = answer(engine, PROMPTS, UIDS, GREEDY)
    fill(engine.weight_slots(), second)
    engine.commit(2)
    new = answer(engine, PROMPTS, UIDS, GREEDY)
    assert engine.version == 2
    assert {sample.version for sample in new} == {2}
    fresh = make_engine(second, block_size=4)
    assert_same(new, answer(fresh, PROMPTS, UIDS, GREEDY), tolerance=0)
    assert [sample.token_ids for sample in new] != [sample.token_ids for sample in old]


def test_bound_experts_are_read_where_they_are():
    """Each expert is a tensor of its own, as in training."""
    source = make_engine(hf_model("qwen2-moe"))
    training = {slot.piece.parameter: slot.parameter.clone() for slot in source.weight_slots()}
    engine = empty_engine(hf_model("qwen2-moe"))
    for name, parameter in training.items():
        engine.bind(name, parameter)
    engine.commit(1)
    before = answer(engine, PROMPTS, UIDS, GREEDY)
    assert_same(before, answer(source, PROMPTS, UIDS, GREEDY), tolerance=0)

    for expert in range(4):
        training[f"decoder.layers.1.mlp.experts.{expert}.linear_fc2.weight"].zero_()
    engine.commit(2)
    after = answer(engine, PROMPTS, UIDS, GREEDY)
    assert after[0].logprobs[0] != before[0].logprobs[0]


def test_bound_parameters_are_the_training_parameters_themselves():
    model = hf_model("qwen3")
    source = make_engine(model)
    training = {
        slot.piece.parameter: torch.nn.Parameter(slot.parameter) for slot in source.weight_slots()
    }
    engine = empty_engine(model)
    assert set(engine.parameter_pieces()) == set(training)
    for name, parameter in training.items():
        if name != "decoder.layers.1.mlp.linear_fc2.weight":
            engine.bind(name, parameter)

    with pytest.raises(
        EngineError, match=r"1 parameters, decoder.layers.1.mlp.linear_fc2.weight first"
    ):
        engine.commit(1)

    stored = {slot.piece.parameter: slot.parameter for slot in engine.weight_slots()}
    stored["decoder.layers.1.mlp.linear_fc2.weight"].copy_(
        training["decoder.layers.1.mlp.linear_fc2.weight"].detach()
    )
    shared = [name for name in training if stored[name].data_ptr() == training[name].data_ptr()]
    assert len(shared) == len(training) - 1
    engine.commit(1)
    assert_same(
        answer(engine, PROMPTS, UIDS, GREEDY), answer(source, PROMPTS, UIDS, GREEDY), tolerance=0
    )
    before = answer(engine, PROMPTS, UIDS, GREEDY)
    with torch.no_grad():
        training["output_layer.weight"].mul_(2.0)

    engine.commit(2)
    after = answer(engine, PROMPTS, UIDS, GREEDY)
    assert after[0].logprobs[0] != before[0].logprobs[0]
    training["output_layer.weight"].sum().backward()
    assert training["output_layer.weight"].grad is not None
    with pytest.raises(EngineError, match="cannot be bound"):
        engine.bind("output_layer.weight", torch.zeros(2, 2))
    with pytest.raises(EngineError, match="no parameter 'lm_head'"):
        engine.bind("lm_head", torch.zeros(2, 2))


def test_the_base_of_adapters_is_laid_out_once():
    """Each version brings other adapters, and the same base."""
    parameters = _parameters(lora=Lora(rank=2, alpha=4.0))
    laid_out = parameters.made_of(_PROJ, object)
    parameters.free(keeps=lambda name: not is_adapter(name))
    assert parameters.made_of(_PROJ, object) is laid_out

    parameters.bind(_PROJ, parameters[_PROJ].clone())
    assert parameters.made_of(_PROJ, object) is not laid_out


def test_without_adapters_every_version_is_laid_out_anew():
    parameters = _parameters(lora=None)
    assert parameters.made_of(_PROJ, object) is not parameters.made_of(_PROJ, object)


_PROJ = "decoder.layers.0.self_attention.linear_proj.weight"


def _parameters(lora: Lora | None) -> Parameters:
    spec = replace(spec_of(hf_model("llama")), lora=lora)
    parameters = Parameters(spec, ReplicaPlace(tp_rank=0, tp=1), torch.device("cpu"), torch.float32)
    parameters.slots()
    return parameters


def test_sleep_frees_the_cache_and_wake_changes_nothing():
    engine: InferenceEngine = make_engine(hf_model("llama"))
    before = answer(engine, PROMPTS, UIDS, SAMPLED)
    assert engine.cache_bytes > 0
    engine.sleep()
    assert engine.cache_bytes == 0
    with pytest.raises(EngineError, match="wake"):
        answer(engine, PROMPTS, UIDS, SAMPLED)
    engine.wake()
    engine.commit(1)
    assert_same(answer(engine, PROMPTS, UIDS, SAMPLED), before, tolerance=0)


def test_sleep_may_free_weights_that_are_not_bound():
    model = hf_model("qwen2-moe")
    source = make_engine(model)
    training = {slot.piece.parameter: slot.parameter for slot in source.weight_slots()}
    bound = {name: tensor for name, tensor in training.items() if "linear_qkv" in name}
    engine = empty_engine(model)
    for name, parameter in bound.items():
        engine.bind(name, parameter)
    fill(engine.weight_slots(), model)
    engine.commit(1)
    before = answer(engine, PROMPTS, UIDS, SAMPLED)

    engine.sleep(free_weights=True)
    engine.wake()
    own = len(engine.parameter_pieces()) - len(bound)
    with pytest.raises(EngineError, match=f"{own} parameters, .* are neither bound"):
        engine.commit(2)
    after = {slot.piece.parameter: slot.parameter for slot in engine.weight_slots()}
    assert all(after[name] is parameter for name, parameter in bound.items())
    assert not after["embedding.word_embeddings.weight"].any()
    fill(engine.weight_slots(), model)
    engine.commit(2)
    assert_same(answer(engine, PROMPTS, UIDS, SAMPLED), before, tolerance=0)
