"""gpt-oss: its published configurations, the stacks of its files, and weights in MXFP4."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mrlhf.checkpoint.conversion.megatron_arguments import (
    arguments_of,
    command_line,
    config_of,
    differences,
)
from mrlhf.checkpoint.conversion.model_files import HuggingFaceSource, write_hugging_face
from mrlhf.config.sections import LoraSection
from mrlhf.errors import CheckpointError, ConfigError, WeightError
from mrlhf.models.adapter_choice import trained_spec
from mrlhf.models.families import family_of, load_spec, save_config, spec_of
from mrlhf.models.families.values import check_values
from mrlhf.models.parameters import role_pieces
from mrlhf.models.rope import rope_of
from mrlhf.models.spec import ClampedSwish, Experts, ModelSpec
from mrlhf.models.weight_files import read_model
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.weights.mxfp4 import dequantised
from tests.models.published_files import gpt_oss
from tests.shards import make_slots, stored, tiny_config, tiny_spec

FILE = "model.safetensors"
EXPERTS = "model.layers.3.mlp.experts."


@pytest.mark.parametrize(
    ("layers", "experts", "parameters"),
    [(24, 32, 20_914_757_184), (36, 128, 116_829_156_672)],
)
def test_the_published_models(layers: int, experts: int, parameters: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(gpt_oss(layers, experts)))
    spec = load_spec(tmp_path, "lm")
    shapes = family_of(spec).tensor_shapes(spec)
    assert sum(math.prod(shape) for shape in shapes.values()) == parameters
    config = GptOssConfig(**gpt_oss(layers, experts))
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == parameters

    assert spec.windows[:3] == (128, None, 128)
    assert spec.has_sinks and spec.qkv_bias and spec.o_bias and spec.needs_own_layers
    assert spec.experts == Experts(
        count=experts,
        per_token=4,
        ffn_size=2880,
        layers=(True,) * layers,
        normalised=True,
        has_biases=True,
        activation=ClampedSwish(1.702, 7.0),
    )
    rotation = theirs.model.rotary_emb
    assert rope_of(spec).scale == rotation.attention_scaling == pytest.approx(1.3466, abs=1e-4)

    save_config(spec, tmp_path, torch.bfloat16)
    exported = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in exported and exported["swiglu_limit"] == 7.0
    assert load_spec(tmp_path, "lm") == spec


def _stacks(directory: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Write a tiny model as transformers does; returns its tensors."""
    torch.manual_seed(3)
    config = tiny_config("gpt_oss")
    for key, value in changes.items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter)
    model.save_pretrained(directory)
    tensors = load_file(directory / FILE)
    assert tensors.keys() == dict(model.named_parameters()).keys()
    return tensors


def _part(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """One of our tensors, out of stacks."""
    if name in tensors:
        return tensors[name]
    prefix, number, last = name.rsplit(".", 2)
    matrix = tensors[f"{prefix}.{last}"][int(number)]
    return matrix if last.endswith("_bias") else matrix.t()


LAYOUTS = [
    ParallelLayout(tp=1, pp=1, dp=1),
    ParallelLayout(tp=2, pp=2, dp=1),
    ParallelLayout.for_world("actor", 2, AxisSizes(ep=2)),
]


def _assert_read(directory: Path, tensors: dict[str, torch.Tensor], spec: Any = None) -> None:
    spec = spec or load_spec(directory, "lm")
    for layout in LAYOUTS:
        for rank in range(layout.world_size):
            slots = make_slots(role_pieces(spec, layout, rank))
            assert read_model(directory, spec, slots, needs_head=False)
            for slot in slots:
                piece = slot.piece
                whole = _part(tensors, piece.name)
                wanted = whole.narrow(piece.dim, piece.start, piece.stop - piece.start)
                assert torch.equal(stored(slot), wanted.to(torch.float32)), (piece.name, layout)


def test_experts_are_read_out_of_stacks(tmp_path: Path) -> None:
    tensors = _stacks(tmp_path)
    _assert_read(tmp_path, tensors)
    tensors[EXPERTS + "down_proj"] = torch.zeros(4, 32, 24)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(WeightError, match=r"3\.mlp\.experts\.down_proj is \[4, 32, 24\] and not"):
        read_model(tmp_path, tiny_spec("gpt_oss"), [], needs_head=False)


def _packed(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(110, 130, shape, dtype=torch.uint8)


def test_numbers_in_mxfp4_by_hand() -> None:
    """Bytes hold the earlier number in their lower bits; the scales are 2^1 and 2^-127."""
    blocks = torch.zeros(2, 16, dtype=torch.uint8)
    blocks[:, 0] = 0x71  # 0.5 and 6
    blocks[:, 15] = 0xF9  # -0.5 and -6
    found = dequantised(blocks, torch.tensor([128, 0], dtype=torch.uint8)).float()
    assert found.shape == (64,) and found.dtype == torch.float32
    assert found[[0, 1, 2, 30, 31]].tolist() == [1.0, 12.0, 0.0, -1.0, -12.0]
    small = 2.0**-127
    assert found[[32, 33, 62, 63]].tolist() == [small / 2, 6 * small, -small / 2, -6 * small]


def test_experts_in_mxfp4_are_read_as_transformers_converts_them(tmp_path: Path) -> None:
    tensors = _stacks(tmp_path, intermediate_size=64)
    packed = dict(tensors)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, shape in (("gate_up_proj", (4, 128, 1)), ("down_proj", (4, 32, 2))):
            blocks, scales = _packed(shape)
            del packed[prefix + name]
            packed |= {f"{prefix}{name}_blocks": blocks, f"{prefix}{name}_scales": scales}
            tensors[prefix + name] = convert_moe_packed_tensors(blocks, scales)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(packed, tmp_path / FILE)
    _assert_read(tmp_path, tensors)

    (tmp_path / "converted").mkdir()
    write_hugging_face(HuggingFaceSource(tmp_path), tmp_path / "converted", 10**9)
    converted = load_file(tmp_path / "converted" / FILE)
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in tensors.items())
    assert load_spec(tmp_path / "converted", "lm") == load_spec(tmp_path, "lm")

    scales = packed.pop(EXPERTS + "down_proj_scales")
    for other, message in (
        ({}, "down_proj_blocks is of type U8, and no scales that are read lie beside it"),
        ({EXPERTS + "down_proj_scales": scales[:3]}, r"down_proj_scales is \[3, 32, 2\] and not"),
    ):
        save_file(packed | other, tmp_path / FILE)
        with pytest.raises(WeightError, match=message):
            read_model(tmp_path, load_spec(tmp_path, "lm"), [], needs_head=False)


def test_it_is_said_which_quantised_weights_are_read() -> None:
    config = tiny_config("gpt_oss").to_dict() | {"quantization_config": {"quant_method": "awq"}}
    with pytest.raises(ConfigError, match="not supported but for mxfp4, fp8 with"):
        check_values(config, family_of(tiny_spec("gpt_oss")).quantisations)


def test_adapters_go_beside_all_linear_layers_but_routers() -> None:
    spec = tiny_spec("gpt_oss")
    adapted = trained_spec(spec, LoraSection(rank=2), [])
    factors = family_of(adapted).tensor_shapes(adapted).keys() - family_of(spec).tensor_shapes(spec)
    ends = {name.partition(".lora_")[0].split(".", 3)[3] for name in factors}
    of_experts = {f"mlp.experts.{n}.{own}_proj" for n in range(4) for own in ("gate_up", "down")}
    assert ends == {f"self_attn.{letter}_proj" for letter in "qkvo"} | of_experts
    adapted = trained_spec(spec, LoraSection(rank=2, target_modules=["gate_up_proj"]), [])
    shapes = family_of(adapted).tensor_shapes(adapted)
    assert shapes[EXPERTS + "1.gate_up_proj.lora_B.weight"] == (48, 2)
    with pytest.raises(ConfigError, match="no linear layer of the model is called so"):
        trained_spec(spec, LoraSection(rank=2, target_modules=["gate_up_proj_bias"]), [])


def _published_spec(**changes: Any) -> ModelSpec:
    return spec_of({**gpt_oss(36, 128), "attention_bias": True, **changes}, "lm")


def test_megatron_lm_has_arguments_for_the_published_model() -> None:
    """The names are those of megatron-core 0.16; it has no options for yarn."""
    spec = _published_spec()
    stated = arguments_of(spec, 128)
    options = command_line(stated).splitlines()
    for option in (
        *("--quick-geglu", "--glu-linear-offset 1.0", "--activation-func-clamp-value 7.0"),
        *("--softmax-type learnable", "--window-size 127,0", "--window-attn-skip-freq 2"),
        *("--kv-channels 64", "--num-query-groups 8", "--num-experts 128", "--moe-router-topk 4"),
    ):
        assert option in options, option
    assert not {"--disable-bias-linear", "--swiglu", "--position-embedding-type rope"} & {*options}
    yarn = {name: value for name, value in stated.items() if name.startswith("yarn_")}
    assert yarn == {
        "yarn_rotary_scaling_factor": 32.0,
        "yarn_original_max_position_embeddings": 4096,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": False,
    }
    assert spec_of(config_of(stated, spec.vocab_size, None), "lm") == spec


@pytest.mark.parametrize(
    "change",
    [
        {"softmax_type": "vanilla"},
        {"window_attn_skip_freq": 4},
        {"window_size": (128, 0)},
        {"activation_func_clamp_value": 5.0},
        {"glu_linear_offset": 0.0},
        {"add_bias_linear": False},
        {"yarn_beta_fast": 1.0},
        {"position_embedding_type": "rope"},
    ],
)
def test_arguments_of_another_model_are_found(change: dict[str, Any]) -> None:
    spec = _published_spec()
    stated = arguments_of(spec, 128)
    assert differences(spec, {**stated, "window_attn_skip_freq": [1, 0] * 18}) == []
    (found,) = differences(spec, {**stated, **change})
    assert found.startswith(next(iter(change)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_alpha": 1.3}, "gates whose alpha is not 1.702"),
        ({"attention_bias": False}, "attention without biases"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "of yarn only"),
    ],
)
def test_what_megatron_lm_cannot_build_of_it_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    config = {**tiny_config("gpt_oss").to_dict(), **changes}
    config["rope_parameters"] = {"rope_theta": 10000.0, **config["rope_parameters"]}
    with pytest.raises(CheckpointError, match=message):
        arguments_of(spec_of(config, "lm"), 128)


def test_arguments_of_scaled_angles_and_without_windows_are_refused() -> None:
    stated = arguments_of(_published_spec(), 128)
    with pytest.raises(CheckpointError, match=r"yarn_mscale and yarn_mscale_all_dim are"):
        config_of({**stated, "yarn_mscale_all_dim": 1.0}, 100, None)
    with pytest.raises(CheckpointError, match="window_size is None"):
        config_of({**stated, "window_size": None}, 100, None)
    with pytest.raises(CheckpointError, match="swiglu is False; only True"):
        config_of(stated, 100, "mixtral")
