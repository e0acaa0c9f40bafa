"""A rollout over several replicas in four ranks: every rank gets the rows of one engine, in order.

The engine is a fake whose responses are a function of (seed, uid, sample index), so that the test
sees if one sample is taken for another.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from mrlhf.batch import Prompts
from mrlhf.errors import EngineError
from mrlhf.inference.base import Finished, SamplingParams
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.reshard.execute import ReshardStats
from mrlhf.rollout.drawing import mix_seed
from mrlhf.rollout.generator import Generator
from tests.fake_engine import FakeEngine, FakeResharder, response
from tests.ranks import run_ranks

WORLD_SIZE = 4
# actor tp, actor pp, engine tp; 4, 2, 2 and 1 replicas
LAYOUTS = {
    "4 replicas": (2, 2, 1),
    "2 of tp 2": (2, 2, 2),
    "across dp": (2, 1, 2),
    "1 of tp 4": (4, 1, 4),
}
UIDS = [40, 7, 7000, 3, 12]
N = 3
LIMIT = 6
SEED = 11


def _prompts(uids: list[int]) -> Prompts:
    texts = [f"prompt {uid}" for uid in uids]
    tokens = [[1 + uid % 5] * (1 + uid % 4) for uid in uids]
    return Prompts(tokens, uids, texts, ["source"] * len(uids), texts, [{} for _ in uids])


def _sampling(n: int) -> SamplingParams:
    return SamplingParams(n=n, temperature=1.0, max_tokens=LIMIT, seed=0)


def _as_lists(rollout: Any) -> dict[str, Any]:
    return {
        "uid": rollout.prompts.uid,
        "sample": rollout.sample_index,
        "responses": [
            row[:k]
            for row, k in zip(rollout.response_ids.tolist(), rollout.response_lengths, strict=True)
        ],
        "logprobs": [
            row[:k]
            for row, k in zip(
                rollout.rollout_logprobs.tolist(), rollout.response_lengths, strict=True
            )
        ],
        "padding": int((rollout.response_ids * ~rollout.response_mask).abs().sum())
        + float((rollout.rollout_logprobs * ~rollout.response_mask).abs().sum()),
        "width": rollout.response_ids.shape[1],
        "stopped": rollout.stopped.tolist(),
        "versions": [row[row >= 0].tolist() for row in rollout.versions],
    }


class Relabelling(FakeEngine):
    """Exchanges the names of two samples of the first prompt."""

    def collect(self) -> Finished:
        finished = super().collect()
        first, second, *others = finished.samples
        swapped = [
            replace(first, sample_index=second.sample_index),
            replace(second, sample_index=first.sample_index),
        ]
        return Finished([*swapped, *others], finished.stats)


class Silent(FakeEngine):
    """Gives no log-probability for the last token of prompt 7's first sample."""

    def collect(self) -> Finished:
        finished = super().collect()
        samples = []
        for sample in finished.samples:
            if UIDS[sample.request_id.prompt] == 7 and sample.sample_index == 0:
                sample = replace(sample, logprobs=[*sample.logprobs[:-1], math.nan])
            samples.append(sample)
        return Finished(samples, finished.stats)


def _generator(
    factory: GroupFactory, sizes: tuple[int, int, int], rank: int, engine: Any
) -> Generator:
    layout = ParallelLayout.for_world("actor", WORLD_SIZE, AxisSizes(tp=sizes[0], pp=sizes[1]))
    groups = factory.engine_groups(EngineLayout.inside(layout, sizes[2]))
    return Generator(
        engine, groups, FakeResharder(engine, ReshardStats(rank, 1, 10 * rank, rank / 2)), SEED
    )  # type: ignore[arg-type]


def _fakes(rank: int, factory: GroupFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}

    for name, sizes in LAYOUTS.items():
        engine = FakeEngine()
        generator = _generator(factory, sizes, rank, engine)
        stats = generator.take_weights(version=5)
        rollout = generator.generate(_prompts(UIDS), _sampling(N), "train", step=2).rollout
        asked = engine.asked
        generator.sleep()
        few = generator.generate(_prompts([9]), _sampling(1), "validation")
        generator.generate(_prompts([9]), _sampling(4), "validation")
        found[name] = {
            "rollout": _as_lists(rollout),
            "few": _as_lists(few.rollout),
            "few metrics": few.engine_metrics[0],
            "calls": engine.calls,
            "asked": asked,
            "split": engine.asked,
            "stats": stats,
            "state": generator.state_dict(),
            "replica": generator.groups.replica,
        }

    refilling = _generator(factory, (2, 2, 1), rank, FakeEngine())
    refilling.take_weights(version=5)
    refilled = refilling.generate(_prompts(UIDS), _sampling(N), "train", step=2, refill=1)
    found["refill"] = _as_lists(refilled.rollout)
    silent = _generator(factory, (2, 2, 1), rank, Silent())
    silent.take_weights(version=5)
    try:
        silent.generate(_prompts(UIDS), _sampling(N), "train", step=2)
    except EngineError as error:
        found["silent"] = str(error)

    relabelled = _generator(factory, (2, 2, 1), rank, Relabelling())
    relabelled.take_weights(version=5)
    mixed_up = relabelled.generate(_prompts(UIDS), _sampling(N), "train", step=2)
    found["relabelled"] = _as_lists(mixed_up.rollout)
    return found


def _in_ranks(rank: int, world_size: int) -> dict[str, Any]:
    return _fakes(rank, GroupFactory(timeout_s=600.0))


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(WORLD_SIZE, _in_ranks)


def _wanted() -> list[list[int]]:
    seed = mix_seed(SEED, "train 2")
    return [response(seed, uid, sample, LIMIT) for uid in UIDS for sample in range(N)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_those_of_their_prompt_and_sample(ranks: list[dict[str, Any]], name: str) -> None:
    wanted = _wanted()
    for rank in ranks:
        rows = rank[name]["rollout"]
        assert rows["uid"] == [uid for uid in UIDS for _ in range(N)]
        assert rows["sample"] == [0, 1, 2] * len(UIDS)
        assert rows["responses"] == wanted
        assert rows["logprobs"] == [[-(token % 1024) / 1024 for token in row] for row in wanted]
        assert rows["stopped"] == [len(row) < LIMIT for row in wanted]
        assert (rows["padding"], rows["width"]) == (0, max(map(len, wanted)))
        assert rows["versions"] == [[5] * len(row) for row in wanted]
        few = response(mix_seed(SEED, "validation"), 9, 0, LIMIT)
        assert rank[name]["few"]["responses"] == [few]


def test_exchanged_samples_are_seen(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["relabelled"]["responses"] != _wanted()
    assert sorted(ranks[0]["relabelled"]["responses"]) == sorted(_wanted())


def test_a_refill_of_a_step_has_random_numbers_of_its_own(ranks: list[dict[str, Any]]) -> None:
    seed = mix_seed(SEED, "train 2 refill 1")
    wanted = [response(seed, uid, sample, LIMIT) for uid in UIDS for sample in range(N)]
    assert ranks[0]["refill"]["responses"] == wanted != _wanted()


def test_every_rank_refuses_a_token_without_a_log_probability(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "token of prompt uid 7 the log-probability inf or nan" in rank["silent"]


def test_replicas_share_the_work_and_keep_samples_together(ranks: list[dict[str, Any]]) -> None:
    for name, (_, _, tp) in LAYOUTS.items():
        asked = {rank[name]["replica"]: rank[name]["asked"] for rank in ranks}
        assert len(asked) == WORLD_SIZE // tp
        assert all(samples == range(N) for share in asked.values() for _, samples in share)
        assert sorted(uid for share in asked.values() for uid, _ in share) == sorted(UIDS)
        # The ranks of a replica are asked alike.
        assert all(rank[name]["asked"] == asked[rank[name]["replica"]] for rank in ranks)

    # one prompt, four samples: no replica waits
    assert [rank["4 replicas"]["split"] for rank in ranks] == [
        [(9, range(i, i + 1))] for i in (0, 1, 2, 3)
    ]
    assert {str(rank["across dp"]["split"]) for rank in ranks} == {
        "[(9, range(0, 2))]",
        "[(9, range(2, 4))]",
    }


def test_the_order_of_calls_and_what_is_reported(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["2 of tp 2"]["calls"][:5] == [
            "wake",
            "reshard",
            "take_cache",
            "commit",
            "submit",
        ]
        assert rank["2 of tp 2"]["stats"] == ReshardStats(0 + 1 + 2 + 3, 4, 30, 1.5)

        # One prompt of two tokens, one sample: three replicas are idle.
        metrics = rank["4 replicas"]["few metrics"]
        steps = len(response(mix_seed(SEED, "validation"), 9, 0, LIMIT))
        assert metrics == {
            "rollout/kv_cache_bytes": 2**40 + 1,
            "rollout/peak_kv_cache_bytes": 1,
            "rollout/preemptions": 1,
            "rollout/prefix_hit_rate": 0.0,
            "rollout/tokens_per_engine_step": 1.0,
            "rollout/imbalance": 4.0,
        }
        assert steps >= 1
        lengths = dict(
            zip(
                *(rank["4 replicas"]["state"]["train"][key] for key in ("uids", "means")),
                strict=True,
            )
        )
        assert lengths[40] == pytest.approx(sum(map(len, _wanted()[:N])) / N)
        assert rank["4 replicas"]["state"] == ranks[0]["1 of tp 4"]["state"]


class OutOfMemory(FakeEngine):
    def wake(self) -> None:
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: "
            "you tried to allocate 99 bytes."
        )


class Broken(FakeEngine):
    def wake(self) -> None:
        raise RuntimeError("a bug")


def test_a_lack_of_memory_is_reported_with_numbers_and_keys() -> None:
    for engine, expected in ((OutOfMemory(), EngineError), (Broken(), RuntimeError)):
        resharder: Any = FakeResharder(engine, ReshardStats(0, 0, 0, 0))
        groups: Any = None
        generator = Generator(engine, groups, resharder, SEED)
        with pytest.raises(expected) as caught:
            generator.take_weights(0)
        if expected is EngineError:
            message = str(caught.value)
            assert "tried to allocate 99 bytes" in message and "\n" not in message
            assert "rollout.kv_cache_mb" in message and "rollout.gpu_memory_utilization" in message
        else:
            assert type(caught.value) is RuntimeError and str(caught.value) == "a bug"


def test_state_goes_on() -> None:
    generator = Generator(FakeEngine(), None, None, SEED)  # type: ignore[arg-type]
    state = {"train": {"uids": [4], "means": [2.5], "visits": [1], "all": [2.5, 1]}}
    generator.load_state_dict(state)
    assert generator.state_dict() == state
    assert generator.lengths["train"].expected(4, 0) == 2.5
