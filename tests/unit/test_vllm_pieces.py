"""What vLLM's ranks hold, against full tensors cut with torch's chunk and cat; needs no vLLM."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.inference.vllm.pieces import (
    parameter_pieces,
    parameter_shapes,
    repeated_rows,
    stack_of,
    unsupported_feature,
    unsupported_on_cpu,
    vllm_pieces,
)
from mrlhf.models.parameters import role_pieces
from mrlhf.models.spec import ClampedSwish, ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.reshard.plan import Planner, ReshardPlan
from mrlhf.reshard.sides import sides_around
from mrlhf.weights.shard import Piece, Shape, Slot
from tests.models.engines import hf_model, spec_of, tensors_of
from tests.models.features import FEATURE_MODELS
from tests.plans import check_agreement
from tests.shards import full_tensors, tiny_spec

MODELS = ("llama", "llama_tied", "qwen2", "qwen2_tied", "qwen3")
GEMMAS = {"gemma2", "gemma3", "gemma4"}
WITH_EXPERTS = ("qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe")


def _cut(spec: ModelSpec, full: dict[str, Tensor], rank: int, tp: int) -> dict[str, Tensor]:
    """The parameters of one rank as vLLM has them.

    The tiny models have a vocabulary of 37.
    """

    def rows(name: str) -> Tensor:
        return full[name].chunk(tp)[rank]

    def shared(name: str) -> Tensor:
        heads = spec.num_kv_heads
        return full[name].chunk(heads)[rank * heads // tp] if tp > heads else rows(name)

    held = _cut_mlps(full, rank, tp)
    padded = torch.zeros(64, spec.hidden_size)
    padded[:37] = full["model.embed_tokens.weight"]
    held["model.embed_tokens.weight"] = padded.chunk(tp)[rank]
    for layer in range(4):
        attention = f"model.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            q, k, v = (f"{attention}{name}_proj.{kind}" for name in "qkv")
            if q in full:
                held[f"{attention}qkv_proj.{kind}"] = torch.cat([rows(q), shared(k), shared(v)])
        held[attention + "o_proj.weight"] = full[attention + "o_proj.weight"].chunk(tp, dim=1)[rank]
    held |= {name: tensor for name, tensor in full.items() if name.endswith("norm.weight")}
    if "lm_head.weight" in full:
        padded = torch.zeros(64, spec.hidden_size)
        padded[:37] = full["lm_head.weight"]
        held["lm_head.weight"] = padded.chunk(tp)[rank]
    return held


def _cut_mlps(full: dict[str, Tensor], rank: int, tp: int) -> dict[str, Tensor]:
    """Dense MLPs, shared experts, experts and routers, by what the names end with."""
    held = {}
    for name, tensor in full.items():
        prefix, _, last = name.removesuffix(".weight").rpartition(".")
        if last in ("gate", "shared_expert_gate", "e_score_correction_bias"):
            held[name] = tensor
        if last not in ("down_proj", "w2") or "self_attn" in name:
            continue
        gate, up = ("gate_proj", "up_proj") if last == "down_proj" else ("w1", "w3")
        parts = (full[f"{prefix}.{part}.weight"].chunk(tp)[rank] for part in (gate, up))
        gate_up = torch.cat(list(parts))
        down = tensor.chunk(tp, dim=1)[rank]

        mixture, is_expert, number = prefix.partition(".experts.")
        if is_expert:
            held[f"{mixture}.experts.routed_experts.w13_weight.{number}"] = gate_up
            held[f"{mixture}.experts.routed_experts.w2_weight.{number}"] = down
        else:
            held[prefix + ".gate_up_proj.weight"] = gate_up
            held[name] = down
    return held


SIZES = [*itertools.product(MODELS, [1, 2, 4, 8]), *itertools.product(WITH_EXPERTS, [1, 2, 4])]


@pytest.mark.parametrize(("model", "tp"), SIZES)
def test_each_rank_holds_what_vllm_expects(model: str, tp: int) -> None:
    spec = tiny_spec(model)
    full = full_tensors(spec)
    shapes = parameter_shapes(spec, tp)
    for rank in range(tp):
        expected = _cut(spec, full, rank, tp)
        assert {name: tuple(tensor.shape) for name, tensor in expected.items()} == shapes
        for name, pieces in parameter_pieces(spec, rank, tp).items():
            parameter = torch.zeros(shapes[name])
            for piece in pieces:
                part = full[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)
                view = Slot(piece, parameter).view(piece.start, piece.stop)
                view.copy_(part.reshape(view.shape))
            assert torch.equal(parameter, expected[name]), (name, rank)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_each_rank_of_gpt_oss_holds_what_vllm_expects(tp: int) -> None:
    """Rows of gate and up alternate, and the bias of an expert's output is the first rank's."""
    spec = tiny_spec("gpt_oss")
    full = full_tensors(spec)
    theirs = "model.layers.2.mlp.experts.routed_experts."
    ours = "model.layers.2.mlp.experts.1."
    attention = "model.layers.2.self_attn."
    for rank in range(tp):
        pieces = parameter_pieces(spec, rank, tp)
        for name, expected in {
            f"{theirs}w13_weight.1": full[f"{ours}gate_up_proj"].chunk(tp)[rank],
            f"{theirs}w13_bias.1": full[f"{ours}gate_up_proj_bias"].chunk(tp)[rank],
            f"{theirs}w2_weight.1": full[f"{ours}down_proj"].chunk(tp, dim=1)[rank],
            "model.layers.2.attn.sinks": full[attention + "sinks"].chunk(tp)[rank],
            "model.layers.2.attn.o_proj.bias": full[attention + "o_proj.bias"],
            "model.layers.2.mlp.router.bias": full["model.layers.2.mlp.router.bias"],
        }.items():
            (piece,) = pieces[name]
            part = full[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)
            assert torch.equal(part, expected), name
            assert parameter_shapes(spec, tp)[name] == tuple(expected.shape)
        assert len(pieces[f"{theirs}w2_bias.1"]) == (rank == 0)
        assert "model.embedding.weight" in pieces and not any("self_attn" in n for n in pieces)


def _stored(pieces: Sequence[Piece], full: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """The parameter of which each piece is stored, and the rest is 0."""
    parameter = torch.zeros(shape)
    for piece in pieces:
        part = full[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start)
        Slot(piece, parameter).store(part)
    return parameter


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_values_that_are_keys_are_rows_without_a_piece(tp: int) -> None:
    """Layers of a Gemma 4 without a window have other heads, and no v_proj."""
    model = hf_model("gemma4")
    spec = spec_of(model)
    full = tensors_of(model)
    windowed, whole = ("model.layers.0.", "model.layers.1.")
    name = whole + "self_attn.qkv_proj.weight"
    for rank in range(tp):
        pieces = parameter_pieces(spec, rank, tp)
        parameter = _stored(pieces[name], full, parameter_shapes(spec, tp)[name])
        queries = full[whole + "self_attn.q_proj.weight"].chunk(tp)[rank]
        keys = full[whole + "self_attn.k_proj.weight"]  # of the only KV head
        assert torch.equal(parameter, torch.cat([queries, keys, torch.zeros_like(keys)]))
        assert repeated_rows(pieces[name]) == len(keys) == 24

        assert len(pieces[windowed + "self_attn.qkv_proj.weight"]) == 3
        assert repeated_rows(pieces[windowed + "self_attn.qkv_proj.weight"]) == 0
        assert repeated_rows(pieces["model.embed_tokens.weight"]) == 0
        assert pieces[whole + "layer_scalar"][0].full_shape == (1,)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gate_and_up_rows_of_one_tensor_are_cut_apart(tp: int) -> None:
    """Each expert of a Gemma 4 has both in one tensor, and its mixture has norms of its own."""
    spec = tiny_spec("gemma4_moe")
    full = full_tensors(spec)
    name = "model.layers.2.experts.routed_experts.w13_weight.1"
    gate, up = full["model.layers.2.experts.1.gate_up_proj"].chunk(2)
    for rank in range(tp):
        pieces = parameter_pieces(spec, rank, tp)
        parameter = _stored(pieces[name], full, parameter_shapes(spec, tp)[name])
        assert torch.equal(parameter, torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]]))
        held = {piece.name for some in pieces.values() for piece in some}
        assert held | {"model.embed_tokens.weight"} == full.keys()  # one rank has padding of it


def test_padding_alone_is_no_piece() -> None:
    """Of 64 rows for 37 tokens, the last of four ranks has padding alone."""
    pieces = parameter_pieces(tiny_spec("llama"), 3, 4)
    assert pieces["model.embed_tokens.weight"] == pieces["lm_head.weight"] == ()
    (third,) = parameter_pieces(tiny_spec("llama"), 2, 4)["lm_head.weight"]
    assert (third.start, third.stop, third.block, third.period) == (32, 37, 5, 16)


@pytest.mark.parametrize("engine_tp", [1, 2, 4, 8])
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (2, 1), (1, 1), (4, 2)])
def test_plan_over_all_ranks_moves_no_more_than_it_must(tp: int, pp: int, engine_tp: int) -> None:
    """Replicas of consecutive ranks need not lie in one model-parallel group."""
    spec = tiny_spec("qwen2_tied")
    actor = ParallelLayout.for_world("actor", 8, AxisSizes(tp=tp, pp=pp))
    engines = EngineLayout.consecutive(actor, engine_tp)

    plans: dict[int, ReshardPlan] = {}
    for rank in range(8):
        sides = sides_around(
            rank,
            engines,
            lambda rank: role_pieces(spec, actor, rank),
            lambda rank: vllm_pieces(spec, engines, rank),
        )
        plans[rank] = Planner(sides, itemsize=4).plan(rank)
        assert plans[rank].bytes_received == plans[rank].bytes_minimum

    check_agreement(plans)
    norms = {alias.parameter for alias in plans[0].aliases}
    assert "model.layers.0.input_layernorm.weight" in norms


def test_replicas_of_consecutive_ranks() -> None:
    actor = ParallelLayout(tp=1, pp=2, dp=2)  # model-parallel groups (0, 2) and (1, 3)
    assert EngineLayout.consecutive(actor, 2).replicas == ((0, 1), (2, 3))
    assert not EngineLayout.consecutive(actor, 2).is_inside
    assert EngineLayout.inside(actor, 2).replicas == ((0, 2), (1, 3))
    assert EngineLayout.inside(actor, 2).is_inside


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(WeightError) as refusal:
        parameter_pieces(tiny_spec("llama"), 0, 3)
    assert str(refusal.value) == (
        "vLLM: rollout.tp 3 does not fit the model's 8 attention heads and vocabulary 37 (vLLM "
        "pads it to 64 rows); use one of 1, 2, 4, 8"
    )


def test_each_expert_has_a_place_in_a_stack() -> None:
    name = "model.layers.0.mlp.experts.routed_experts.w2_weight"
    assert stack_of(f"{name}.12") == (name, 12)
    assert stack_of("model.layers.0.mlp.down_proj.weight") is None
    pieces = parameter_pieces(tiny_spec("glm4_moe"), 0, 2)
    last_layer = [
        name for name in pieces if name.startswith("model.layers.3.") and "w13_weight" in name
    ]
    assert [stack_of(name) for name in last_layer] == [
        ("model.layers.3.mlp.experts.routed_experts.w13_weight", number) for number in range(4)
    ]
    experts = {piece.name for own in pieces.values() for piece in own if piece.of_expert}
    assert len(experts) == 3 * 4 * 3 and all(".experts." in name for name in experts)


def test_experts_that_vllm_cannot_split_are_refused() -> None:
    spec = tiny_spec("mixtral")
    with pytest.raises(WeightError, match=r"4 experts \(vLLM needs as many as ranks\); use one of"):
        parameter_pieces(spec, 0, 8)
    narrow = replace(tiny_spec("qwen3_moe"), ffn_size=24)
    assert narrow.experts is not None
    narrow = replace(narrow, experts=replace(narrow.experts, ffn_size=10))
    with pytest.raises(WeightError, match=r"4 experts of width 10; use one of 1, 2$"):
        parameter_pieces(narrow, 0, 4)


def test_mixtures_with_other_features_are_refused() -> None:
    biased = replace(tiny_spec("qwen3_moe"), qkv_bias=True, o_bias=True)
    assert unsupported_feature(biased) == "biases on o_proj or the MLP"
    unbiased = replace(tiny_spec("qwen2_moe"), qkv_bias=False)
    assert unsupported_feature(unbiased) == "no biases on q, k and v"
    assert all(unsupported_feature(tiny_spec(name)) is None for name in WITH_EXPERTS)

    for name in WITH_EXPERTS:
        spec = replace(tiny_spec(name), head_dim=32)
        assert unsupported_on_cpu(spec, 1) is None
        assert unsupported_on_cpu(replace(spec, hidden_size=48), 1) == (
            "experts and hidden size 48, no multiple of 32, on a CPU"
        )
    dense = replace(tiny_spec("llama"), hidden_size=48, head_dim=32)
    assert unsupported_on_cpu(dense, 1) is None
    without = unsupported_on_cpu(replace(dense, head_dim=16), 1)
    assert without is not None and without.startswith("head_dim 16 on a CPU")


def test_another_gpt_oss_than_the_published_is_refused() -> None:
    spec = tiny_spec("gpt_oss")
    assert unsupported_feature(spec) is None
    assert spec.experts is not None
    gate = replace(spec.experts, activation=ClampedSwish(alpha=1.7, limit=7.0))
    rope = spec.hf_config["rope_parameters"]
    for other in (
        replace(spec, experts=gate),
        replace(spec, norm_eps=1e-6),
        replace(spec, windows=spec.windows[::-1]),
        replace(spec, tied_embeddings=True),
        replace(spec, hf_config={"rope_parameters": rope | {"rope_type": "linear"}}),
        replace(spec, hf_config={"rope_parameters": rope | {"attention_factor": 2.0}}),
    ):
        assert unsupported_feature(other) == "another form than the published gpt-oss"
    wide = replace(spec, head_dim=64, ffn_size=96)
    assert unsupported_on_cpu(wide, 1) is None
    parts = unsupported_on_cpu(wide, 2)
    assert parts is not None and parts.startswith("experts of width 96 on 2 ranks, whose parts")


@pytest.mark.parametrize("name", sorted({*FEATURE_MODELS} - GEMMAS))
def test_a_model_with_other_features_is_refused(name: str) -> None:
    _assert_refused(spec_of(hf_model(name)))


def test_a_gemma_that_vllm_would_compute_otherwise_is_refused() -> None:
    specs = {name: spec_of(hf_model(name)) for name in GEMMAS}
    assert all(unsupported_feature(spec) is None for spec in specs.values())
    _assert_refused(replace(specs["gemma2"], tied_embeddings=False))

    gemma4 = specs["gemma4"]
    heads = unsupported_on_cpu(replace(gemma4, head_dim=32), 1)
    assert heads is not None and heads.startswith("head_dim 24 on a CPU")


@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_a_share_of_heads_that_transformers_would_not_rotate_is_refused(name: str) -> None:
    spec = spec_of(hf_model(name))
    plain = {"rope_type": "default", "rope_theta": 5000.0}
    share = {**plain, "partial_rotary_factor": 0.5}
    for rope, is_refused in ((plain, False), (share, True)):
        kinds = {"sliding_attention": plain, "full_attention": rope}
        entries = rope if name == "llama" else kinds
        other = replace(spec, hf_config={**spec.hf_config, "rope_parameters": entries})
        assert (unsupported_feature(other) is not None) == is_refused


def _assert_refused(spec: ModelSpec) -> None:
    assert unsupported_feature(spec) is not None
    with pytest.raises(WeightError, match=r"vLLM is not supported for a model with .*native$"):
        parameter_pieces(spec, 0, 1)
