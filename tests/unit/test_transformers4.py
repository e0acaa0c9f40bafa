"""What is exported means the same to transformers 4, which vLLM, SGLang and TGI of 2025 read with.

transformers 4.57 runs in processes of its own, from the folder that `make test-full` fills.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GptOssConfig,
    MistralConfig,
    PretrainedConfig,
)

from configs.recipes.data.vocabulary import train_sentencepiece
from mrlhf.checkpoint.conversion.convert import SourceOptions, TargetOptions, convert
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.models.families import FAMILIES, load_spec
from tests.models.features import YARN, YARN_IN_FULL, feature_configs
from tests.models.mixtures import mixture_configs
from tests.models.transformers4 import (
    FOLDER,
    LENGTH,
    TALK,
    TEXTS,
    read_tokenizer,
    run_transformers4,
)

pytestmark = pytest.mark.skipif(
    not (FOLDER / "ready").is_file(), reason=f"no transformers 4: make {FOLDER}/ready"
)

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
}
PLAIN = {"rope_type": "default", "rope_theta": 777.0}
LINEAR = {"rope_type": "linear", "rope_theta": 777.0, "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 777.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PART = {"partial_rotary_factor": 0.5}
# By name of a configuration in `_configs`: the rotations with which it is tried beside its own.
ROTATIONS: dict[str, list[dict[str, Any]]] = {
    "llama-yarn-biases": [PLAIN, LINEAR, LLAMA3, PLAIN | PART],
    "mistral": [PLAIN, YARN],
    "qwen2-windows": [PLAIN, YARN],
    "qwen3-yarn-biases": [PLAIN, LINEAR],
    "ministral": [PLAIN, YARN],
    "smollm3": [PLAIN, YARN],
    "seed-oss": [PLAIN, YARN_IN_FULL],
    "phi3": [PLAIN | PART],
    "granite": [PLAIN, LLAMA3],
    "olmo2": [PLAIN],
    "olmo3": [
        {"sliding_attention": PLAIN, "full_attention": PLAIN},
        {"sliding_attention": PLAIN, "full_attention": YARN | {"rope_theta": 777.0}},
    ],
    "gemma2": [PLAIN, LINEAR],
    "gemma3": [
        {"sliding_attention": PLAIN | {"rope_theta": 99.0}, "full_attention": PLAIN},
        {"sliding_attention": PLAIN, "full_attention": LLAMA3},
    ],
    "qwen3-moe": [PLAIN, YARN],
    "mixtral": [PLAIN, YARN],
    "qwen2-moe": [PLAIN, YARN],
    "gpt-oss": [YARN],
    "glm4-moe": [PLAIN | PART, YARN | PART | {"partial_rotary_factor": 0.25}],
}
# Transformers 4 has no place for two bases in one model, nor for yarn in OLMo-2. It must fail with
# these words, and not guess.
REFUSED = {
    "olmo3": "NoneType",
    "olmo2": "`rope_scaling` must be",
    **dict.fromkeys(
        (
            *("deepseek-v32", "gemma4", "gemma4-linked", "gemma4-moe", "glm4-moe-lite"),
            "glm-moe-dsa",
            *("qwen3-5", "qwen3-5-moe"),
        ),
        "does not recognize this architecture",
    ),
    # It has no classifier of these families.
    "scalar-olmo2-0": "Unrecognized configuration class",
    "scalar-olmo3-0": "Unrecognized configuration class",
}


def _configs() -> dict[str, PretrainedConfig]:
    mistral = feature_configs(SIZES)["ministral"].to_dict()
    for key in ("layer_types", "model_type"):
        del mistral[key]
    configs = {
        **feature_configs(SIZES),
        **mixture_configs(SIZES),
        "mistral": MistralConfig(**mistral),
    }
    # Transformers 4 knows the numbers of the published models alone.
    gates = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    configs["gpt-oss"] = GptOssConfig(**(configs["gpt-oss"].to_dict() | gates))
    for name, rotations in ROTATIONS.items():
        for number, rotation in enumerate(rotations):
            values = configs[name].to_dict() | {"rope_parameters": rotation}
            if values.get("head_dim", 8) is None:  # with which transformers cannot compute yarn
                values["head_dim"] = 8
            configs[f"{name}-{number}"] = type(configs[name])(**values)

    return configs


def _variants() -> Iterator[tuple[str, PretrainedConfig, Any]]:
    """Every configuration as a language model; one of each family as a classifier too."""
    for name, config in _configs().items():
        yield name, config, AutoModelForCausalLM
        if name.endswith("-0"):
            values = config.to_dict() | {"num_labels": 1, "pad_token_id": 0}
            yield f"scalar-{name}", type(config)(**values), AutoModelForSequenceClassification


def _filled(config: PretrainedConfig, auto: Any) -> Any:
    model = auto.from_config(config, attn_implementation="eager").eval()
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data = 1 + 0.1 * noise if "norm" in name else 0.2 * noise
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            # Where a score and its correction are below 0, transformers 4 may choose an expert of a
            # group that it has not chosen.
            buffer.copy_(0.2 * torch.rand_like(buffer))
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.2 * torch.randn_like(buffer))
    return model


def test_the_models_of_every_family_give_the_same_logits(tmp_path: Path) -> None:
    expected = {}
    for name, config, auto in _variants():
        try:
            model = _filled(config, auto)
        except ValueError as error:  # the family has no classifier
            assert "Unrecognized configuration class" in str(error) and name.startswith("scalar")
            continue
        model.save_pretrained(tmp_path / "sources" / name)
        target = tmp_path / "models" / name
        target.parent.mkdir(exist_ok=True)
        options = TargetOptions(format="huggingface")
        source = tmp_path / "sources" / name
        convert(
            source, target, SourceOptions(), options, verify=False, start=lambda *_: lambda _: None
        )
        with torch.no_grad():
            expected[name] = model(torch.arange(LENGTH)[None] % SIZES["vocab_size"]).logits
            again = auto.from_pretrained(target, attn_implementation="eager").eval()
            found = again(torch.arange(LENGTH)[None] % SIZES["vocab_size"]).logits
        assert torch.equal(found, expected[name]), f"{name} in transformers 5"
        assert load_spec(target, "lm") == load_spec(source, "lm"), name

    families = {load_spec(tmp_path / "models" / name, "lm").family for name in expected}
    assert families == set(FAMILIES)
    run_transformers4(tmp_path)
    for name, logits in expected.items():
        told = torch.load(tmp_path / "models" / name / "logits.pt")
        if name in REFUSED:
            assert REFUSED[name] in told, told
            continue
        assert not isinstance(told, str), (name, told)
        dtype, found = told
        assert dtype == torch.float32
        difference = float((found - logits).abs().max())
        # Norms of small states of a delta net enlarge rounding.
        bound = 1e-4 if name == "qwen3-next" else 1e-5
        assert difference < bound * float(logits.abs().max()), (name, difference)


def test_tokenizers_keep_their_class_and_their_tokens(tmp_path: Path) -> None:
    """In both versions, the export of a tokenizer is read as its source."""
    train_sentencepiece(list(TEXTS) * 40, tmp_path / "sentencepiece", vocab_size=300)
    run_transformers4(tmp_path)
    sources = tmp_path / "sources"
    before = json.loads((tmp_path / "sources.json").read_text())
    # As transformers 5 saves them they have a class, or a key, at which transformers 4 fails.
    for name in ("plain", "qwen2"):
        load_tokenizer(sources / name)._backend.save_pretrained(sources / f"{name}-of-5")
        before[f"{name}-of-5"] = before[name]
    (sources / "alone").mkdir()
    shutil.copy(tmp_path / "sentencepiece" / "tokenizer.model", sources / "alone")

    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}!")
    for directory in sources.iterdir():
        for start, given in (("", None), ("own-", template)):
            target = tmp_path / "tokenizers" / f"{start}{directory.name}"
            target.mkdir(parents=True)
            load_tokenizer(directory, given).save_pretrained(target)
        assert load_tokenizer(target).apply_chat_template(TALK) == "hi!"

    run_transformers4(tmp_path)
    after = json.loads((tmp_path / "tokenizers.json").read_text())
    names = [name.removesuffix("-of-5") for name in before]
    for name, plain in zip(before, names, strict=True):
        assert after[name] == before[name], name
        assert after[f"own-{name}"] == [*before[name][:-1], "hi!"], name
        stated = json.loads((tmp_path / "tokenizers" / name / "tokenizer_config.json").read_text())
        assert stated["tokenizer_class"].removesuffix("Fast") in after[plain][0], name
        exported = read_tokenizer(tmp_path / "tokenizers" / name)
        assert exported == read_tokenizer(sources / name), f"{name} in transformers 5"
    alone = load_tokenizer(tmp_path / "tokenizers" / "alone")
    assert after["alone"][3] == [alone.encode(text) for text in TEXTS]
