"""Checkpoints go to megatron-core's own GPTModel and come from it, and the logits are the same.

The other side is `tests/models/megatron_lm.py`, which does as pretrain_gpt.py does and knows
nothing of our weight map. Its processes start twice: one rank, and two that share a model.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mrlhf.commands import convert_checkpoint
from tests.models.checkpoints import CONFIGS, assert_same_tensors, save_model
from tests.models.megatron_lm import TOKENS, run_jobs

VOCABULARY = 37
_LATENT = {"kv_lora_rank": 12, "qk_head_dim": 5, "qk_pos_emb_head_dim": 4, "v_head_dim": 7}
_MIXTURES: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 12,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 12,
}
_INDEXER: dict[str, Any] = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 3,
    "dsa_indexer_head_dim": 9,
    "dsa_indexer_topk": 3,
    "dsa_indexer_topk_freq": 1,
    "dsa_indexer_skip_topk_offset": 0,
    "dsa_indexer_rotate_activation": False,
    "dsa_indexer_k_norm_epsilon": 1e-6,
    "apply_rope_fusion": False,
}
_DELTA: dict[str, Any] = {
    "experimental_attention_variant": "gated_delta_net",
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 3,
}
_OF_DELTA: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 3,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "moe_shared_expert_gate": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-llama3": {
        "tied": True,
        "head_dim": 16,
        "max_positions": 16384,
        "rope_scaling_factor": 4.0,
    },
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen2-tied": {"tied": True, "qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 6},
    "qwen3-tied": {"tied": True, "qk_norm": True, "head_dim": 6},
    "mixtral": {
        "rotary_base": 1000000,
        "mixtures": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 24,
            "moe_layer_freq": 1,
        },
    },
    "qwen2_moe": {
        "qkv_bias": True,
        "mixtures": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 12,
            "moe_router_pre_softmax": True,
            "moe_shared_expert_intermediate_size": 20,
            "moe_shared_expert_gate": True,
            "moe_layer_freq": 1,
        },
    },
    "qwen3_moe-tied": {
        "tied": True,
        "qk_norm": True,
        "head_dim": 6,
        "mixtures": {
            "num_experts": 8,
            "moe_router_topk": 3,
            "moe_ffn_hidden_size": 12,
            "moe_layer_freq": [1, 0, 1, 1],
        },
    },
    "glm4_moe": {
        "qkv_bias": True,
        "qk_norm": True,
        "head_dim": 8,
        "rotary_percent": 0.5,
        "mixtures": _MIXTURES
        | {"moe_shared_expert_intermediate_size": 24, "moe_layer_freq": [0, 1, 1, 1]},
    },
    "gpt_oss": {
        "gpt_oss": {
            "swiglu": False,
            "quick_geglu": True,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 0.7,
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "window_size": [2, 0],
            "window_attn_skip_freq": 2,
            "position_embedding_type": "yarn",
            "yarn_rotary_scaling_factor": 8.0,
            "yarn_original_max_position_embeddings": 16,
            "yarn_beta_fast": 32.0,
            "yarn_beta_slow": 1.0,
            "yarn_mscale": 1.0,
            "yarn_mscale_all_dim": 0.0,
            "yarn_correction_range_round_to_int": False,
        },
        "mixtures": {
            "num_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 24,
            "moe_layer_freq": 1,
        },
    },
    "deepseek_v3": {
        "qk_norm": True,
        "head_dim": 7,
        "latent": _LATENT
        | {"q_lora_rank": 10, "rope_type": "yarn", "rotary_scaling_factor": 40.0}
        | {"mscale": 1.0, "mscale_all_dim": 0.7},
        "mixtures": {**_MIXTURES, "moe_layer_freq": [0, 1, 1, 1]},
    },
    "glm4_moe_lite": {
        "qk_norm": True,
        "head_dim": 7,
        "latent": _LATENT | {"q_lora_rank": None, "rope_type": "rope"},
        "mixtures": {**_MIXTURES, "moe_layer_freq": [1, 0, 1, 1]},
    },
    "qwen3_next": {
        "qk_norm": True,
        "head_dim": 8,
        "groups": 2,
        "rotary_percent": 0.5,
        "delta": {**_DELTA, "linear_attention_freq": [1, 1, 0, 1]},
        "mixtures": {**_OF_DELTA, "moe_layer_freq": [1, 0, 1, 1]},
    },
    "qwen3_5_text-tied": {
        "tied": True,
        "qk_norm": True,
        "head_dim": 8,
        "groups": 2,
        "rotary_percent": 0.5,
        "delta": {**_DELTA, "linear_attention_freq": [0, 1, 1, 0]},
    },
    "qwen3_5_moe_text": {
        "qk_norm": True,
        "head_dim": 8,
        "groups": 2,
        "ffn_hidden_size": 12,
        "rotary_percent": 0.5,
        "delta": {**_DELTA, "linear_attention_freq": [1, 0, 1, 0]},
        "mixtures": {**_OF_DELTA, "moe_layer_freq": 1},
    },
    "deepseek_v32": {
        "qk_norm": True,
        "head_dim": 7,
        "latent": _LATENT
        | {"q_lora_rank": 10, "rope_type": "yarn", "rotary_scaling_factor": 40.0}
        | {"mscale": 1.0, "mscale_all_dim": 0.7},
        "indexer": {**_INDEXER, "dsa_indexer_rope_interleaved": False},
        "mixtures": {**_MIXTURES, "moe_layer_freq": 1},
    },
    "glm_moe_dsa": {
        "qk_norm": True,
        "head_dim": 7,
        "latent": _LATENT | {"q_lora_rank": 10, "rope_type": "rope"},
        "indexer": {
            **_INDEXER,
            "dsa_indexer_topk_freq": 2,
            "dsa_indexer_skip_topk_offset": 2,
            "dsa_indexer_rope_interleaved": True,
        },
        "mixtures": {**_MIXTURES, "moe_layer_freq": [0, 1, 1, 1]},
    },
}
"""What Megatron-LM is told of the models of `tests/models/checkpoints.py`, beside their sizes."""

SAME_ARGUMENTS = [
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("group_query_attention", "kv_channels", "max_position_embeddings", "rotary_base"),
    *("position_embedding_type", "rotary_percent", "rotary_interleaved", "use_rope_scaling"),
    *("rope_scaling_factor", "rotary_seq_len_interpolation_factor", "swiglu", "normalization"),
    *("norm_epsilon", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "window_size"),
    *("untie_embeddings_and_output_weights", "make_vocab_size_divisible_by", "padded_vocab_size"),
    *("num_experts", "multi_latent_attention"),
]
TWO_RANKS = ("qwen3-tied", "llama", "qwen2_moe", "glm4_moe", "deepseek_v3", "qwen3_next")
AGAIN = [(name, 1) for name in MODELS if "delta" in MODELS[name]] + [("qwen3_next", 2)]
SAVED: dict[str, dict[str, Any]] = {
    "optimizer": {"model": MODELS["llama"], "optimizer": True},
    "own-norms": {"model": MODELS["qwen2"], "names": "own"},
    "own-norms-separate": {"model": MODELS["qwen3"], "names": "own", "separate": True},
    "separate": {"model": MODELS["qwen2-tied"], "separate": True},
    "tied": {"model": MODELS["llama-tied-llama3"]},
    "mixtral": {"model": MODELS["mixtral"]},
    "mixtral-separate": {"model": MODELS["mixtral"], "separate": True},
    "qwen2_moe-local": {"model": MODELS["qwen2_moe"], "names": "local"},
    "qwen3_moe-own-norms": {"model": MODELS["qwen3_moe-tied"], "names": "own"},
    "glm4_moe": {"model": MODELS["glm4_moe"]},
    "glm4_moe-separate": {"model": MODELS["glm4_moe"], "separate": True},
    "gpt_oss": {"model": MODELS["gpt_oss"]},
    "deepseek_v3": {"model": MODELS["deepseek_v3"]},
    "deepseek_v3-local": {"model": MODELS["deepseek_v3"], "names": "local"},
    "deepseek_v32": {"model": MODELS["deepseek_v32"]},
    "glm_moe_dsa": {"model": MODELS["glm_moe_dsa"]},
    "glm_moe_dsa-separate": {"model": MODELS["glm_moe_dsa"], "separate": True},
    "qwen3_next-separate": {
        "model": {**MODELS["qwen3_next"], "delta": {**_DELTA, "linear_attention_freq": 3}},
        "separate": True,
    },
    "qwen3_5_text": {"model": MODELS["qwen3_5_text-tied"]},
    "two-ranks": {"model": MODELS["qwen3-tied"], "optimizer": True},
    "two-ranks-separate": {"model": MODELS["qwen2"], "separate": True},
    "two-ranks-experts": {"model": MODELS["qwen2_moe"]},
}
"""What Megatron-LM saves: with optimizer or not, layers stacked or not, norms under any name."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of every family, converted and loaded by Megatron-LM; and what it saved itself."""
    path = tmp_path_factory.mktemp("megatron")
    for name in MODELS:
        save_model(name, path / "hf" / name)
        options = ["--vocab-divisible-by", "8", "--verify"]
        _convert(path / "hf" / name, "megatron", path / "megatron" / name, *options)

    for ranks in (1, 2):
        jobs = []
        for name, model in MODELS.items():
            if ranks == 1 or name in TWO_RANKS:
                parts = ("mixtures", "latent", "indexer", "gpt_oss", "delta")
                more = [name for part in parts for name in model.get(part, {})]
                same = [*SAME_ARGUMENTS, *more] if ranks == 1 else []
                again = {"again": str(path / "loaded" / f"{name} {ranks}")}
                rest = {"model": model, **(again if (name, ranks) in AGAIN else {})}
                jobs.append(_job(path, "load", path / "megatron" / name, ranks, same, **rest))
        for name, saved in SAVED.items():
            if name.startswith("two-ranks") == (ranks == 2):
                jobs.append(_job(path, "save", path / "saved" / name, ranks, [], **saved))
        directory = path / f"{ranks} ranks"
        directory.mkdir()
        run_jobs(directory, jobs, ranks)
    return path


def _job(
    root: Path, do: str, checkpoint: Path, ranks: int, same: list[str], **rest: Any
) -> dict[str, Any]:
    logits = root / f"{do} {checkpoint.name} {ranks}"
    common = {"do": do, "checkpoint": str(checkpoint), "logits": str(logits)}
    return {**common, "same_arguments": same, **rest}


def _convert(source: Path, to: str, target: Path, *options: str) -> str:
    return _tool(str(source), "--to", to, "--out", str(target), *options)


def _tool(*arguments: str) -> str:
    """Run the tool in this process, and return what it prints."""
    with redirect_stdout(StringIO()) as said:
        assert convert_checkpoint.main(arguments) == 0
    return said.getvalue()


def _logits(directory: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits


def _assert_near(theirs: Path, directory: Path) -> None:
    """Megatron-LM's logits, without those of the padding, and transformers'."""
    wanted = load_file(theirs)["logits"][..., :VOCABULARY]
    found = _logits(directory)[..., :VOCABULARY]
    assert wanted.std() > 0.1 and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


@pytest.mark.parametrize("name", MODELS)
def test_megatron_computes_with_what_we_wrote_what_transformers_computes(
    root: Path, name: str
) -> None:
    _assert_near(root / f"load {name} 1", root / "hf" / name)
    two_ranks = root / f"load {name} 2"
    if two_ranks.exists():
        _assert_near(two_ranks, root / "hf" / name)


@pytest.mark.parametrize(("name", "ranks"), AGAIN)
def test_what_megatron_loaded_and_saved_is_what_we_wrote(root: Path, name: str, ranks: int) -> None:
    like = ["--like", str(root / "hf" / name)]
    target = root / "unchanged" / f"{name} {ranks}"
    _convert(root / "loaded" / f"{name} {ranks}", "huggingface", target, "--verify", *like)
    assert_same_tensors(root / "hf" / name, target)


@pytest.mark.parametrize("name", SAVED)
def test_transformers_computes_with_what_megatron_saved_what_it_computed(
    root: Path, name: str
) -> None:
    target = root / "back" / name
    source = root / "saved" / name
    said = _convert(source, "huggingface", target, "--verify", "--vocab-size", str(VOCABULARY))
    _assert_near(root / f"save {name} {1 + name.startswith('two-ranks')}", target)

    assert "left out: 1 states of random numbers" in said
    assert "left out: unread classes in common.pt: " in said and "signal.Signals" in said
    assert ("optimizer tensors or objects" in said) == bool(SAVED[name].get("optimizer"))
    assert ("opt_param_scheduler" in said) == bool(SAVED[name].get("optimizer"))


def test_what_megatron_saved_goes_to_it_and_back_unchanged(root: Path) -> None:
    """The padding of the vocabulary is kept, where nothing says what is padding."""
    said = _convert(root / "saved" / "optimizer", "huggingface", root / "padded")
    assert "does not say how many of its 40 vocabulary rows are padding" in said
    _convert(root / "padded", "megatron", root / "again")
    _convert(root / "again", "huggingface", root / "padded again")
    assert_same_tensors(root / "padded", root / "padded again")

    like = ["--like", str(root / "hf" / "llama")]
    _convert(root / "saved" / "optimizer", "huggingface", root / "like", *like)
    assert (root / "like" / "tokenizer.json").exists()
    _assert_near(root / "save optimizer 1", root / "like")


def test_it_is_said_what_a_directory_of_megatron_is(root: Path) -> None:
    said = _tool("--inspect", str(root / "saved" / "two-ranks"), "--verify").splitlines()
    assert said[0] == "what: Megatron-LM checkpoint"
    assert "step: 10" in said and "saved by: tp 2, pp 1, dp 1" in said
    assert said[-1] == "whole: yes"


def test_every_family_is_here() -> None:
    assert {CONFIGS[name]["model_type"] for name in MODELS} == {
        config["model_type"] for config in CONFIGS.values()
    }
