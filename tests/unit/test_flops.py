"""Counted operations against torch's own counter, and causal pairs against a loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from mrlhf.models.families import spec_of as spec_of_config
from mrlhf.models.flops import forward_flops, sequence_flops, training_flops, visible_pairs
from mrlhf.models.freezing import with_frozen
from mrlhf.models.spec import Lora
from tests.models.engines import MODELS, hf_model, spec_of
from tests.models.features import FEATURE_MODELS
from tests.models.mixtures import MIXTURES, mixture_configs

LENGTH = 23
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def pairs_by_loop(length: int, window: int | None) -> int:
    return sum(
        1 for t in range(length) for other in range(t + 1) if window is None or t - other < window
    )


@pytest.mark.parametrize("length", [0, 1, 5, 6, 7, 23])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_visible_pairs(length: int, window: int | None) -> None:
    assert visible_pairs(length, window) == pairs_by_loop(length, window)


@pytest.mark.parametrize("name", (*MODELS, *FEATURE_MODELS))
def test_equals_what_torch_counts(name: str) -> None:
    model = hf_model(name)
    spec = spec_of(model)
    tokens = torch.arange(LENGTH)[None]
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()

    # eager attention multiplies all pairs, masked or not
    unseen = 0
    for layer, window in enumerate(spec.windows):
        pairs = LENGTH * LENGTH - pairs_by_loop(LENGTH, window)
        unseen += 4 * spec.num_heads * spec.of_layer(layer).head_dim * pairs
    assert forward_flops(spec, LENGTH, LENGTH) == forward.get_total_flops() - unseen
    both = forward.get_total_flops() + backward.get_total_flops()
    assert training_flops(spec, [(LENGTH, LENGTH)]) == both - 3 * unseen

    # Of frozen weights no gradient is computed, but that of what goes into them.
    inputs = model.get_input_embeddings()(tokens).detach().requires_grad_()
    logits = model.requires_grad_(False)(inputs_embeds=inputs).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    both = forward.get_total_flops() + backward.get_total_flops()
    adapted = replace(spec, lora=Lora(8, 32.0))
    assert training_flops(adapted, [(LENGTH, LENGTH)]) == both - 3 * unseen

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".self_attn." not in name)
    logits = model(inputs_embeds=inputs).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    both = forward.get_total_flops() + backward.get_total_flops()
    partly = with_frozen(spec, ["*.self_attn.*"])
    assert training_flops(partly, [(LENGTH, LENGTH)]) == both - 3 * unseen


def test_a_value_model_has_one_output() -> None:
    spec = spec_of(hf_model("llama"))
    of_head = 2 * 48 * (131 - 1) * 4
    scalar = replace(spec, head="scalar")
    assert forward_flops(scalar, 5, 4) == forward_flops(spec, 5, 4) - of_head


def test_literal_numbers() -> None:
    # hidden 48, 3 layers, 4 heads of 12 on 2 KV heads, MLP 80, vocabulary 131:
    # a layer has 48 * (48 + 24 + 24) + 48 * 48 + 3 * 48 * 80 = 18432 weights, the output layer 6288
    spec = spec_of(hf_model("llama"))
    assert forward_flops(spec, 2, 2) == 2 * (3 * 18432 + 6288) * 2 + 4 * 3 * 48 * 3
    assert forward_flops(spec, 2, 1) == 2 * (3 * 18432 * 2 + 6288) + 4 * 3 * 48 * 3
    assert forward_flops(spec, 2, 0) == 2 * 3 * 18432 * 2 + 4 * 3 * 48 * 3
    assert training_flops(spec, [(2, 1), (0, 0), (2, 1)]) == 6 * forward_flops(spec, 2, 1)
    assert training_flops(spec, []) == 0.0
    wanted = [forward_flops(spec, 9, 4), forward_flops(spec, 3, 3), forward_flops(spec, 9, 1)]
    assert sequence_flops(spec, [9, 3, 9], [4, 3, 1]) == wanted


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_counts_the_experts_that_a_token_goes_to(name: str) -> None:
    config = mixture_configs(SIZES)[name]
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    spec = spec_of_config(config.to_dict(), "lm")
    with FlopCounterMode(display=False) as forward:
        model(torch.arange(LENGTH)[None])
    unseen = 0
    for layer, window in enumerate(spec.windows):
        key_dim = spec.of_layer(layer).head_dim
        value_dim = key_dim if spec.latent is None else spec.latent.value_dim
        pairs = LENGTH * LENGTH - pairs_by_loop(LENGTH, window)
        unseen += 2 * spec.num_heads * (key_dim + value_dim) * pairs
    assert forward_flops(spec, LENGTH, LENGTH) == forward.get_total_flops() - unseen
