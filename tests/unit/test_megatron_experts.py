"""Mixtures of experts as Megatron-LM's command line has them: published models, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mrlhf.checkpoint.conversion.megatron_arguments import (
    arguments_of,
    command_line,
    config_of,
    differences,
)
from mrlhf.errors import CheckpointError
from mrlhf.models.families import spec_of
from mrlhf.models.spec import ModelSpec

_COMMON: dict[str, Any] = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "group_query_attention": True,
    "kv_channels": 128,
    "qk_layernorm": True,
    "rotary_base": 1000000,
    "untie_embeddings_and_output_weights": True,
}
# As people who train these two models with Megatron-LM start it.
GLM_4_5 = {
    **_COMMON,
    "num_layers": 92,
    "hidden_size": 5120,
    "ffn_hidden_size": 12288,
    "num_attention_heads": 96,
    "num_query_groups": 8,
    "max_position_embeddings": 131072,
    "norm_epsilon": 1e-5,
    "add_qkv_bias": True,
    "rotary_percent": 0.5,
    "num_experts": 160,
    "moe_layer_freq": [0] * 3 + [1] * 89,
    "moe_ffn_hidden_size": 1536,
    "moe_router_topk": 8,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,  # which means nothing with this function
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 1536,
}
QWEN3_30B = {
    **_COMMON,
    "num_layers": 48,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "max_position_embeddings": 40960,
    "norm_epsilon": 1e-6,
    "num_experts": 128,
    "moe_layer_freq": [1] * 48,
    "moe_ffn_hidden_size": 768,
    "moe_router_topk": 8,
}


GLM_4_5_CONFIG = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 92,
    "first_k_dense_replace": 3,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "head_dim": 128,
    "num_key_value_heads": 8,
}
QWEN3_30B_CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "head_dim": 128,
}


def _spec(arguments: dict[str, Any]) -> ModelSpec:
    return spec_of(config_of(arguments, 151552, None), "lm")


@pytest.mark.parametrize(
    ("arguments", "published"), [(GLM_4_5, GLM_4_5_CONFIG), (QWEN3_30B, QWEN3_30B_CONFIG)]
)
def test_the_arguments_describe_the_published_configuration(
    arguments: dict[str, Any], published: dict[str, Any]
) -> None:
    config = config_of(arguments, 151552, None)
    assert {key: config[key] for key in published} == published
    assert differences(_spec(arguments), arguments) == []


def test_a_part_of_each_head_rotates_and_there_is_no_draft_model() -> None:
    config = config_of(GLM_4_5, 151552, None)
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert config["num_nextn_predict_layers"] == 0  # the published checkpoint has one


def test_the_options_say_what_the_arguments_say() -> None:
    spec = _spec(GLM_4_5)
    options = command_line(arguments_of(spec, vocab_divisible_by=128)).splitlines()
    zeros_and_ones = ",".join(["0"] * 3 + ["1"] * 89)
    for option in (
        "--rotary-percent 0.5",
        "--num-experts 160",
        f"--moe-layer-freq [{zeros_and_ones}]",
        "--moe-ffn-hidden-size 1536",
        "--moe-router-topk 8",
        "--moe-router-score-function sigmoid",
        "--moe-router-topk-scaling-factor 2.5",
        "--moe-router-enable-expert-bias",
        "--moe-shared-expert-intermediate-size 1536",
    ):
        assert option in options
    assert not [option for option in options if "pre-softmax" in option or "gate" in option]

    # A list would make Megatron-LM look for layers one by one.
    options = command_line(arguments_of(_spec(QWEN3_30B), vocab_divisible_by=128)).splitlines()
    assert "--num-experts 128" in options
    assert not [option for option in options if "layer-freq" in option]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layer_freq": 2}, None),  # every second layer, from the first one on
        ({"moe_router_topk_scaling_factor": 1.0}, None),  # as none
        ({"moe_router_topk_scaling_factor": 2.0}, "moe_router_topk_scaling_factor is 2.0 in the"),
        (
            {"moe_router_score_function": "sigmoid", "moe_shared_expert_intermediate_size": 768},
            None,  # it does not say whether there is a bias
        ),
        (
            {
                "moe_router_score_function": "sigmoid",
                "moe_shared_expert_intermediate_size": 768,
                "moe_router_enable_expert_bias": False,
            },
            "moe_router_enable_expert_bias is False",
        ),
        (
            {"moe_shared_expert_intermediate_size": 9, "moe_shared_expert_gate": False},
            "moe_shared_expert_gate is False in the checkpoint and True there",
        ),
        # Older versions of Megatron-LM have no such argument, and a gate where the model has one.
        ({"moe_shared_expert_intermediate_size": 9, "qk_layernorm": False}, None),
        ({"moe_layer_freq": [1] * 47}, "moe_layer_freq is [1, 1,"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5 in the checkpoint and 1.0 there"),
        ({"qk_layernorm": False, "moe_layer_freq": 2}, "moe_layer_freq is [1, 0, 1, 0,"),
        ({"window_size": (4095, 0)}, "window_size is (4095, 0) in the checkpoint and None there"),
        ({"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "moe_router_load_balanci"),
        ({"moe_router_load_balancing_type": "seq_aux_loss"}, None),
        ({"moe_router_num_groups": 4}, None),  # which mean nothing without the other number
    ],
)
def test_what_no_family_has_is_told(changes: dict[str, Any], message: str | None) -> None:
    arguments = {**QWEN3_30B, **changes}
    found = differences(_spec(arguments), arguments)
    if message is None:
        assert found == []
    else:
        assert any(text.startswith(message) for text in found), found


@pytest.mark.parametrize(
    ("changes", "family", "message"),
    [
        ({"num_experts": None}, "mixtral", "the checkpoint has no experts, and so is no mixtral"),
        ({}, "qwen2_moe", "moe_shared_expert_intermediate_size is None; a qwen2_moe model has a"),
        ({"moe_expert_capacity_factor": 1.5}, None, "moe_expert_capacity_factor is 1.5; only None"),
        ({"moe_router_topk_limited_devices": 2}, None, "moe_router_topk_limited_devices is 2; onl"),
    ],
)
def test_what_a_family_always_has_is_needed(
    changes: dict[str, Any], family: str | None, message: str
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        config_of({**QWEN3_30B, **changes}, 151936, family)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_model_that_is_given_is_compared_with_what_is_stated() -> None:
    spec = _spec(GLM_4_5)
    assert differences(spec, {"num_layers": 92, "moe_router_topk": 8}) == []
    (found,) = differences(spec, {**GLM_4_5, "moe_router_topk_scaling_factor": 1.0})
    assert found == "moe_router_topk_scaling_factor is None in the checkpoint and 2.5 there"
    assert differences(spec, {"num_experts": None})[0] == (
        "num_experts is None in the checkpoint and 160 there"
    )


@pytest.mark.parametrize("frequency", [0, -1, "[1]*48", None, 1.5])
def test_a_frequency_that_is_none_is_refused(frequency: Any) -> None:
    with pytest.raises(CheckpointError, match=r"moe_layer_freq is .*; it must be a positive int"):
        config_of({**QWEN3_30B, "moe_layer_freq": frequency}, 151936, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring": "sigmoid", "normalised": False}, "weights of experts that are not divided"),
        ({"per_token": 1}, "one expert a token, whose weight is always the same"),
        ({"groups": 8, "groups_per_token": 8}, "groups that are chosen by their two best experts"),
    ],
)
def test_what_its_router_does_not_do_is_refused(changes: dict[str, Any], message: str) -> None:
    spec = _spec(QWEN3_30B)
    assert spec.experts is not None
    other = replace(spec, experts=replace(spec.experts, **changes))
    with pytest.raises(CheckpointError) as refusal:
        arguments_of(other, vocab_divisible_by=1)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_groups_that_both_choose_alike() -> None:
    """Megatron-LM scores a group by its best moe_router_topk / moe_router_group_topk experts."""
    spec = _spec(GLM_4_5)
    assert spec.experts is not None
    grouped = replace(spec, experts=replace(spec.experts, groups=8, groups_per_token=4))
    arguments = arguments_of(grouped, vocab_divisible_by=1)
    assert (arguments["moe_router_num_groups"], arguments["moe_router_group_topk"]) == (8, 4)
    assert differences(spec, arguments) != []
    assert spec_of(config_of(arguments, 151552, None), "lm").experts == grouped.experts
