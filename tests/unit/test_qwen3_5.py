"""Qwen3.5: files of models that also read images, the published sizes, and refusals.

That training and the engine compute what transformers does, and that files go to any layout and
back, is tested with the other families.
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
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from mrlhf.errors import ConfigError
from mrlhf.models.families import family_of, load_spec
from mrlhf.models.generation_config import end_token_ids
from mrlhf.models.rope import rope_of
from mrlhf.models.spec import ModelSpec
from tests.models.features import YARN_IN_FULL
from tests.models.published import write_published
from tests.models.published_files import FILES
from tests.models.wrappers import ENDS, TOKENS, assert_taken_out
from tests.shards import tiny_config, tiny_spec

CLASSES = {
    "qwen3_5_text": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe_text": (
        transformers.Qwen3_5MoeConfig,
        transformers.Qwen3_5MoeForConditionalGeneration,
    ),
}
EYES = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 12,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def _wrapper(language: str) -> Any:
    """A tiny model that reads images too, with the tiny language model of that name."""
    kind, model = CLASSES[language]
    text = tiny_config(language).to_dict() | {"eos_token_id": ENDS}
    ties = text["tie_word_embeddings"]
    torch.manual_seed(3)
    return model(kind(text_config=text, vision_config=EYES, tie_word_embeddings=ties)).eval()


def _change(directory: Path, **changes: Any) -> None:
    """Change keys of the `config.json` there; None leaves a key of `text_config` out."""
    file = directory / "config.json"
    stated = json.loads(file.read_text())
    for key, value in changes.items():
        stated["text_config"].pop(key, None)
        if value is not None:
            stated["text_config"][key] = value
    file.write_text(json.dumps(stated))


def _as_published(directory: Path) -> int:
    """Add a draft model's tensor; return how many tensors are not of the language model."""
    tensors = load_file(directory / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.zeros(32, 64)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(name.startswith(("mtp.", "model.visual.")) for name in tensors)


@pytest.mark.parametrize("in_stacks", [False, True])
@pytest.mark.parametrize("language", CLASSES)
def test_the_language_model_is_taken_out_of_one_that_reads_images(
    language: str, in_stacks: bool, tmp_path: Path
) -> None:
    """Experts of published files are in stacks. What is written is the language model alone."""
    theirs = _wrapper(language)
    theirs.save_pretrained(tmp_path / "images", save_original_format=not in_stacks)
    _change(tmp_path / "images", tie_word_embeddings=None)  # stated for the whole
    others = _as_published(tmp_path / "images")
    names = load_file(tmp_path / "images" / "model.safetensors")
    experts = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert (experts in names) == (in_stacks and "moe" in language)
    with torch.no_grad():
        wanted = theirs(TOKENS).logits

    kind = getattr(transformers, f"{type(theirs).__name__.split('For')[0]}ForCausalLM")
    assert_taken_out(tmp_path, tiny_spec(language), others, kind, wanted)


def test_an_output_layer_that_differs_from_the_embedding_is_kept(tmp_path: Path) -> None:
    _wrapper("qwen3_5_text").save_pretrained(tmp_path)
    assert load_spec(tmp_path, "lm").output_is_embedding
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert not load_spec(tmp_path, "lm").output_is_embedding


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    write_published(root)
    return root


def _size(spec: ModelSpec) -> int:
    return sum(map(math.prod, family_of(spec).tensor_shapes(spec).values()))


@pytest.mark.parametrize("name", ["Qwen3.5-27B", "Qwen3.5-35B-A3B"])
def test_the_published_sizes(name: str, published: Path) -> None:
    spec = load_spec(published / name, "lm")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(published / name)
        )
    assert _size(spec) == sum(parameter.numel() for parameter in model.parameters())
    assert spec.rotary_dim == 64 and not spec.tied_embeddings and spec.delta is not None
    assert spec.delta.layers == (True, True, True, False) * (spec.num_layers // 4)
    assert end_token_ids(published / name) == {248044: "config.json"}
    if name == "Qwen3.5-27B":
        assert _size(spec) == 26_895_998_464
    else:
        assert _size(spec) == 34_660_610_688


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 5000.0}, YARN_IN_FULL])
def test_rotation_equals_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    """A token of text has the same position in all sections, so heads are rotated in part."""
    rope = rope | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen3_5TextConfig(
        **tiny_config("qwen3_5_text").to_dict() | {"head_dim": 16, "rope_parameters": rope}
    )
    config.save_pretrained(tmp_path)
    spec = load_spec(tmp_path, "lm")
    frequencies, scale = rope_of(spec)
    theirs = Qwen3_5TextRotaryEmbedding(config)
    assert torch.equal(frequencies, theirs.inv_freq) and scale == theirs.attention_scaling
    cosines, _ = theirs(torch.zeros(1), TOKENS.expand(3, 1, -1))
    angles = TOKENS[0, :, None] * frequencies
    torch.testing.assert_close(cosines[0, :, : spec.rotary_dim // 2], angles.cos() * scale)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen3.5-27B", {"attention_bias": True}, "sets attention_bias, which is not supported"),
        ("Qwen3.5-27B", {"attn_output_gate": False}, "attn_output_gate=False; only True is"),
        ("Qwen3.5-27B", {"layer_types": ["sliding_attention"] * 64}, "layer_types sliding_att"),
        ("Qwen3.5-27B", {"num_key_value_heads": None}, "no num_key_value_heads; a qwen3_5_text"),
        ("Qwen3.5-27B", {"linear_num_value_heads": 40}, "must be a multiple of linear_num_key"),
        ("Qwen3.5-35B-A3B", {"norm_topk_prob": False}, "norm_topk_prob=False; only True is"),
        ("Qwen3.5-35B-A3B", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]; only [] is"),
        ("Qwen3.5-35B-A3B", {"moe_intermediate_size": None}, "no moe_intermediate_size; a qwen3"),
        ("Qwen3.5-35B-A3B", {"num_experts_per_tok": 257}, "num_experts_per_tok=257 of 256"),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FILES[name]))
    _change(tmp_path, **changes)
    with pytest.raises(ConfigError) as refused:
        load_spec(tmp_path, "lm")
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "no text_config; a qwen3_5 model must state it"),
        ({"quantization_config": {"quant_method": "gptq"}}, "says that the weights are quantised"),
    ],
)
def test_what_is_said_of_the_whole_is_checked(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FILES["Qwen3.5-27B"] | changes))
    with pytest.raises(ConfigError, match=message):
        load_spec(tmp_path, "lm")
