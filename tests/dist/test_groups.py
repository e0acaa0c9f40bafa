"""Process groups hold the ranks that the layouts name, and equal layouts share their groups."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from tests.ranks import run_ranks


def _ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


def _memberships(rank: int, world_size: int) -> dict[str, Any]:
    factory = GroupFactory(timeout_s=600.0)
    actor_layout = ParallelLayout(tp=2, pp=2, dp=1)
    actor = factory.role_groups(actor_layout)
    again = factory.role_groups(ParallelLayout(tp=2, pp=2, dp=1))
    assert all(
        getattr(actor, axis) is getattr(again, axis)
        for axis in ("tp", "dp", "pp", "world", "results")
    )

    assert actor.collection.mp is again.collection.mp
    mp = actor.collection.mp
    deep = factory.role_groups(ParallelLayout(tp=1, pp=4, dp=1))
    wide = factory.role_groups(ParallelLayout(tp=1, pp=2, dp=2))
    engine = factory.engine_groups(EngineLayout.inside(actor_layout, tp=2))

    return {
        "actor": [
            _ranks(group)
            for group in (actor.tp, actor.dp, actor.pp, mp, actor.world, actor.results)
        ],
        "embedding": (_ranks(actor.collection.embd), _ranks(deep.collection.embd)),
        "optimizer": (_ranks(wide.collection.intra_dist_opt), _ranks(wide.collection.tp_dp_cp)),
        "wide": [_ranks(group) for group in (wide.dp, wide.pp, wide.results, wide.collection.cp)],
        "engine": (engine.replica, engine.tp_rank, _ranks(engine.tp), _ranks(engine.replicas)),
    }


def test_every_rank_is_in_the_groups_of_its_coordinates() -> None:
    first, second, third, fourth = run_ranks(4, _memberships)
    assert first == {
        "actor": [[0, 1], [0], [0, 2], [0, 1, 2, 3], [0, 1, 2, 3], [0, 2]],
        "embedding": ([0, 2], [0, 3]),
        "optimizer": ([0, 1, 2, 3], [0, 1]),
        "wide": [[0, 1], [0, 2], [0, 1, 2, 3], [0]],
        "engine": (0, 0, [0, 1], [0, 2]),
    }

    # A middle stage of four holds neither end of the pipeline.
    assert second["embedding"] == ([1, 3], None)
    assert second["engine"] == (0, 1, [0, 1], [1, 3])
    assert third["engine"] == (1, 0, [2, 3], [0, 2])

    assert fourth["actor"] == [[2, 3], [3], [1, 3], [0, 1, 2, 3], [0, 1, 2, 3], [1, 3]]
    assert fourth["wide"] == [[2, 3], [1, 3], [0, 1, 2, 3], [3]]
