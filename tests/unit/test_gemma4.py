"""Gemma 4: files of models that also read images, the published sizes, and refusals.

That training and the engine compute what transformers does, and that files go to any layout and
back, is tested with the other families.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from mrlhf.checkpoint.conversion.megatron_arguments import arguments_of
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.inference.sizes import CacheShape
from mrlhf.inference.vllm.pieces import unsupported_feature
from mrlhf.models.families import family_of, load_spec
from mrlhf.models.flops import forward_flops
from mrlhf.models.freezing import check_frozen_tensors, with_frozen
from mrlhf.models.parallel_sizes import pp_problem, tp_problem
from mrlhf.models.parameters import role_pieces
from mrlhf.models.rope import rope_of
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.parallel.stages import Stages
from mrlhf.preflight.model_checks import CacheNeeds
from mrlhf.weights.init import initialise
from tests.models.engines import hf_model, spec_of
from tests.models.published_files import FILES
from tests.models.wrappers import ENDS, TOKENS, assert_taken_out
from tests.shards import make_slots, stored, tensor_shapes, tiny_config, tiny_spec

EYES = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
SLIDING, FULL = "sliding_attention", "full_attention"
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def _write(directory: Path, published: str = "gemma-4-31B", **changes: Any) -> None:
    """The published `config.json` with other keys of `text_config`; None leaves one out."""
    text = FILES[published]["text_config"] | changes
    text = {key: value for key, value in text.items() if value is not None}
    stated = FILES[published] | {"text_config": text}
    (directory / "config.json").write_text(json.dumps(stated))


@pytest.mark.parametrize("model", ["gemma4_text", "gemma4_moe", "gemma4_text_linked"])
def test_the_language_model_is_taken_out_of_one_that_reads_images(
    model: str, tmp_path: Path
) -> None:
    text = tiny_config(model).to_dict() | {"eos_token_id": ENDS}
    torch.manual_seed(3)
    config = transformers.Gemma4Config(text_config=text, vision_config=EYES)
    theirs = transformers.Gemma4ForConditionalGeneration(config).eval()
    for name, buffer in theirs.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.2 * torch.randn_like(buffer))
    for name, parameter in theirs.named_parameters():
        if ".router." in name:  # beside the ones of which its vectors are made
            parameter.data += 0.2 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "images")
    file = tmp_path / "images" / "model.safetensors"
    tensors = load_file(file)
    others = sum(not name.startswith("model.language_model.") for name in tensors)
    with torch.no_grad():
        wanted = theirs(TOKENS).logits

    spec = tiny_spec(model)
    if spec.key_layers:  # published files hold what layers that borrow keys would have
        for part in ("k_proj", "v_proj", "k_norm"):
            name = f"model.language_model.layers.2.self_attn.{part}.weight"
            assert name not in tensors
            tensors[name] = torch.zeros(5)
            others += 1
        save_file(tensors, file, {"format": "pt"})
    assert_taken_out(tmp_path, spec, others, transformers.Gemma4ForCausalLM, wanted)


def test_the_published_sizes(tmp_path: Path) -> None:
    _write(tmp_path)
    spec = load_spec(tmp_path, "lm")
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(
            transformers.AutoConfig.from_pretrained(tmp_path).text_config
        )
    # Each layer has a number more, which is no parameter there.
    assert sum(map(math.prod, family_of(spec).tensor_shapes(spec).values())) == 60 + sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert spec.windows == (*[1024] * 5, None) * 10
    assert spec.attention_scale == 1.0 and spec.logits_cap == 30.0 and spec.output_is_embedding
    heads = [(kind.num_kv_heads, kind.head_dim, kind.rotary_dim) for kind in spec.head_kinds]
    assert heads == [(16, 256, 256), (4, 512, 512)]
    shape = CacheShape.on_rank(spec, 8, 2, 64)  # two ranks share a KV head of the second kind
    assert shape.token_bytes == 2 * 2 * (50 * 2 * 256 + 10 * 512)
    assert str(CacheNeeds(shape, 64, 1)).startswith(
        "2 x (50 layers x 2 KV heads x 256 + 10 layers x 1 KV heads x 512) x 2 bytes x 64 tokens"
    )
    assert tp_problem("tp", 8, spec) is None
    assert tp_problem("tp", 3, spec) is not None


def test_the_published_sizes_with_experts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FILES["gemma-4-26B-A4B"]))
    spec = load_spec(tmp_path, "lm")
    with torch.device("meta"):
        text = transformers.AutoConfig.from_pretrained(tmp_path).text_config
        model = transformers.Gemma4ForCausalLM(text)
    theirs = sum(parameter.numel() for parameter in model.parameters())
    assert sum(map(math.prod, family_of(spec).tensor_shapes(spec).values())) == 30 + theirs
    # Of each token, with the 8 experts of 128 that it goes to and the output layer.
    assert forward_flops(spec, 1, 1) // 2 == pytest.approx(3.8e9, rel=0.01)
    assert [(kind.num_kv_heads, kind.head_dim) for kind in spec.head_kinds] == [(8, 256), (2, 512)]
    assert unsupported_feature(spec) is None
    with pytest.raises(CheckpointError, match="a gemma4_text model with norms after attention"):
        arguments_of(spec, vocab_divisible_by=1)


@pytest.mark.parametrize(
    ("name", "own", "heads", "widths"),
    [
        ("gemma-4-E2B", 15, [(1, 256), (1, 512)], {6144: 15, 12288: 20}),
        ("gemma-4-E4B", 24, [(2, 256), (2, 512)], {10240: 42}),
    ],
)
def test_the_published_sizes_of_those_with_linked_layers(
    name: str, own: int, heads: list[tuple[int, int]], widths: dict[int, int], tmp_path: Path
) -> None:
    _write(tmp_path, name)
    spec = load_spec(tmp_path, "lm")
    with torch.device("meta"):
        model = transformers.Gemma4ForCausalLM(
            transformers.AutoConfig.from_pretrained(tmp_path).text_config
        )
    theirs = {key: (*tensor.shape,) for key, tensor in model.state_dict().items()}
    del theirs["lm_head.weight"]  # the embedding
    assert family_of(spec).tensor_shapes(spec) == theirs
    layers = range(spec.num_layers)
    assert Counter(spec.of_layer(layer).ffn_size for layer in layers) == widths
    assert [(kind.num_kv_heads, kind.head_dim) for kind in spec.head_kinds] == heads

    # The last ones of each kind that have keys of their own lend them.
    assert spec.key_layers[:own] == (*range(own),)
    lenders = [own - 1 if window is None else own - 2 for window in spec.windows[own:]]
    assert [*spec.key_layers[own:]] == lenders
    shape = CacheShape.on_rank(spec, 1, 2, 64)
    assert len(shape.heads) == own and shape.reads == spec.key_layers
    assert len(set(map(id, shape.in_order([[] for _ in shape.heads], [])))) == own
    assert pp_problem("actor", Stages(pp=2), spec) == (
        "actor.pp 2 does not fit a model whose layers take inputs of their own, or keys and values "
        "of others; set actor.pp=1"
    )


def test_ties_are_those_of_transformers_if_nothing_says_so(tmp_path: Path) -> None:
    _write(tmp_path, tie_word_embeddings=None)
    stated = json.loads((tmp_path / "config.json").read_text())
    del stated["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert load_spec(tmp_path, "lm").tied_embeddings


@pytest.mark.parametrize(
    "full", [PLAIN, {"rope_type": "proportional", "rope_theta": 777.0, "factor": 2.0}]
)
def test_rotations_equal_transformers(full: dict[str, Any], tmp_path: Path) -> None:
    values = tiny_config("gemma4_text").to_dict()
    values["rope_parameters"] = {SLIDING: PLAIN | {"rope_theta": 99.0}, FULL: full}
    config = transformers.Gemma4TextConfig(**values)
    config.save_pretrained(tmp_path)
    spec = load_spec(tmp_path, "lm")
    theirs = Gemma4TextRotaryEmbedding(config)
    for kind in (SLIDING, FULL):
        frequencies, scale = rope_of(spec, kind)
        assert torch.equal(frequencies, getattr(theirs, f"{kind}_inv_freq")) and scale == 1.0


def test_a_layers_number_alone_is_nothing_to_train() -> None:
    spec = with_frozen(spec_of(hf_model("gemma4")), ["model.embed*", "*.weight"])
    with pytest.raises(ConfigError, match="freeze leaves nothing to train"):
        check_frozen_tensors(spec)


def test_random_weights_are_ones_where_those_of_transformers_are() -> None:
    spec = tiny_spec("gemma4_moe")
    slots = make_slots(role_pieces(spec, ParallelLayout(tp=1, pp=1, dp=1), 0))
    initialise(slots, tensor_shapes(spec), seed=5)
    theirs = transformers.Gemma4ForCausalLM(tiny_config("gemma4_moe")).state_dict()
    ones = {name for name, tensor in theirs.items() if bool(tensor.eq(1).all())}
    assert len(ones) == 1 + 4 * (1 + 4 + 2 + 3 + 2)  # norms, heads' norms, factors of layers, …
    assert ones == {slot.piece.name for slot in slots if bool(stored(slot).eq(1).all())}


HEADS = {"head_dim": 512, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "has num_experts=None; it must be an integer from 2 to"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
            "has top_k_experts=5; it must be an integer from 1 to 4",
        ),
        (
            {"enable_moe_block": True, "num_kv_shared_layers": 20},
            "experts are not supported in such a Gemma 4: use E2B",
        ),
        (
            {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 9},
            "the other vocab_size 262144",
        ),
        ({"num_kv_shared_layers": 60}, "num_kv_shared_layers=60: of 60 layers, those before must"),
        ({"num_kv_shared_layers": 55}, "be of each kind in layer_types; lower it"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1: of 60 layers, those before must"),
        ({"use_bidirectional_attention": "all"}, "sets use_bidirectional_attention, which is not"),
        ({"attention_bias": True}, "sets attention_bias, which is not supported in a Gemma"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu'; only gelu_pytorch_tanh"),
        ({"global_head_dim": None}, "no global_head_dim or per_layer_config; a gemma4_text model"),
        ({"num_global_key_value_heads": 3}, "32 attention heads are not divisible by the 3 KV"),
        ({"global_head_dim": 509}, "rotates 127 of 509 dimensions of a head; the number must be"),
        ({"per_layer_config": {"4": HEADS}}, "a per_layer_config with others than head_dim and"),
        ({"per_layer_config": {"5": HEADS}}, "alike in all layers of full_attention, and in no"),
        (
            {
                "rope_parameters": {
                    SLIDING: PLAIN,
                    FULL: {**PLAIN, "rope_type": "linear", "factor": 2.0},
                }
            },
            "rope type 'linear' is not supported in layers of full_attention of a Gemma 4; use",
        ),
        (
            {"rope_parameters": {SLIDING: PLAIN, FULL: {**PLAIN, "partial_rotary_factor": 2}}},
            "partial_rotary_factor=2; it must be above 0 and at most 1",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _write(tmp_path, **changes)
    with pytest.raises(ConfigError) as refused:
        load_spec(tmp_path, "lm")
    assert message in str(refused.value) and "\n" not in str(refused.value)
