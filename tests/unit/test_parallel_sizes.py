"""Which layouts fit a model: the sizes that are named satisfy everything at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from mrlhf.errors import WeightError
from mrlhf.inference.sizes import engine_tp_problem
from mrlhf.inference.vllm.pieces import parameter_pieces
from mrlhf.models.parallel_sizes import ep_problem, pp_problem, tp_problem
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.stages import Stages
from tests.shards import tiny_spec


def sized(**sizes: Any) -> ModelSpec:
    return replace(tiny_spec("llama"), **sizes)


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ({"num_heads": 8, "num_kv_heads": 4, "head_dim": 4, "ffn_size": 96}, [1, 2, 4, 8]),
        ({"num_heads": 6, "num_kv_heads": 3, "head_dim": 4, "ffn_size": 96}, [1, 3, 6]),
        ({"num_heads": 12, "num_kv_heads": 2, "head_dim": 6, "ffn_size": 96}, [1, 2, 4, 6, 12]),
        ({"num_heads": 12, "num_kv_heads": 2, "head_dim": 4, "ffn_size": 96}, [1, 2, 4]),
        ({"num_heads": 16, "num_kv_heads": 1, "head_dim": 4, "ffn_size": 24}, [1, 2, 4]),
    ],
)
def test_sizes_for_training(sizes: dict[str, int], fits: list[int]) -> None:
    spec = sized(**sizes)
    for tp in range(1, 20):
        problem = tp_problem("actor.tp", tp, spec)
        assert (problem is None) == (tp in fits), (tp, problem)
        if problem is None:
            for rank in range(tp):
                role_pieces(spec, ParallelLayout(tp=tp, pp=1, dp=1), rank)
        else:
            named = ", ".join(map(str, fits))
            assert problem.startswith(f"actor.tp {tp} does not fit the model's ")
            assert problem.endswith(f"; use one of {named}")


@pytest.mark.parametrize(
    ("tp", "changes", "message"),
    [
        (4, {}, "6 attention heads; use one of 1, 3, 6"),
        (2, {}, "3 key and value heads (it must divide them or be a multiple of them); use one of "
                "1, 3, 6"),
        (5, {}, "6 attention heads and intermediate size 96; use one of 1, 3, 6"),
        (6, {"head_dim": 5}, "3 key and value heads of 5 rows (the 2 ranks of a head hold equal "
                             "parts of it); use one of 1, 3"),
        (3, {"ffn_size": 100}, "intermediate size 100; use 1"),
        (2, {"num_kv_heads": 6, "ffn_size": 99}, "intermediate size 99; use one of 1, 3"),
    ],
)  # fmt: skip
def test_one_line_tells_the_cause(tp: int, changes: dict[str, int], message: str) -> None:
    """The key and value heads divide the attention heads, so theirs is no problem of its own."""
    spec = sized(num_heads=6, num_kv_heads=3, head_dim=4, ffn_size=96)
    problem = tp_problem("actor.tp", tp, replace(spec, **changes))
    assert problem == f"actor.tp {tp} does not fit the model's {message}"


OR_NAME = "or name the layers of each stage in"


@pytest.mark.parametrize(
    ("prefix", "stages", "layers", "problem"),
    [
        ("critic", Stages(5), 6, f"; set critic.pp to one of 1, 2, 3, 4, 6, {OR_NAME} critic"),
        ("", Stages(5), 1, f"pp 5 does not fit the model's 1 layers; set pp to 1, {OR_NAME} pp_l"),
        ("actor", Stages(2, 3), 12, None),
        ("actor", Stages(4, 2), 12, "actor.pp 4 x actor.vpp 2 = 8 does not fit the model's 12 lay"),
        ("actor", Stages(4, 2), 12, f"; set actor.pp to one of 2, 3, 6, {OR_NAME} actor.pp_layers"),
        (
            "actor",
            Stages(2, 7),
            12,
            "actor.vpp 7 = 14 does not fit the model's 12 layers; name the",
        ),
        ("actor", Stages(2, 1, (2, 4)), 6, None),
        ("actor", Stages(2, 2, (0, 3, 3, 0)), 6, None),
        ("actor", Stages(2, 1, (2, 3)), 6, "actor.pp_layers [2, 3] has 5 layers and the model 6; "),
        ("actor", Stages(2, 1, (2, 3)), 6, "; give 2 numbers that add up to 6"),
    ],
)
def test_stages_divide_the_layers(
    prefix: str, stages: Stages, layers: int, problem: str | None
) -> None:
    found = pp_problem(prefix, stages, sized(num_layers=layers))
    assert found is None if problem is None else problem in str(found)


def test_the_numbers_of_stages_for_six_layers() -> None:
    spec = sized(num_layers=6)
    fits = [pp for pp in range(1, 9) if pp_problem("actor", Stages(pp), spec) is None]
    assert fits == [1, 2, 3, 4, 6]  # with embedding and loss there are 8


def test_a_stage_begins_with_an_indexer() -> None:
    spec = tiny_spec("glm_moe_dsa")  # its third layer of four takes the choice of the second
    found = pp_problem("actor", Stages(2), spec)
    assert found is not None and found.startswith(
        "actor.pp 2: a stage begins with layer 2, which attends to what the indexer of layer 1 "
        "chooses; name the layers of each stage in actor.pp_layers"
    )
    assert pp_problem("actor", Stages(2, 2, (0, 1, 3, 0)), spec) is None


@pytest.mark.parametrize(
    ("engine", "vocabulary", "fits"),
    [
        # An engine's ranks hold whole KV heads, so that their rows need not divide.
        ("native", 48, [1, 2, 4, 6, 12]),
        ("native", 9, [1, 2]),
        ("vllm", 37, [1, 2, 4]),
        ("vllm", 150, [1, 2, 4, 6, 12]),
    ],
)
def test_sizes_for_an_engine(
    engine: Literal["native", "vllm"], vocabulary: int, fits: list[int]
) -> None:
    spec = sized(num_heads=12, num_kv_heads=2, head_dim=1, ffn_size=96, vocab_size=vocabulary)
    for tp in range(1, 20):
        problem = engine_tp_problem(engine, tp, spec)
        assert (problem is None) == (tp in fits), (tp, problem)
        if engine == "vllm":
            _assert_vllm_agrees(spec, tp, tp in fits)
        elif tp in fits:
            engine_pieces(spec, EngineLayout.inside(ParallelLayout(tp=tp, pp=1, dp=1), tp), tp - 1)


def _assert_vllm_agrees(spec: ModelSpec, tp: int, fits: bool) -> None:
    if fits:
        parameter_pieces(spec, tp - 1, tp)
    else:
        with pytest.raises(WeightError, match=rf"^vLLM: rollout\.tp {tp} does not fit"):
            parameter_pieces(spec, 0, tp)


def test_sizes_of_replicas_on_the_ranks_that_there_are() -> None:
    spec = sized(num_heads=12, num_kv_heads=2, ffn_size=96, vocab_size=37)
    assert engine_tp_problem("native", 3, spec, ranks=6) == (
        "rollout.tp 3 does not fit the model's 2 key and value heads (it must divide them or be a "
        "multiple of them); use one of 1, 2, 6"
    )
    assert engine_tp_problem("native", 8, replace(spec, vocab_size=15)) == (
        "rollout.tp 8 does not fit the model's 12 attention heads; use one of 1, 2, 4"
    )
    assert engine_tp_problem("native", 6, replace(spec, vocab_size=10)) == (
        "rollout.tp 6 does not fit the model's vocabulary 10 (in parts of 2, the last rank would "
        "have none); use one of 1, 2, 4"
    )


@pytest.mark.parametrize("whole_kv_heads", [False, True])
def test_a_norm_over_all_heads_does_not_share_a_head(whole_kv_heads: bool) -> None:
    spec = sized(num_kv_heads=4, qk_norm="projection")
    assert tp_problem("tp", 4, spec, whole_kv_heads=whole_kv_heads) is None
    assert tp_problem("tp", 8, spec, whole_kv_heads=whole_kv_heads) == (
        "tp 8 does not fit the model's 4 key and value heads (which share one norm); use one of "
        "1, 2, 4"
    )


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        ("llama", AxisSizes(), None),
        ("llama", AxisSizes(tp=2), None),
        ("llama", AxisSizes(ep=2), "actor.ep 2 does not fit a model without experts; set actor.ep"),
        ("llama", AxisSizes(tp=2, etp=1), "actor.etp 1 does not fit a model without experts; set"),
        ("mixtral", AxisSizes(ep=4), None),
        ("mixtral", AxisSizes(tp=8, etp=8), None),
        ("mixtral", AxisSizes(ep=3), "actor.ep 3 does not fit the model's 4 experts; use one of 1"),
        (
            "qwen2_moe",
            AxisSizes(tp=8, ep=2, etp=8),
            "actor.etp 8 does not fit the experts' intermediate size 12; set actor.etp to a",
        ),
    ],
)
def test_sizes_of_expert_parallelism(model: str, sizes: AxisSizes, message: str | None) -> None:
    problem = ep_problem("actor", sizes, tiny_spec(model))
    assert problem == message or (message is not None and str(problem).startswith(message))


def test_tensor_parallelism_splits_dense_layers_and_shared_experts_alone() -> None:
    spec = tiny_spec("qwen2_moe")
    assert spec.experts is not None
    assert tp_problem("actor.tp", 4, spec) is None
    wide = replace(spec, experts=replace(spec.experts, shared_ffn_size=18))
    assert "shared expert of intermediate size 18" in str(tp_problem("actor.tp", 4, wide))
    # No layer is dense, so that their width does not matter.
    assert tp_problem("actor.tp", 4, replace(spec, ffn_size=7)) is None
