"""DeepSeek-V3 as published: its sizes, its memory on 8 x 8 GPUs, and fp8 weights.

That training and engine compute what transformers does is tested with the other families.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mrlhf.checkpoint.conversion.megatron_arguments import (
    arguments_of,
    command_line,
    differences,
)
from mrlhf.config import PPOConfig, load_config
from mrlhf.errors import CheckpointError, ConfigError, WeightError
from mrlhf.inference.sizes import CacheShape
from mrlhf.models.attention_sizes import attention_of
from mrlhf.models.families import Chunk, family_of, load_spec, save_config, spec_of
from mrlhf.models.families.values import check_values
from mrlhf.models.rope import rope_of
from mrlhf.models.sparse_attention import IndexQueries, chosen_keys
from mrlhf.models.weight_files import expected_tensors
from mrlhf.preflight.footprint import footprint
from mrlhf.preflight.model_checks import check_models
from mrlhf.weights.hf import read_weights
from mrlhf.weights.shard import Slot, local_shape, pieces_of
from tests.shards import full_tensors, tiny_config, tiny_spec

ROOT = Path(__file__).parents[2]


def test_the_published_sizes(published: Path) -> None:
    spec = load_spec(published / "DeepSeek-V3", "lm")
    shapes = family_of(spec).tensor_shapes(spec)
    assert sum(map(math.prod, shapes.values())) == 671_026_419_200
    assert spec.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert rope_of(spec).scale == 1.0 and spec.rotary_dim == 64

    products = sum(product.inputs * product.outputs for product in attention_of(spec).products)
    assert products == 7168 * (1536 + 576 + 128 * 128) + 1536 * 128 * 192 + 512 * 128 * 256
    for tp in (1, 64):  # every rank has the whole latent
        assert CacheShape.on_rank(spec, tp, 2, 64).token_bytes == 61 * (512 + 64) * 2 == 70_272
    [sizes] = spec.kernel_sizes(torch.bfloat16, 64, 8)
    assert sizes.latent == (16, 512, 64)
    assert family_of(spec).ignored_prefixes(spec)[0] == "model.layers.61."


def test_kimi_k2_is_a_deepseek_v3_of_another_name(published: Path, tmp_path: Path) -> None:
    spec = load_spec(published / "Kimi-K2", "lm")
    shapes = family_of(spec).tensor_shapes(spec)
    plain = {key: value for key, value in spec.hf_config.items() if key != "quantization_config"}
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**plain))
    assert sum(map(math.prod, shapes.values())) == model.num_parameters() + 60 * 384 > 10**12
    assert spec.experts is not None and spec.experts.mixtures == 60
    save_config(spec, tmp_path, torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "deepseek_v3"
    assert load_spec(tmp_path, "lm").attention_scale == spec.attention_scale


def test_megatron_lm_has_arguments_for_the_published_model(published: Path) -> None:
    """Those that people who train it with Megatron-LM give."""
    spec = load_spec(published / "DeepSeek-V3", "lm")
    options = command_line(arguments_of(spec, 128)).splitlines()
    for option in (
        *("--multi-latent-attention", "--qk-layernorm", "--q-lora-rank 1536"),
        *("--kv-lora-rank 512", "--qk-head-dim 128", "--qk-pos-emb-head-dim 64"),
        *("--v-head-dim 128", "--kv-channels 128", "--rotary-scaling-factor 40.0"),
        *("--rope-type yarn", "--mscale 1.0", "--mscale-all-dim 1.0", "--moe-router-group-topk 4"),
    ):
        assert option in options, option
    assert not [option for option in options if "query" in option]
    with pytest.raises(CheckpointError, match=r"latents with .*'beta_fast': 1\.0"):
        arguments_of(load_spec(published / "Kimi-K2", "lm"), 128)


def test_a_rotation_of_latents_is_compared_with_what_is_stated(published: Path) -> None:
    spec = load_spec(published / "DeepSeek-V3", "lm")
    stated = arguments_of(spec, 128)
    assert differences(spec, stated) == []
    assert differences(spec, {**stated, "kv_channels": 56, "rope_type": None}) == []
    (found,) = differences(spec, {**stated, "mscale_all_dim": 0.0})
    assert found == "mscale_all_dim is 0.0 in the checkpoint and 1.0 there"
    (found,) = differences(spec, {**stated, "multi_latent_attention": False})
    assert found.startswith("multi_latent_attention is False")

    # Yarn that scales nothing is no yarn, whatever its name is.
    plain = tiny_spec("deepseek_v3")
    stated = arguments_of(plain, 1)
    for rope in ({"rope_type": "yarn"}, {"rotary_scaling_factor": 40.0}):
        assert differences(plain, {**stated, **rope}) == []
    assert differences(plain, {**stated, "rope_type": "yarn", "rotary_scaling_factor": 4.0})


@pytest.mark.parametrize(
    "change",
    [{"truncate": False}, {"attention_factor": 1.0}, {"mscale": None}, {"beta_slow": 2}],
)
def test_a_rotation_of_latents_without_arguments_is_refused(
    published: Path, change: dict[str, Any]
) -> None:
    spec = load_spec(published / "DeepSeek-V3", "lm")
    rope = {**spec.hf_config["rope_parameters"], **change}
    with pytest.raises(CheckpointError, match=r"only$"):
        arguments_of(replace(spec, hf_config={"rope_parameters": rope}), 128)
    assert spec.latent is not None
    halves = replace(spec, latent=replace(spec.latent, interleaved=False))
    with pytest.raises(CheckpointError, match="rotated halves of latents"):
        arguments_of(halves, 128)


def test_glm_4_7_flash_has_the_sizes_of_transformers(tmp_path: Path) -> None:
    config = transformers.Glm4MoeLiteConfig()  # its defaults are the published values
    config.save_pretrained(tmp_path)
    spec = load_spec(tmp_path, "lm")
    shapes = family_of(spec).tensor_shapes(spec)
    with torch.device("meta"):
        model = transformers.Glm4MoeLiteForCausalLM(config)
    # The corrections of the routers' scores, which are no parameters there.
    assert sum(map(math.prod, shapes.values())) == model.num_parameters() + 46 * 64
    assert spec.experts is not None and spec.experts.mixtures == 46
    config.mlp_layer_types = ["sparse"]
    with pytest.raises(ConfigError, match="dense or sparse of each of 47 layers"):
        spec_of(config.to_dict(), "lm")


@pytest.mark.full
def test_adapters_train_on_8_machines_of_8_gpus(published: Path) -> None:
    layout = ["tp=8", "pp=1", "ep=64", "etp=1", "lora.rank=16", f"path={published / 'DeepSeek-V3'}"]
    keys = ["distributed.device=cuda", "rollout.tp=64", *(f"actor.{key}" for key in layout)]
    file = str(ROOT / "configs/gpu/qwen3_30b_a3b_grpo_16_gpus.yaml")
    config = load_config(PPOConfig, file, keys)
    specs = {name: spec for name, spec in check_models(config).items() if spec is not None}
    sizes = footprint(config, specs, 64)
    # The experts, a 64th of them, and of the rest an eighth, but for the matrices to latents. Two
    # percent more are routers and adapters.
    experts = 58 * 256 * 3 * 7168 * 2048
    whole = 61 * 7168 * (1536 + 576)
    weights = experts / 64 + (671_026_419_200 - experts - whole) / 8 + whole
    assert sizes.held["actor/params"] == pytest.approx(2 * weights, rel=0.02)
    # A byte for each expert that a token goes to stands beside its latents.
    assert sizes.sample_bytes == (70_272 + 58 * 8) * 8192 == 579_469_312


def _save_as_fp8(directory: Path) -> dict[str, torch.Tensor]:
    """Save a model whose matrices have partial blocks; returns the numbers that it stands for."""
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=160,
        intermediate_size=264,
        num_hidden_layers=1,
        num_attention_heads=4,
        tie_word_embeddings=False,
    )
    config.save_pretrained(directory)
    stated = json.loads((directory / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    stated["quantization_config"] = quantisation
    (directory / "config.json").write_text(json.dumps(stated))

    stored = {}
    meant = {}
    for name, tensor in full_tensors(spec_of(config.to_dict(), "lm")).items():
        stored[name] = meant[name] = tensor
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            stored[name] = tensor.to(torch.float8_e4m3fn)
            scales = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
            stored[f"{name}_scale_inv"] = scales
            meant[name] = stored[name].float()
            for row in range(rows):
                for column in range(0, columns, 128):
                    scale = scales[row // 128, column // 128]
                    meant[name][row, column : column + 128] *= scale
    save_file(stored, directory / "model.safetensors")
    return meant


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_fp8_weights_are_multiplied_by_the_scales_of_their_blocks(
    tp: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    meant = _save_as_fp8(tmp_path)
    spec = load_spec(tmp_path, "lm")
    assert "quantization_config" not in spec.hf_config
    shapes = family_of(spec).tensor_shapes(spec)
    whole = Chunk(range(1), is_first=True, is_last=True)
    rules = family_of(spec).rules_of(spec, whole)
    for rank in range(tp):
        slots = []
        for name in family_of(spec).parameter_names(spec, whole):
            parameter = torch.zeros(local_shape(rules[name], shapes, tp), dtype=dtype)
            pieces = pieces_of(name, rules[name], shapes, rank, tp)
            slots += [Slot(piece, parameter) for piece in pieces]
        assert read_weights(tmp_path, slots, expected_tensors(spec)) == []
        for slot in slots:
            piece = slot.piece
            wanted = meant[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)
            assert torch.equal(slot.load(), wanted.to(dtype)), piece.name


def test_fp8_weights_without_fitting_scales_are_refused(tmp_path: Path) -> None:
    _save_as_fp8(tmp_path)
    spec = load_spec(tmp_path, "lm")
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    scales = stored.pop(f"{name}_scale_inv")
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=f"{name} is of type F8_E4M3, and no scales"):
        read_weights(tmp_path, [], expected_tensors(spec))

    save_file({**stored, f"{name}_scale_inv": scales[:1]}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"is \[1, 2\] and not \[2, 2\]"):
        read_weights(tmp_path, [], expected_tensors(spec))


def test_other_blocks_of_fp8_are_refused() -> None:
    quantised = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    with pytest.raises(ConfigError, match=r"fp8 with weight_block_size \[128, 128\]"):
        check_values(tiny_config("deepseek_v3").to_dict() | {"quantization_config": quantised})


@pytest.mark.parametrize("count", [9, 40, 300])
def test_of_keys_that_score_alike_the_first_are_chosen(count: int) -> None:
    """So the engine, which has more columns, chooses as training does."""
    heads = torch.ones(2, 3, 4)
    heads[1] = 0.0  # all keys score 0
    queries = IndexQueries(heads, torch.ones(2, 3))
    keys = -torch.ones(count, 4)  # whose products are negative, but for two
    keys[[4, 7]] = torch.tensor([[1.0], [2.0]])
    places = chosen_keys(queries, keys, torch.tensor([8, 8]), most=5)
    assert places.tolist() == [[7, 4, 0, 1, 2], [0, 1, 2, 3, 4]]


def test_a_critic_has_a_head_of_one_row() -> None:
    spec = tiny_spec("deepseek_v3", "scalar")
    shapes = family_of(spec).tensor_shapes(spec)
    assert shapes["score.weight"] == (1, 32)
