"""Kimi-K2.5: its language model among files of one that reads images, and packed integers.

That training and the engine compute what transformers does is tested with the other families.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrlhf.checkpoint.conversion.model_files import HuggingFaceSource
from mrlhf.errors import ConfigError, WeightError
from mrlhf.models.families import family_of, load_spec
from mrlhf.models.families.base import whole_model
from mrlhf.models.rope import rope_of
from mrlhf.models.spec import ModelSpec
from mrlhf.models.weight_files import check_weight_files, expected_tensors
from mrlhf.weights.hf import read_weights
from mrlhf.weights.quantised import INT4_GROUP
from mrlhf.weights.shard import Slot, local_shape, pieces_of
from tests.models.published_files import FILES
from tests.models.wrappers import ENDS, TOKENS, as_plain, assert_taken_out
from tests.shards import tiny_config, tiny_spec

EYES = {
    "patch_size": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 12,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


def _wrapper() -> Any:
    """A tiny model that reads images too."""
    text = tiny_config("deepseek_v3").to_dict() | {"eos_token_id": ENDS}
    torch.manual_seed(3)
    config = transformers.Kimi_K25Config(
        text_config=text,
        vision_config=EYES,
        projection_hidden_size=16,
        tie_word_embeddings=False,
    )
    return transformers.Kimi_K25ForConditionalGeneration(config).eval()


def _name_layers(directory: Path) -> None:
    """Give the layers there their published names: transformers writes `blocks` in all of them."""
    tensors = load_file(directory / "model.safetensors")
    written = "language_model.model.blocks."
    named = {
        name.replace(written, "language_model.model.layers."): tensor
        for name, tensor in tensors.items()
    }
    assert named.keys() != tensors.keys()
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("as_published", [False, True])
def test_the_language_model_is_taken_out_of_one_that_reads_images(
    as_published: bool, tmp_path: Path
) -> None:
    """What is written is a `deepseek_v3` alone."""
    theirs = _wrapper()
    theirs.save_pretrained(tmp_path / "images", save_original_format=as_published)
    if as_published:
        _name_layers(tmp_path / "images")
    names = load_file(tmp_path / "images" / "model.safetensors")
    start = "language_model.model" if as_published else "model.language_model"
    others = sum("vision_tower" in name or "mm_projector" in name for name in names)
    assert f"{start}.layers.0.input_layernorm.weight" in names and others
    with torch.no_grad():
        wanted = type(theirs).from_pretrained(tmp_path / "images")(TOKENS).logits

    spec = tiny_spec("deepseek_v3")
    assert_taken_out(tmp_path, spec, others, transformers.DeepseekV3ForCausalLM, wanted)


def _published(directory: Path, **text: Any) -> Path:
    """Write the published `config.json`, with changes of its `text_config`."""
    stated = FILES["Kimi-K2.5"]
    changed = {**stated, "text_config": {**stated["text_config"], **text}}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(changed))
    return directory


def test_the_published_sizes(tmp_path: Path) -> None:
    """The wrapper as transformers reads it has the same language model."""
    spec = load_spec(_published(tmp_path), "lm")
    config = transformers.AutoConfig.from_pretrained(tmp_path).text_config
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
    parameters = sum(map(math.prod, family_of(spec).tensor_shapes(spec).values()))
    assert parameters == model.num_parameters() + 60 * 384 == 1_026_408_232_448
    assert spec.norm_eps == 1e-5 and spec.latent is not None and spec.latent.norm_eps == 1e-6
    inverse, scale = rope_of(spec)
    theirs = model.model.rotary_emb
    assert scale == theirs.attention_scaling == 1.0
    with torch.device("cpu"):
        rotation = type(theirs)(config)
    assert torch.equal(inverse, rotation.inv_freq)
    assert spec.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2)


def _spec_of_packed(directory: Path) -> ModelSpec:
    """The spec of a tiny model of which the published quantisation is stated."""
    sizes = tiny_config("deepseek_v3").to_dict()
    sizes |= {"hidden_size": 64, "moe_intermediate_size": 128, "dtype": "bfloat16"}
    return load_spec(_published(directory, **sizes), "lm")


def _save_packed(directory: Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Save tensors as published files have them; returns what compressed-tensors reads in them."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    stated = _stated_scheme(directory)
    scheme = quantization.QuantizationScheme(**stated)

    generator = torch.Generator().manual_seed(1)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, shape in family_of(spec).tensor_shapes(spec).items():
        tensor = torch.randn(shape, generator=generator).to(torch.bfloat16)
        meant[name] = stored[f"language_model.{name}"] = tensor
        if ".experts." not in name:
            continue
        module = name.removesuffix(".weight")
        scales = tensor.unflatten(1, (-1, INT4_GROUP)).abs().amax(-1) / 7
        compressor = packing.PackedQuantizationCompressor
        parts = compressor.compress({"weight": tensor, "weight_scale": scales}, scheme)
        meant[name] = compressor.decompress(parts, scheme)["weight"]
        del stored[f"language_model.{name}"]
        stored |= {f"language_model.{module}.{part}": value for part, value in parts.items()}
    stored["vision_tower.patch_embed.proj.bias"] = torch.zeros(16)
    save_file(stored, directory / "model.safetensors")
    return meant


def _stated_scheme(directory: Path) -> dict[str, Any]:
    """The scheme that the `config.json` there states."""
    stated = json.loads((directory / "config.json").read_text())
    groups: dict[str, dict[str, Any]] = stated["quantization_config"]["config_groups"]
    return groups["group_0"]


@pytest.mark.parametrize("tp", [1, 2])
def test_packed_integers_are_what_compressed_tensors_reads(tp: int, tmp_path: Path) -> None:
    spec = _spec_of_packed(tmp_path)
    meant = _save_packed(tmp_path, spec)
    assert "quantization_config" not in spec.hf_config
    assert check_weight_files(tmp_path, spec, needs_head=False) == ()
    shapes = family_of(spec).tensor_shapes(spec)
    whole = whole_model(spec)
    rules = family_of(spec).rules_of(spec, whole)
    read = 0
    for rank in range(tp):
        slots = []
        for name in family_of(spec).parameter_names(spec, whole):
            parameter = torch.zeros(local_shape(rules[name], shapes, tp), dtype=torch.bfloat16)
            pieces = pieces_of(name, rules[name], shapes, rank, tp)
            slots += [Slot(piece, parameter) for piece in pieces]
        assert read_weights(tmp_path, slots, expected_tensors(spec)) == []
        for slot in slots:
            piece = slot.piece
            wanted = meant[piece.name]
            if piece.dim is not None:
                wanted = wanted.narrow(piece.dim, piece.start, piece.stop - piece.start)
            assert torch.equal(slot.load(), wanted), piece.name
            read += ".experts." in piece.name
    assert read == tp * 3 * 4 * 3  # layers, experts and matrices


def test_a_packed_model_is_converted_to_a_plain_one(tmp_path: Path) -> None:
    spec = _spec_of_packed(tmp_path / "packed")
    meant = _save_packed(tmp_path / "packed", spec)
    told = HuggingFaceSource(tmp_path / "packed").description.left_out
    assert told == ["tensors of a draft model or of what reads images: 1"]
    as_plain(tmp_path / "packed", tmp_path / "plain")
    written = load_file(tmp_path / "plain" / "model.safetensors")
    assert written.keys() == meant.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, meant[name]), name
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


def test_packed_integers_without_fitting_scales_are_refused(tmp_path: Path) -> None:
    spec = _spec_of_packed(tmp_path)
    _save_packed(tmp_path, spec)
    stored = load_file(tmp_path / "model.safetensors")
    name = "language_model.model.layers.1.mlp.experts.0.down_proj"
    scales = stored.pop(f"{name}.weight_scale")
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=f"{name}.weight_packed is of type I32"):
        check_weight_files(tmp_path, spec, needs_head=False)
    save_file(
        {**stored, f"{name}.weight_scale": scales[:, :2].clone()}, tmp_path / "model.safetensors"
    )
    with pytest.raises(WeightError, match=r"weight_scale is \[64, 2\] and not \[64, 4\]"):
        check_weight_files(tmp_path, spec, needs_head=False)


@pytest.mark.parametrize(
    "change", [{"num_bits": 8}, {"group_size": 128}, {"symmetric": False}, {"actorder": "group"}]
)
def test_other_packed_integers_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    stated = FILES["Kimi-K2.5"]["quantization_config"]
    group = stated["config_groups"]["group_0"]
    groups = {"group_0": {**group, "weights": {**group["weights"], **change}}}
    quantised = {**stated, "config_groups": groups}
    with pytest.raises(ConfigError, match=r"compressed-tensors in format pack-quantized with"):
        load_spec(_published(tmp_path, quantization_config=quantised), "lm")


def test_another_language_model_within_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="text_config has model_type 'kimi_linear'; of a kimi_k2"):
        load_spec(_published(tmp_path, model_type="kimi_linear"), "lm")
    assert load_spec(_published(tmp_path, model_type="kimi_k2"), "lm").family == "deepseek_v3"
