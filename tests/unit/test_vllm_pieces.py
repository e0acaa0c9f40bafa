"""What vLLM's ranks hold, against full tensors cut with torch's chunk and cat; needs no vLLM."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.inference.vllm.pieces import (
    parameter_pieces,
    parameter_shapes,
    unsupported_feature,
    vllm_pieces,
)
from mrlhf.models.parameters import role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.reshard.plan import Planner, ReshardPlan
from mrlhf.reshard.sides import sides_around
from mrlhf.weights.shard import Slot
from tests.engine_models import hf_model, spec_of
from tests.feature_models import FEATURE_MODELS
from tests.mixture_models import MIXTURES
from tests.plans import check_agreement
from tests.shards import full_tensors, tiny_spec

MODELS = ("llama", "llama_tied", "qwen2", "qwen2_tied", "qwen3")


def _cut(spec: ModelSpec, full: dict[str, Tensor], rank: int, tp: int) -> dict[str, Tensor]:
    """The parameters of one rank as vLLM has them.

    The tiny models have a vocabulary of 37.
    """

    def rows(name: str) -> Tensor:
        return full[name].chunk(tp)[rank]

    def shared(name: str) -> Tensor:
        heads = spec.num_kv_heads
        return full[name].chunk(heads)[rank * heads // tp] if tp > heads else rows(name)

    held = {}
    padded = torch.zeros(64, spec.hidden_size)
    padded[:37] = full["model.embed_tokens.weight"]
    held["model.embed_tokens.weight"] = padded.chunk(tp)[rank]
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        mlp = prefix + "mlp."
        for kind in ("weight", "bias"):
            q, k, v = (f"{attention}{name}_proj.{kind}" for name in "qkv")
            if q in full:
                held[f"{attention}qkv_proj.{kind}"] = torch.cat([rows(q), shared(k), shared(v)])
        held[attention + "o_proj.weight"] = full[attention + "o_proj.weight"].chunk(tp, dim=1)[rank]
        held[mlp + "gate_up_proj.weight"] = torch.cat(
            [rows(mlp + "gate_proj.weight"), rows(mlp + "up_proj.weight")]
        )
        held[mlp + "down_proj.weight"] = full[mlp + "down_proj.weight"].chunk(tp, dim=1)[rank]
    held |= {name: tensor for name, tensor in full.items() if name.endswith("norm.weight")}
    if "lm_head.weight" in full:
        padded = torch.zeros(64, spec.hidden_size)
        padded[:37] = full["lm_head.weight"]
        held["lm_head.weight"] = padded.chunk(tp)[rank]
    return held


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
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


@pytest.mark.parametrize("name", (*FEATURE_MODELS, *MIXTURES))
def test_a_model_with_other_features_is_refused(name: str) -> None:
    spec = spec_of(hf_model(name))
    assert unsupported_feature(spec) is not None
    with pytest.raises(WeightError, match=r"vLLM is not supported for a model with .*native$"):
        parameter_pieces(spec, 0, 1)
