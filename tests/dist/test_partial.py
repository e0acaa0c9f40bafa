"""Partial rollouts, on one engine of two ranks and on two engines, against a slow loop.

The loop has all samples draw token after token with `transformers`, the weights of each step its
own, and applies the rule by which a step ends. Episodes that are drawn in several steps, and over a
resume on the other layout, are those that are drawn at once.
"""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mrlhf.batch import Prompts, Rollout
from mrlhf.config.rollout import PartialSection
from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.inference.native.sampler import sample_keys, uniforms
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.reshard.execute import ReshardStats
from mrlhf.rollout.drawing import mix_seed
from mrlhf.rollout.generator import Generator
from mrlhf.rollout.partial import PartialSampler
from tests.fake_engine import FakeResharder
from tests.models.engines import fill, hf_model, spec_of
from tests.ranks import run_ranks
from tests.saved_state import saved

SEED = 12
N = 2
BATCH = 3  # prompts of a step
PROMPTS = 4  # of the data; in the first step some come twice
PARTIAL = PartialSection(over=2.0, max_versions=3)
STEPS = 7
MOST_TOKENS = 40
ENDS = tuple(range(40, 46))  # of 131 tokens: the lengths have a wide spread
SAMPLING = SamplingParams(n=N, temperature=1.0, max_tokens=MOST_TOKENS, stop_token_ids=ENDS, seed=0)
LIMITS = EngineLimits(max_num_seqs=5, max_length=64, max_prefill_tokens=24, cache_bytes=2**22)
LAYOUTS = {"tp 2": 2, "two replicas": 1}


def _model(version: int) -> Any:
    """The weights of a version."""
    model = copy.deepcopy(hf_model("llama"))
    noise = torch.Generator().manual_seed(version)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=noise)
    return model


def _prompt(uid: int) -> list[int]:
    return [1 + uid % 7, 50 + uid, 3]


def _supply() -> Any:
    for first in itertools.count(0, BATCH):
        uids = [number % PROMPTS for number in range(first, first + BATCH)]
        nothing = [""] * BATCH
        yield Prompts([_prompt(u) for u in uids], uids, nothing, nothing, nothing, [{}] * BATCH)


def _as_lists(rollout: Rollout) -> dict[str, Any]:
    there = rollout.response_mask
    return {
        "uids": rollout.prompts.uid,
        "tokens": [r[m].tolist() for r, m in zip(rollout.response_ids, there, strict=True)],
        "versions": [v[m].tolist() for v, m in zip(rollout.versions, there, strict=True)],
        "logprobs": rollout.rollout_logprobs.numpy().copy(),
        "stopped": rollout.stopped.tolist(),
    }


def _generator(groups: Any) -> Generator:
    device = torch.device("cpu")
    engine = NativeEngine(spec_of(_model(0)), groups.tp, device, torch.float32, LIMITS)
    resharder: Any = FakeResharder(None, ReshardStats(0, 0, 0, 0.0))  # type: ignore[arg-type]
    engine.wake()
    return Generator(engine, groups, resharder, SEED)


def _take(generator: Generator, version: int) -> None:
    fill(generator.engine.weight_slots(), _model(version))
    generator.engine.commit(version)


def _in_ranks(rank: int, world_size: int) -> dict[str, Any]:
    factory = GroupFactory(timeout_s=600.0)
    found: dict[str, Any] = {}
    for name, tp in LAYOUTS.items():
        groups = factory.engine_groups(EngineLayout.inside(ParallelLayout(tp=2, pp=1, dp=1), tp))
        generator = _generator(groups)
        supply = _supply()
        sampler = PartialSampler(generator, supply, BATCH, PARTIAL)
        steps = []

        for step in range(1, STEPS + 1):
            _take(generator, step - 1)
            if step == 4:  # as after a resume
                state = saved(sampler.state_dict())
                sampler = PartialSampler(generator, supply, BATCH, PARTIAL)
                sampler.load_state_dict(state, _prompts_of)
            with _TorchOperators() as operators:
                before = sampler.state_dict()
            held = saved(before)
            drawn = sampler.draw(step, SAMPLING)
            generator.end_step()
            steps.append(
                _as_lists(drawn.rollout)
                | {
                    "metrics": drawn.metrics,
                    "operators": operators.count,
                    "held": str(held),
                    "held later": str(saved(before)),
                }
            )

        found[name] = steps
    return found


class _TorchOperators(TorchDispatchMode):
    """Counts the operators of torch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return operator(*args, **(kwargs or {}))


def _prompts_of(uids: Any) -> Prompts:
    nothing = [""] * len(uids)
    return Prompts(
        [_prompt(u) for u in uids], list(uids), nothing, nothing, nothing, [{}] * len(uids)
    )


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, _in_ranks)


class _Group:
    """Samples of one prompt in the slow loop."""

    def __init__(self, uid: int, version: int, twins: int) -> None:
        self.uid = uid
        self.since = version
        seed = mix_seed(SEED, f"train {version + 1}" + " again" * twins)
        self.keys = sample_keys([seed], [uid], [range(N)])
        self.tokens: list[list[int]] = [[] for _ in range(N)]
        self.versions: list[list[int]] = [[] for _ in range(N)]

    def has_ended(self, index: int) -> bool:
        tokens = self.tokens[index]
        return len(tokens) == MOST_TOKENS or bool(tokens and tokens[-1] in ENDS)

    @property
    def is_whole(self) -> bool:
        return all(map(self.has_ended, range(N)))

    def draw(self, model: Any, version: int) -> None:
        """One token of each sample."""
        for index in range(N):
            if self.has_ended(index):
                continue
            tokens = self.tokens[index]
            logits = model(torch.tensor([_prompt(self.uid) + tokens])).logits[0, -1]
            ends = logits.double().softmax(dim=0).cumsum(dim=0)
            key = self.keys[index : index + 1]
            (uniform,) = uniforms(key, torch.tensor([len(tokens)]).numpy())
            tokens.append(int((ends <= uniform * ends[-1]).sum()))
            self.versions[index].append(version)


@torch.no_grad()
def _slow_loop() -> list[dict[str, Any]]:
    uids = itertools.count()
    groups: list[_Group] = []
    steps = []
    part = math.ceil(MOST_TOKENS / 16)
    limit = 0

    for version in range(STEPS):
        model = _model(version)
        while len(groups) < PARTIAL.over * BATCH:
            uid = next(uids) % PROMPTS
            twins = sum((group.uid, group.since) == (uid, version) for group in groups)
            groups.append(_Group(uid, version, twins))
        limit = max(part, limit - part)
        drawn = 0
        while True:
            for _ in range(limit - drawn):
                for group in groups:
                    group.draw(model, version)
            drawn = limit
            taken = [group for group in groups if group.is_whole][:BATCH]
            left = [group for group in groups if group not in taken]
            # Whoever is left has to be taken by the last version that may draw it.
            too_late = [
                sum(group.since + PARTIAL.max_versions - 1 <= version + later for group in left)
                > later * BATCH
                for later in range(PARTIAL.max_versions)
            ]
            if len(taken) == BATCH and not any(too_late):
                break
            limit += part
        steps.append({"taken": taken, "limit": limit, "left": len(left)})
        groups = left

    return steps


@pytest.fixture(scope="module")
def slow() -> list[dict[str, Any]]:
    return _slow_loop()


def test_groups_tokens_and_versions_are_those_of_a_slow_loop(
    ranks: list[dict[str, Any]], slow: list[dict[str, Any]]
) -> None:
    for rank in ranks:
        for name in LAYOUTS:
            for found, wanted in zip(rank[name], slow, strict=True):
                taken = wanted["taken"]
                assert found["uids"] == [group.uid for group in taken for _ in range(N)]
                assert found["tokens"] == [row for group in taken for row in group.tokens]
                assert found["versions"] == [row for group in taken for row in group.versions]
                assert found["stopped"] == [row[-1] in ENDS for row in found["tokens"]]
                assert found["metrics"]["partial/limit"] == wanted["limit"]
                assert found["metrics"]["partial/open_groups"] == wanted["left"]


def test_log_probabilities_are_those_of_the_version_that_drew_them(
    ranks: list[dict[str, Any]],
) -> None:
    models = [_model(version) for version in range(STEPS)]
    for found in ranks[0]["two replicas"]:
        for row, (uid, tokens, versions) in enumerate(
            zip(found["uids"], found["tokens"], found["versions"], strict=True)
        ):
            prompt = _prompt(uid)
            with torch.no_grad():
                every = {
                    version: models[version](torch.tensor([prompt + tokens]))
                    .logits[0, len(prompt) - 1 : -1]
                    .log_softmax(dim=-1)
                    for version in set(versions)
                }

            wanted = [
                float(every[version][place, token])
                for place, (token, version) in enumerate(zip(tokens, versions, strict=True))
            ]
            got = found["logprobs"][row, : len(tokens)]
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5)


def test_no_group_is_too_old(slow: list[dict[str, Any]]) -> None:
    ages = [step - group.since for step, facts in enumerate(slow) for group in facts["taken"]]
    assert max(ages) == PARTIAL.max_versions - 1 and min(ages) == 0
    mixed = [len(set(row)) for facts in slow for group in facts["taken"] for row in group.versions]
    assert max(mixed) == PARTIAL.max_versions


def test_the_state_before_a_step_is_kept_without_a_copy(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for found in rank["tp 2"] + rank["two replicas"]:
            assert found["operators"] == 0
            assert found["held later"] == found["held"]
    assert "tokens" in ranks[0]["tp 2"][-1]["held"]


def test_staleness_counts_the_tokens_of_each_age(ranks: list[dict[str, Any]]) -> None:
    for step, found in enumerate(ranks[0]["tp 2"]):
        ages = [step - version for row in found["versions"] for version in row]
        metrics = found["metrics"]
        assert metrics["staleness/mean"] == pytest.approx(sum(ages) / len(ages))
        assert metrics["staleness/max"] == max(ages)
        for age in range(max(ages) + 1):
            share = metrics[f"staleness/share/{age}"]
            assert share == pytest.approx(ages.count(age) / len(ages))
        mixed = [len(set(row)) > 1 for row in found["versions"]]
        assert metrics["staleness/mixed"] == pytest.approx(sum(mixed) / len(mixed))
