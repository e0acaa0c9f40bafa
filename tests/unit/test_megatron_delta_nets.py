"""Delta nets in Megatron-LM: arguments of published models, and what cannot be converted.

That megatron-core computes with what is written what transformers computes is tested in
e2e/test_convert_megatron.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrlhf.checkpoint.conversion.megatron_arguments import (
    arguments_of,
    command_line,
    config_of,
    differences,
)
from mrlhf.checkpoint.conversion.megatron_delta_nets import joined_forms
from mrlhf.checkpoint.conversion.megatron_names import find_homes, split_names
from mrlhf.checkpoint.conversion.model_source import TensorForm
from mrlhf.checkpoint.conversion.torch_dist import TorchDistReader
from mrlhf.errors import CheckpointError
from mrlhf.models.families import load_spec, spec_of
from tests.models.checkpoints import assert_same_tensors, convert_quietly, save_model
from tests.shards import tiny_spec

# As people who train Qwen3-Next-80B-A3B with Megatron-LM start it.
QWEN3_NEXT: dict[str, Any] = {
    "num_layers": 48,
    "hidden_size": 2048,
    "ffn_hidden_size": 5120,
    "num_attention_heads": 16,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 256,
    "qk_layernorm": True,
    "swiglu": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "layernorm_zero_centered_gamma": True,
    "position_embedding_type": "rope",
    "rotary_base": 10000000,
    "rotary_percent": 0.25,
    "max_position_embeddings": 262144,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 512,
    "moe_layer_freq": 1,
    "moe_ffn_hidden_size": 512,
    "moe_router_topk": 10,
    "moe_shared_expert_intermediate_size": 512,
    "moe_shared_expert_gate": True,
}


def test_the_arguments_describe_the_published_model(published: Path) -> None:
    spec = load_spec(published / "Qwen3-Next-80B-A3B", "lm")
    config = config_of(QWEN3_NEXT, 151936, None)
    found = spec_of(config, "lm")
    assert replace(found, hf_config={}) == replace(spec, hf_config={})
    assert differences(spec, QWEN3_NEXT) == []

    stated = arguments_of(spec, 128)
    known = {**QWEN3_NEXT, "linear_attention_freq": [1, 1, 1, 0] * 12}
    assert {name: stated[name] for name in known} == known
    options = command_line(stated).splitlines()
    for option in (
        "--experimental-attention-variant gated_delta_net",
        *("--attention-output-gate", "--apply-layernorm-1p", "--rotary-percent 0.25"),
        *("--linear-conv-kernel-dim 4", "--linear-key-head-dim 128"),
        *("--linear-num-value-heads 32", "--moe-shared-expert-gate"),
    ):
        assert option in options, option


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [(47, [1] * 46 + [0, 1]), ([0, 1] * 24, [0, 1] * 24), (3, [1, 1, 0] * 16)],
)
def test_a_frequency_says_which_layers_have_a_net(
    frequency: int | list[int], layers: list[int]
) -> None:
    arguments = {**QWEN3_NEXT, "linear_attention_freq": frequency}
    spec = spec_of(config_of(arguments, 151936, None), "lm")
    assert spec.delta is not None and [*spec.delta.layers] == layers
    assert differences(spec, arguments) == []
    written = ",".join(map(str, layers))
    assert f"--linear-attention-freq [{written}]" in command_line(arguments_of(spec, 128))


def test_of_two_families_the_user_names_one(published: Path) -> None:
    """Both have the same layers; one of them has no keys for dense layers."""
    assert config_of(QWEN3_NEXT, 151936, "qwen3_5_moe_text")["model_type"] == "qwen3_5_moe_text"
    arguments = {**QWEN3_NEXT, "num_experts": None}
    dense = spec_of(config_of(arguments, 248320, None), "lm")
    assert dense.family == "qwen3_5_text" and differences(dense, arguments) == []
    published_one = load_spec(published / "Qwen3.5-27B", "lm")
    stated = arguments_of(published_one, 128)
    found = spec_of(config_of(stated, published_one.vocab_size, None), "lm")
    assert replace(found, hf_config={}) == replace(published_one, hf_config={})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_attention_freq": [1, 1, 1, 0] * 12}, None),
        ({"linear_attention_freq": 3}, "linear_attention_freq is [1, 1, 0, 1, 1, 0"),
        ({"linear_key_head_dim": 64}, "linear_key_head_dim is 64 in the checkpoint and 128 there"),
        ({"linear_num_key_heads": 8}, "linear_num_key_heads is 8 in the checkpoint and 16 there"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim is 3"),
        ({"attention_output_gate": False}, "attention_output_gate is False in the checkpoint and"),
        ({"layernorm_zero_centered_gamma": False}, "layernorm_zero_centered_gamma is False"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant is 'dsa' in"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ({"moe_shared_expert_gate": False}, "moe_shared_expert_gate is False"),
    ],
)
def test_a_model_that_is_given_is_compared_with_what_is_stated(
    changes: dict[str, Any], message: str | None, published: Path
) -> None:
    spec = load_spec(published / "Qwen3-Next-80B-A3B", "lm")
    found = differences(spec, {**QWEN3_NEXT, **changes})
    assert [text for text in found if message is None or not text.startswith(message)] == []
    assert bool(found) == (message is not None)


def test_a_model_without_nets_is_compared_too() -> None:
    stated = {"linear_attention_freq": 2}
    (found,) = differences(tiny_spec("llama"), stated)
    assert found == "linear_attention_freq is [1, 0, 1, 0] in the checkpoint and None there"
    assert differences(tiny_spec("llama"), {"linear_attention_freq": None}) == []
    assert differences(tiny_spec("qwen3_next"), {"linear_attention_freq": None}) != []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_output_gate": False}, "attention_output_gate is False; only True has a"),
        ({"layernorm_zero_centered_gamma": False}, "layernorm_zero_centered_gamma is False; only"),
        ({"moe_shared_expert_intermediate_size": None}, "a qwen3_next model has a shared expert"),
    ],
)
def test_what_these_families_always_have_is_needed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        config_of({**QWEN3_NEXT, **changes}, 151936, None)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


def test_what_megatron_lm_does_not_describe_is_refused() -> None:
    spec = tiny_spec("qwen3_next")
    without = replace(spec, delta=None, ropes=())
    with pytest.raises(CheckpointError, match="with gates of attention, and no delta nets cannot"):
        arguments_of(without, 1)
    rope = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "partial_rotary_factor": 0.25}
    with pytest.raises(CheckpointError, match=r"the model rotates with .*yarn"):
        arguments_of(replace(spec, hf_config={"rope_parameters": rope}), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """Less 1, a weight below 1/2 would lose bits; a file may have it in another dtype, too."""
    save_model("qwen3_5_text-tied", tmp_path / "hf", dtype)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    small = torch.tensor([0.003, -0.3001, 0.0])
    tensors["model.layers.1.linear_attn.norm.weight"] = small.to(dtype)
    tensors["model.layers.2.linear_attn.norm.weight"] = small / 3
    tensors["model.layers.2.linear_attn.A_log"] = torch.randn(6)
    save_file(tensors, file, {"format": "pt"})

    convert_quietly(tmp_path / "hf", tmp_path / "megatron", "megatron")
    convert_quietly(tmp_path / "megatron", tmp_path / "back", "huggingface")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def _weights(folder: Path) -> dict[str, TensorForm]:
    """Those that a checkpoint holds, under its own names."""
    reader = TorchDistReader(folder)
    names, _ = split_names(reader.tensors)
    return {name: reader.tensors[name] for name in names}


def test_a_checkpoint_with_other_parts_is_refused(tmp_path: Path) -> None:
    save_model("qwen3_next", tmp_path / "hf")
    convert_quietly(tmp_path / "hf", tmp_path / "megatron", "megatron")
    spec = load_spec(tmp_path / "hf", "lm")
    stored = _weights(tmp_path / "megatron" / "release")
    own = "decoder.layers.3.self_attention."
    parts = [f"{own}in_proj.weight.{part}" for part in ("beta", "alpha")]
    for changes, message in (
        ({parts[0]: None}, f"{own}in_proj_ba.weight is [6, 32] and must be [12, 32] in this model"),
        (dict.fromkeys(parts), "nothing holds model.layers.3.linear_attn.in_proj_ba.weight"),
        ({f"{own}out_norm.weight": None}, "nothing holds model.layers.3.linear_attn.norm.weight"),
    ):
        held = {key: form for key, form in stored.items() if key not in changes}
        with pytest.raises(CheckpointError) as refusal:
            find_homes(spec, joined_forms(spec, held)[0], "here")
        assert str(refusal.value).startswith(f"here: {message}")
