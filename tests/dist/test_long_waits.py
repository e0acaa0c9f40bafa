"""Ranks wait for one that is slow for longer than a collective may take, and the job goes on.

Data or storage make it slow: it draws, scores, writes a checkpoint or reads a model's files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from mrlhf.checkpoint.rank_files import RankWriter
from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.errors import WeightError
from mrlhf.inference.base import EngineStats, SamplingParams
from mrlhf.parallel import collectives
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.rewards.interface import RewardResult
from mrlhf.rollout.drawing import Drawn
from mrlhf.rollout.exchange import DrawnSamples
from mrlhf.rollout.generator import Generator
from mrlhf.rollout.partial import Rounds
from mrlhf.rollout.scoring import Scorer
from mrlhf.training import first_weights
from tests.dist.test_scoring import RESPONSES, rollout
from tests.fake_engine import FakeEngine
from tests.ranks import everyone, run_ranks

TIMEOUT_S = 6.0
SLOW_S = TIMEOUT_S + 0.5  # longer than the time-out, so that no luck decides


def _in_ranks(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    factory = GroupFactory(TIMEOUT_S)
    layout = ParallelLayout(tp=1, pp=1, dp=world_size)
    groups = factory.role_groups(layout)
    engine_groups = factory.engine_groups(EngineLayout.inside(layout, 1))
    impatient = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), everyone())

    def slowly(value: Any, on: int) -> Callable[..., Any]:
        """A function that returns `value`, late on rank `on`."""
        return lambda *_, **__: (rank == on and time.sleep(SLOW_S)) or value

    found: dict[str, Any] = {}
    with mock.patch.object(first_weights, "read_model", slowly(True, on=0)):
        found["reader"] = first_weights.read_for_all("files", None, [], True, groups)  # type: ignore[arg-type]

    drawing = SimpleNamespace(draw=slowly(Drawn([], EngineStats()), on=1))
    sampler: Any = SimpleNamespace(drawing=lambda *_: drawing, has_episodes=False)
    hand_over: Any = SimpleNamespace(nbytes=0)
    generator = Generator(FakeEngine(), engine_groups, hand_over, 1, sampler=sampler)  # type: ignore[arg-type]
    task: Any = SimpleNamespace(
        samples=0, prompts=[], sampling=SamplingParams(n=1, max_tokens=1, temperature=1.0, seed=0)
    )
    found["replica"] = len(generator.serve(task, None)[0].stats)

    nothing = DrawnSamples.none(world_size)
    rounds = Rounds(engine_groups.replicas, nothing, nothing, 1, 1, iter([1, 2]), 0, lambda _: None)
    slowly(None, on=1)()
    found["round"] = rounds.goes_on([], False)

    result = RewardResult([1.0] * (len(RESPONSES) // 2), {}, {}, [[]] * (len(RESPONSES) // 2))
    function: Any = SimpleNamespace(
        reads_text=False, external=(), evaluate=lambda rows: [{}] * len(rows)
    )
    function.combine = slowly(result, on=0)
    scorer = Scorer(function, None, None, groups)  # type: ignore[arg-type]
    found["scorer"] = scorer.score(rollout())[1].total.tolist()

    write = RankWriter.write

    def write_slowly(*arguments: Any) -> None:
        slowly(None, on=1)()
        write(*arguments)

    verify = slowly(None, on=0)  # rank 0 is slow once more when all have written
    saver = Saver(root, RunIdentity("test", {}), everyone(), asynchronous=False, verify=verify)
    with mock.patch.object(RankWriter, "write", write_slowly):
        path = saver.save(Contents(1, False, {}, {}))
    found["writer"] = path is not None and path.is_dir()

    # The deliberate break: without the wait the job ends.
    try:
        with (
            mock.patch.object(collectives, "wait_for_all"),
            collectives.together(WeightError, impatient),
        ):
            slowly(None, on=1)()
    except RuntimeError as error:
        found["break"] = "timed out" in str(error).lower() or rank == 1
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=600), everyone())
    return found


def test_a_slow_rank_ends_no_job(tmp_path: Path) -> None:
    for found in run_ranks(2, _in_ranks, tmp_path / "checkpoints"):
        assert found == {
            "reader": True,
            "replica": 2,
            "round": True,
            "scorer": [1.0] * len(RESPONSES),
            "writer": True,
            "break": True,
        }
