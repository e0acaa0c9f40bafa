"""Indexers of GLM-5 and DeepSeek-V3.2 as Megatron-LM's command line has them, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import DeepseekV32Config, GlmMoeDsaConfig

from mrlhf.checkpoint.conversion.megatron_arguments import (
    arguments_of,
    command_line,
    config_of,
    differences,
)
from mrlhf.errors import CheckpointError
from mrlhf.models.families import spec_of
from mrlhf.models.spec import ModelSpec


def _glm_5(**changes: Any) -> ModelSpec:
    return spec_of(GlmMoeDsaConfig(**changes).to_dict(), "lm")


def _arguments(spec: ModelSpec, **changes: Any) -> dict[str, Any]:
    return {**arguments_of(spec, vocab_divisible_by=128), **changes}


def test_the_options_of_glm_5_and_of_deepseek_v3_2() -> None:
    options = command_line(_arguments(_glm_5(index_topk_freq=4))).splitlines()
    for option in (
        "--experimental-attention-variant dsa",
        "--dsa-indexer-n-heads 32",
        "--dsa-indexer-head-dim 128",
        "--dsa-indexer-topk 2048",
        "--dsa-indexer-topk-freq 4",
        "--dsa-indexer-skip-topk-offset 2",
        "--dsa-indexer-k-norm-epsilon 1e-06",  # all other norms have 1e-5
        "--dsa-indexer-rope-interleaved",
        "--no-dsa-indexer-rotate-activation",
        "--no-rope-fusion",
        "--multi-latent-attention",
    ):
        assert option in options

    plain = spec_of(DeepseekV32Config().to_dict(), "lm")
    options = command_line(_arguments(plain)).splitlines()
    assert "--dsa-indexer-n-heads 64" in options and "--dsa-indexer-topk-freq 1" in options
    assert "--dsa-indexer-rope-interleaved" not in options


@pytest.mark.parametrize(("frequency", "offset"), [(1, 2), (2, 1), (4, 2), (4, 3), (3, 5), (78, 1)])
def test_layers_share_as_in_transformers(frequency: int, offset: int) -> None:
    spec = _glm_5(index_topk_freq=frequency, index_skip_topk_offset=offset)
    arguments = _arguments(spec)
    stated = (arguments["dsa_indexer_topk_freq"], arguments["dsa_indexer_skip_topk_offset"])
    assert stated == ((1, 0) if frequency == 1 else (frequency, offset))

    # Megatron-LM's other numbers of the same layers contradict nothing.
    assert differences(spec, arguments) == []
    if frequency == 1:
        assert differences(spec, {**arguments, "dsa_indexer_skip_topk_offset": 7}) == []
    config = config_of(arguments, 154880, None)
    assert config["model_type"] == "glm_moe_dsa"
    assert (
        config["indexer_types"]
        == GlmMoeDsaConfig(index_topk_freq=frequency, index_skip_topk_offset=offset).indexer_types
    )
    back = spec_of(GlmMoeDsaConfig(**config).to_dict(), "lm")
    assert (back.latent, back.experts) == (spec.latent, spec.experts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experimental_attention_variant": "gated_delta_net"}, "experimental_attention_variant i"),
        ({"dsa_indexer_topk": 1024}, "dsa_indexer_topk is 1024 in the checkpoint and 2048 there"),
        ({"dsa_indexer_n_heads": 64}, "dsa_indexer_n_heads is 64 in the checkpoint and 32 there"),
        ({"dsa_indexer_head_dim": 64}, "dsa_indexer_head_dim is 64 in the checkpoint and 128 th"),
        ({"dsa_indexer_rope_interleaved": False}, "dsa_indexer_rope_interleaved is False in the"),
        ({"dsa_indexer_scoring_relu": False}, "dsa_indexer_scoring_relu is False in the checkpo"),
        ({"dsa_indexer_topk_freq": 2}, "dsa_indexer_topk_freq and dsa_indexer_skip_topk_offset g"),
        ({"dsa_indexer_skip_topk_offset": 3}, "dsa_indexer_topk_freq and dsa_indexer_skip_topk_o"),
    ],
)
def test_a_contradicting_argument_is_told(changes: dict[str, Any], message: str) -> None:
    spec = _glm_5(index_topk_freq=4)
    (found,) = differences(spec, _arguments(spec, **changes))
    assert found.startswith(message)


def test_a_model_without_indexers_is_none_with_them() -> None:
    arguments = _arguments(_glm_5())
    other = spec_of(config_of({**arguments, "experimental_attention_variant": None}, 9, None), "lm")
    assert other.family == "deepseek_v3" and other.indexer_of(0) is None
    assert differences(other, arguments) == [
        "experimental_attention_variant is 'dsa' in the checkpoint and None there"
    ]
    with pytest.raises(CheckpointError, match="no indexers, and so is no glm_moe_dsa model"):
        config_of({**arguments, "experimental_attention_variant": None}, 9, "glm_moe_dsa")


def test_indexers_of_older_versions_are_refused() -> None:
    """They state no kind of rotation, take latents before their norm and rotate other parts."""
    spec = _glm_5()
    older = _arguments(spec)
    del older["dsa_indexer_rope_interleaved"]
    with pytest.raises(CheckpointError, match=r"of megatron-core before 0\.19"):
        differences(spec, older)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        (
            {"indexer_types": ["full", "shared", "full", "full"] + ["shared"] * 74},
            "[0, 2, 3] of 78",
        ),
        (
            {"num_hidden_layers": 3, "mlp_layer_types": ["sparse"] * 3, "index_topk_freq": 2},
            "[0, 1] of 3",
        ),
    ],
)
def test_layers_that_megatron_cannot_have_are_refused(changes: dict[str, Any], layers: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        arguments_of(_glm_5(**changes), vocab_divisible_by=1)
    assert f"the layers {layers} have indexers" in str(refusal.value)
    assert "keep it as a Hugging Face model" in str(refusal.value)
    assert "\n" not in str(refusal.value)
