"""Reading and writing `config.json`, what is refused in it, and what a family must offer."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mrlhf.errors import ConfigError
from mrlhf.models.families import FAMILIES, Chunk, family_of, load_spec, save_config
from mrlhf.models.families.llama import LLAMA
from mrlhf.models.freezing import parameter_counts
from mrlhf.models.parameters import role_pieces
from mrlhf.models.rope import rope_of
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.weights.shard import Rule
from tests.models.engines import hf_model, spec_of
from tests.models.features import FEATURE_MODELS
from tests.shards import MIXTURES, MODELS, tiny_config, tiny_spec

LEFT_OUT = object()
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)


def _write(directory: Path, model: str = "llama", **changes: Any) -> None:
    """The `config.json` of a tiny model, with some keys changed or left out."""
    config = json.loads(tiny_config(model).to_json_string(use_diff=False))
    config = {key: value for key, value in config.items() if changes.get(key) is not LEFT_OUT}
    config |= {key: value for key, value in changes.items() if value is not LEFT_OUT}
    (directory / "config.json").write_text(json.dumps(config))


def _rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **numbers}}


def _refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as refusal:
        load_spec(directory, "lm")
    return str(refusal.value)


FACTORS = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0], "factor": 4.0}
LONGROPE = _rope("longrope", rope_theta=10000.0, original_max_position_embeddings=16, **FACTORS)
WITHOUT_CLASSIFIER = (
    *("deepseek_v32", "gemma4_moe", "gemma4_text", "gemma4_text_linked", "granite", "glm4_moe"),
    *("glm4_moe_lite", "glm_moe_dsa", "qwen3_5_moe_text"),
)
SLIDING = "sliding_attention"
GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 4, "sliding_window": 4}


@pytest.mark.parametrize("model", (*MODELS, *MIXTURES))
def test_reads_what_transformers_saved(model: str, tmp_path: Path) -> None:
    tiny_config(model).save_pretrained(tmp_path)
    assert load_spec(tmp_path, "lm") == tiny_spec(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: not readable as JSON: Expecting property name"),
        ("[]", "config.json: a JSON object is needed, not list"),
        ("3", "config.json: a JSON object is needed, not int"),
    ],
)
def test_a_file_that_is_no_object_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert message in _refusal(tmp_path)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    assert _refusal(tmp_path) == (
        f"{tmp_path}: no config.json there; give the directory of a Hugging Face model"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": LEFT_OUT}, "config.json: no model_type; supported are deepseek_v3,"),
        ({"model_type": "gpt2"}, "config.json: model_type 'gpt2' is not supported; supported are"),
        ({"model_type": "unheard-of"}, "config.json: model_type 'unheard-of' is not supported"),
        ({"model_type": ["llama"]}, "config.json: model_type ['llama'] is not supported"),
        ({"model_type": 3}, "config.json: model_type 3 is not supported"),
        ({"hidden_size": LEFT_OUT}, "config.json: no hidden_size; a llama model must state it"),
        ({"vocab_size": None}, "config.json: no vocab_size; a llama model must state it"),
        ({"hidden_size": "32"}, "hidden_size is '32'; it must be an integer from 1 to 1,000,000"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'; it must be an integer"),
        ({"intermediate_size": 2.5}, "intermediate_size is 2.5; it must be an integer"),
        ({"vocab_size": True}, "config.json: vocab_size is True; it must be an integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be an integer"),
        ({"num_attention_heads": 3}, "hidden size (32) is not a multiple of the number of att"),
        ({"num_hidden_layers": -1}, "config.json: num_hidden_layers is -1; it must be an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be an int"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 10000000000000000000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a number above 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number above 0"),
        ({"rms_norm_eps": None}, "'rms_norm_eps' expected float, got NoneType"),
        ({"initializer_range": float("inf")}, "initializer_range is inf; it must be a number"),
        ({"hidden_size": 10**6, "intermediate_size": 10**7}, "which is more than any model has"),
        ({"head_dim": -4}, "config.json: head_dim is -4; it must be an integer from 1"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true"),
        ({"pad_token_id": 37}, "config.json: pad_token_id 37 is not below vocab_size 37"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is [1, '2']; it must be a token id or a list"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; it must be one of float32, flo"),
        ({"torch_dtype": 3}, "torch_dtype is 3; it must be one of float32, float16, bfloat16"),
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantised, which is"),
        ({"transformers_weights": "x.safetensors"}, "transformers_weights names another file"),
        ({"rope_parameters": [1]}, "config.json: rope_parameters is [1]; it must be an object"),
        ({"rope_theta": 0}, "config.json: rope_theta is 0; it must be a number above 0"),
        (_rope("linear", factor="8"), "config.json: rope_parameters.factor is '8'; it must be a n"),
        (_rope("dynamic", factor=2.0), "rope type 'dynamic' is not supported"),
        ({"num_key_value_heads": 3}, "config.json: 8 attention heads are not divisible by 3 KV h"),
        ({"hidden_act": "gelu"}, "config.json has hidden_act='gelu'; only silu is supported"),
        (_rope("dynamic", rope_theta=1e4, factor=2.0), "its frequencies depend on the length"),
        (_rope("yarn", rope_theta=1e4), "factor"),
        (
            _rope("linear", rope_theta=1e4, factor=2.0, partial_rotary_factor=0.5),
            "config.json has partial_rotary_factor=0.5, which this family of transformers has no",
        ),
        (_rope("default", rope_theta="x"), "rope_parameters.rope_theta is 'x'; it must be a numb"),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _write(tmp_path, **changes)
    refusal = _refusal(tmp_path)
    assert refusal.startswith(str(tmp_path)) and message in refusal
    assert "\n" not in refusal


def test_a_key_that_a_family_misses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_config(config: dict[str, Any], head: str) -> Any:
        return config["num_experts"]

    monkeypatch.setitem(FAMILIES, "llama", replace(LLAMA, read_config=read_config))
    _write(tmp_path)
    assert _refusal(tmp_path) == f"{tmp_path / 'config.json'}: no num_experts"


@pytest.mark.parametrize("model_type", ["llama", "unheard-of"])
def test_code_beside_the_file_is_never_run(model_type: str, tmp_path: Path) -> None:
    _write(tmp_path, model_type=model_type, auto_map={"AutoConfig": "theirs.Config"})
    (tmp_path / "theirs.py").write_text("raise SystemExit('ran')\n")
    if model_type == "llama":
        assert load_spec(tmp_path, "lm") == tiny_spec("llama")
    else:
        assert "model_type 'unheard-of' is not supported" in _refusal(tmp_path)


def test_reading_needs_no_megatron() -> None:
    program = "import sys, mrlhf.models.families; assert 'megatron.core' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families_are_those_of_transformers(model_type: str) -> None:
    family = FAMILIES[model_type]
    assert family.model_type == model_type
    for auto, head in (
        (transformers.AutoModelForCausalLM, "lm"),
        (transformers.AutoModelForSequenceClassification, "scalar"),
    ):
        if model_type in WITHOUT_CLASSIFIER and head == "scalar":
            continue  # transformers has none; see below
        classes = auto._model_mapping[type(transformers.AutoConfig.for_model(model_type))]
        assert classes.__name__ == family.class_name(head)


@pytest.mark.parametrize("head", ["lm", "scalar"])
@pytest.mark.parametrize("model", (*MODELS, *MIXTURES))
def test_parameters_hold_every_tensor_once(model: str, head: Any) -> None:
    if head == "scalar" and model in WITHOUT_CLASSIFIER:
        pytest.skip("transformers has no such class")
    spec = tiny_spec(model, head)
    family = family_of(spec)
    experts = range(4 if model in MIXTURES else 0)
    whole = Chunk(range(spec.num_layers), is_first=True, is_last=True, experts=experts)

    held: list[str] = []
    rules = family.rules_of(spec, whole)
    for name in family.parameter_names(spec, whole):
        held += dict.fromkeys(rules[name].names)
    if spec.delta is None:
        assert len(held) == len(set(held))
    assert set(held) == set(family.tensor_shapes(spec))


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (
            "smollm3",
            {"no_rope_layers": [1, 0], "layer_types": ["full_attention"] * 4},
            "has 2 no_rope_layers and num_hidden_layers=4",
        ),
        (
            "smollm3",
            {"layer_types": ["full_attention"] * 3 + ["sliding_attention"], "sliding_window": 8},
            "layers of sliding_attention and use_sliding_window=false",
        ),
        ("ministral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        (
            "ministral",
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": None},
            "has layers of sliding_attention and no sliding_window",
        ),
        (
            "ministral",
            {"layer_types": ["chunked_attention"] * 4},
            "layer_types with 'chunked_attention'; only full_attention and sliding_attention",
        ),
        ("mistral", {"layer_types": ["chunked_attention"] * 4}, "with 'chunked_attention'; only"),
        ("olmo2", {"attention_bias": True, "pad_token_id": None}, "biases in an OLMo model are"),
        (
            "olmo3",
            {"pad_token_id": None, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope type 'dynamic' is not supported",
        ),
        ("phi3", {"partial_rotary_factor": 0.3}, "which rotates 1 of 4 dimensions of a head"),
        ("phi3", LONGROPE, "rope type 'longrope' is not supported: its frequencies depend on the"),
        ("granite", {"logits_scaling": 0.0}, "has logits_scaling=0; it must not be 0"),
        (
            "gemma2",
            GEMMA | {"attn_logit_softcapping": 0.0},
            "has attn_logit_softcapping=0.0; it mu",
        ),
        (
            "gemma3_text",
            GEMMA | {"final_logit_softcapping": -1.0},
            "softcapping=-1.0; it must be above 0",
        ),
        ("gemma3_text", GEMMA | {"attn_logit_softcapping": 50.0}, "which transformers leaves out"),
        ("gemma3_text", GEMMA | {"attention_bias": True}, "sets attention_bias, which is not"),
        ("gemma3_text", GEMMA | {"hidden_activation": "relu"}, "only gelu_pytorch_tanh is"),
        ("gemma3_text", GEMMA | {"query_pre_attn_scalar": 0}, "it must be above 0"),
        ("gemma3_text", {}, "no query_pre_attn_scalar; a gemma3_text model must state it"),
    ],
)
def test_a_feature_that_a_family_cannot_have_is_refused(
    model: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stated: dict[str, Any] = {"model_type": model, "head_dim": 4, "pad_token_id": None}
    stated |= {key: getattr(tiny_config("llama"), key) for key in SIZES}
    (tmp_path / "config.json").write_text(json.dumps({**stated, **changes}))
    refusal = _refusal(tmp_path)
    assert message in refusal and "\n" not in refusal


@pytest.mark.parametrize(
    ("model", "changes", "key"),
    [
        ("ministral", {}, "head_dim"),
        ("ministral", {"head_dim": None}, "head_dim"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "head_dim"),
        ("qwen2", {"head_dim": None}, "head_dim"),
        ("olmo2", {"head_dim": None, "pad_token_id": None}, "head_dim"),
        ("phi3", {}, "pad_token_id"),
    ],
)
def test_what_transformers_cannot_build_is_refused(
    model: str, changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    stated = {"model_type": model, **{key: getattr(tiny_config("llama"), key) for key in SIZES}}
    (tmp_path / "config.json").write_text(json.dumps({**stated, **changes}))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"), pytest.raises((TypeError, AssertionError)):
        transformers.AutoModelForCausalLM.from_config(config)

    refusal = _refusal(tmp_path)
    assert refusal.startswith(f"{tmp_path}: config.json states no {key}")
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (transformers.GraniteConfig(), "GraniteForSequenceClassification"),
        (tiny_config("glm4_moe"), "Glm4MoeForSequenceClassification"),
        (tiny_config("qwen3_5_moe_text"), "Qwen3_5MoeForSequenceClassification"),
    ],
)
def test_a_scalar_head_that_transformers_has_no_class_for_is_refused(
    config: transformers.PretrainedConfig, name: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"transformers has no {name}"):
        load_spec(tmp_path, "scalar")


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": LEFT_OUT}, "no num_local_experts; a mixtral model must"),
        ("mixtral", {"num_experts_per_tok": 5}, "has num_experts_per_tok=5 of 4 experts; a token"),
        ("mixtral", {"num_local_experts": 1}, "has num_local_experts=1; it must be an integer fro"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1, which is not support"),
        ("qwen3_moe", {"moe_intermediate_size": LEFT_OUT}, "no moe_intermediate_size; a qwen3_moe"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0; it must be an integer"),
        ("qwen3_moe", {"norm_topk_prob": "no"}, "norm_topk_prob is 'no'; it must be true or false"),
        ("glm4_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor=0.0; it must be a num"),
        ("glm4_moe", {"n_group": 3}, "has 3 groups of 4 experts, of which a token takes 1; the"),
        (
            "glm4_moe",
            {"n_group": 2, "topk_group": 3},
            "takes 3; the groups must divide the experts and be no fewer than those",
        ),
        ("glm4_moe", {"n_group": 4}, "has 4 groups of 1 experts, of which a token takes 1; a g"),
        ("deepseek_v3", {"attention_bias": True}, "sets attention_bias"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'; only 'noaux_tc'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'; only 'sigmoid'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2; only 1"),
        (
            "deepseek_v3",
            {"num_key_value_heads": 4},
            "num_key_value_heads=4 and num_attention_heads",
        ),
        ("deepseek_v3", {"v_head_dim": 8}, "v_head_dim=8, which may be at most"),
        ("deepseek_v3", {"qk_rope_head_dim": 3}, "qk_rope_head_dim=3, which must be even"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "only silu is supported"),
        ("deepseek_v3", {"kv_lora_rank": LEFT_OUT}, "no kv_lora_rank; a deepseek_v3 model must"),
        ("deepseek_v3", {"qk_nope_head_dim": LEFT_OUT}, "no qk_nope_head_dim; a deepseek_v3 model"),
        ("deepseek_v3", {"v_head_dim": LEFT_OUT}, "no v_head_dim; a deepseek_v3 model must state"),
        ("glm_moe_dsa", {"index_topk": LEFT_OUT}, "no index_topk; a glm_moe_dsa model must state"),
        ("glm_moe_dsa", {"index_n_heads": 0}, "index_n_heads=0; it must be an integer from 1"),
        ("glm_moe_dsa", {"index_head_dim": 1}, "index_head_dim=1; it must be at least the"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "interleave=False; only True is supp"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "must say full or shared of each of 4 lay"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 4}, "and full of the first"),
        ("qwen3_next", {"attention_bias": True}, "sets attention_bias, which is not supported"),
        ("qwen3_next", {"hidden_act": "gelu"}, "only silu is supported"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "layer_types linear_attention;"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "has layer_types sliding_atten"),
        ("qwen3_next", {"linear_num_value_heads": 6}, "linear_num_value_heads=6, which must be a "),
        (
            "qwen3_next",
            {"linear_conv_kernel_dim": 1},
            "linear_conv_kernel_dim=1; it must be an int",
        ),
        ("qwen3_next", {"linear_num_key_heads": LEFT_OUT}, "no linear_num_key_heads; a qwen3_next"),
        ("qwen3_next", {"linear_conv_kernel_dim": LEFT_OUT}, "no linear_conv_kernel_dim; a qwen3_"),
        ("qwen3_next", {"head_dim": LEFT_OUT}, "no head_dim; a qwen3_next model must state it"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "has swiglu_limit=0.0; it must be a number above 0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config says"),
        (
            "gpt_oss",
            {"num_local_experts": 1},
            "has num_local_experts=1; it must be an integer from",
        ),
        ("gpt_oss", {"sliding_window": None}, "no sliding_window; a gpt_oss model must state it"),
        ("gpt_oss", {"hidden_act": "gelu"}, "only silu is supported"),
    ],
)
def test_what_a_family_of_mixtures_does_not_build_is_refused(
    model: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _write(tmp_path, model, **changes)
    refusal = _refusal(tmp_path)
    assert message in refusal and "\n" not in refusal


def test_which_layers_are_mixtures(tmp_path: Path) -> None:
    def layers(model: str, **changes: Any) -> tuple[bool, ...]:
        _write(tmp_path, model, **changes)
        experts = load_spec(tmp_path, "lm").experts
        assert experts is not None
        return experts.layers

    assert layers("qwen3_moe", mlp_only_layers=[2]) == (True, True, False, True)
    assert layers("qwen2_moe", decoder_sparse_step=2) == (False, True, False, True)
    assert layers("glm4_moe", first_k_dense_replace=3) == (False, False, False, True)
    assert layers("mixtral") == (True,) * 4
    _write(tmp_path, "qwen3_moe", mlp_only_layers=[0, 1, 2, 3])
    assert load_spec(tmp_path, "lm").experts is None


def test_indexers_are_whole_and_have_no_adapters() -> None:
    spec = tiny_spec("glm_moe_dsa")
    family = family_of(spec)
    own = [name for name in family.tensor_shapes(spec) if ".indexer." in name]
    assert len(own) == 3 * 5  # the third layer takes the choice of the second
    fixed = [name for name in family.tensor_shapes(spec) if name.endswith("correction_bias")]
    trained, every = parameter_counts(spec)
    shapes = family.tensor_shapes(spec)
    assert every - trained == sum(math.prod(shapes[name]) for name in (*own, *fixed))
    layers = family.linear_layers(spec)
    assert any(name.endswith(".q_b_proj") for name in layers)
    assert not any(".indexer." in name for name in layers)


def test_the_layers_of_a_draft_model_are_passed_over() -> None:
    spec = tiny_spec("glm4_moe")
    assert family_of(spec).ignored_prefixes(spec) == ("model.layers.4.",)


def test_the_published_gemma_3_of_a_billion_parameters(tmp_path: Path) -> None:
    stated = {
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "vocab_size": 262144,
    }
    (tmp_path / "config.json").write_text(json.dumps(stated))
    spec = load_spec(tmp_path, "lm")
    shapes = family_of(spec).tensor_shapes(spec)
    assert sum(math.prod(shape) for shape in shapes.values()) == 999_885_952
    assert spec.windows[:7] == (512, 512, 512, 512, 512, None, 512)
    assert spec.attention_scale == 1 / 16
    assert spec.embedding_scale(torch.bfloat16) == 34.0  # of 33.94
    bases = {kind: rope_of(spec, kind).frequencies[1] for kind in ("full_attention", SLIDING)}
    wanted = {"full_attention": 1e6 ** (-1 / 128), SLIDING: 1e4 ** (-1 / 128)}
    assert bases == pytest.approx(wanted)


@pytest.mark.parametrize("name", FEATURE_MODELS)
def test_an_exported_config_describes_the_same_model(name: str, tmp_path: Path) -> None:
    spec = spec_of(hf_model(name))
    save_config(spec, tmp_path, torch.float32)
    assert load_spec(tmp_path, "lm") == spec


def test_a_scalar_model_is_exported_as_a_classifier(tmp_path: Path) -> None:
    spec = tiny_spec("qwen2", "scalar")
    spec = replace(spec, hf_config={**spec.hf_config, "pad_token_id": 5})
    save_config(spec, tmp_path, torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert config["dtype"] == "bfloat16" and config["pad_token_id"] == 5
    assert len(config["id2label"]) == 1


def test_a_family_is_asked_for_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new family needs no change elsewhere: here one whose models are an embedding alone."""
    spec = replace(tiny_spec("llama"), family="embedding")
    embedding = replace(
        LLAMA,
        model_type="embedding",
        base_shapes=lambda spec: {"rows": (spec.vocab_size, spec.hidden_size)},
        base_rules=lambda spec, chunk: dict.fromkeys(
            ["embedding.weight"] if chunk.is_first else [], Rule(("rows",), dim=0)
        ),
    )
    monkeypatch.setitem(FAMILIES, "embedding", embedding)

    layout = ParallelLayout(tp=2, pp=2, dp=1)
    pieces = [role_pieces(spec, layout, rank) for rank in range(4)]
    assert [[(p.name, p.start, p.stop) for p in held] for held in pieces] == [
        [("rows", 0, 19)],
        [("rows", 19, 37)],
        [],
        [],
    ]
