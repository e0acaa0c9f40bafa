"""Where inference replicas and their experts lie, and which ranks pass weights on to each other."""

from __future__ import annotations

import itertools

import pytest

from mrlhf.errors import ConfigError
from mrlhf.inference.sizes import engine_ep, engine_ep_problem, engine_tp_problem
from mrlhf.parallel.engine_layout import EngineLayout, ReplicaPlace
from mrlhf.parallel.layout import ParallelLayout
from tests.shards import tiny_spec


def test_replicas_of_a_small_layout() -> None:
    actor = ParallelLayout(tp=2, pp=2, dp=2)
    assert EngineLayout.inside(actor, 2).replicas == ((0, 1), (4, 5), (2, 3), (6, 7))
    assert EngineLayout.inside(actor, 4).replicas == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert EngineLayout.inside(actor, 4).place(6) == (1, 2)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=tp, cp=cp, pp=pp, dp=dp)
        for tp, cp, pp, dp in itertools.product((1, 2, 4), (1, 2), (1, 2, 3), (1, 3))
    ],
    ids=str,
)
def test_replicas_lie_inside_model_parallel_groups_and_cover_the_world(
    layout: ParallelLayout,
) -> None:
    size = layout.tp * layout.cp * layout.pp
    divisors = [tp for tp in range(1, size + 1) if size % tp == 0]
    for tp in divisors:
        engines = EngineLayout.inside(layout, tp)
        assert sorted(itertools.chain(*engines.replicas)) == list(range(layout.world_size))
        for number, replica in enumerate(engines.replicas):
            assert len(replica) == engines.tp == tp
            assert len({layout.coordinates(rank).dp for rank in replica}) == 1
            assert [engines.place(rank) for rank in replica] == [
                (number, place) for place in range(tp)
            ]


def test_an_engine_that_does_not_divide_the_actor() -> None:
    message = "rollout.tp 3 does not divide actor.tp 2 x actor.pp 2 = 4; choose a divisor of it"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        EngineLayout.inside(ParallelLayout(tp=2, pp=2, dp=2), 3)


def test_the_place_of_a_rank_among_experts() -> None:
    places = [ReplicaPlace(rank, tp=8, ep=2) for rank in range(8)]
    assert [place.ep_rank for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.etp_rank for place in places] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert ReplicaPlace(3, tp=8).etp == 8


@pytest.mark.parametrize(
    ("actor", "exchanges"),
    [
        (ParallelLayout(tp=2, dp=4, etp=2), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (ParallelLayout(tp=2, dp=4, ep=2), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (ParallelLayout(tp=2, dp=4, ep=4), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (ParallelLayout(tp=2, dp=4, ep=2, etp=2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (ParallelLayout(tp=2, cp=2, dp=2, ep=4), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (ParallelLayout(pp=2, dp=4, ep=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (ParallelLayout(tp=3, dp=2, ep=2), [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_the_fewest_groups_that_have_all_experts_exchange(
    actor: ParallelLayout, exchanges: list[list[int]]
) -> None:
    engines = EngineLayout.closest(actor, 1)
    assert engines.is_inside and engines.exchanges == exchanges


def test_replicas_span_groups_where_experts_do() -> None:
    across = EngineLayout.closest(ParallelLayout(dp=8, ep=4), 4, 2)
    assert across.replicas == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert across.exchanges == [list(range(8))]
    assert across.place_in_replica(6) == ReplicaPlace(2, tp=4, ep=2)

    with pytest.raises(ConfigError, match=r"^rollout\.tp 3 does not divide the world size 8; "):
        EngineLayout.closest(ParallelLayout(dp=8, ep=4), 3)
    with pytest.raises(ConfigError, match=r"^rollout\.tp 4 does not divide actor\.tp 1 x "):
        EngineLayout.closest(ParallelLayout(dp=8), 4)


@pytest.mark.parametrize(
    ("wanted", "tp", "actor_etp", "ep"),
    [
        (None, 4, 1, 4),  # whole experts, as in training
        (None, 4, 2, 2),
        (None, 4, 4, 1),
        (None, 2, 4, 1),  # training splits more finely
        (None, 8, 1, 2),  # 4 experts do not divide over 8, nor does their width of 12
        (2, 4, 1, 2),
    ],
)
def test_experts_are_split_as_in_training_where_that_fits(
    wanted: int | None, tp: int, actor_etp: int, ep: int
) -> None:
    assert engine_ep("native", wanted, tp, actor_etp, tiny_spec("qwen2_moe")) == ep
    assert engine_ep("native", None, tp, actor_etp, tiny_spec("llama")) == 1
    assert engine_ep("vllm", None, tp, actor_etp, tiny_spec("qwen2_moe")) == 1


def test_experts_that_do_not_fit_a_replica() -> None:
    spec = tiny_spec("qwen3_moe")
    assert engine_ep_problem("native", 3, 6, spec) == (
        "rollout.ep 3 does not fit rollout.tp 6 and the model's 4 experts of width 12; use one of "
        "1, 2"
    )
    dense = tiny_spec("llama")
    assert engine_ep_problem("native", 2, 6, spec) is None
    assert engine_ep_problem("native", 1, 1, dense) is engine_ep_problem("vllm", 1, 2, spec) is None
    assert engine_ep_problem("vllm", 2, 2, spec) == (
        "rollout.ep 2: in vLLM each expert is split over all ranks; leave it out"
    )
    assert engine_ep_problem("native", 2, 2, dense) == (
        "rollout.ep 2 does not fit a model without experts; leave it out"
    )

    assert engine_tp_problem("native", 8, spec) is None
    assert engine_tp_problem("native", 8, spec, ep=1) == (
        "rollout.tp 8 does not fit the model's 4 experts of width 12; use one of 1, 2, 4"
    )
