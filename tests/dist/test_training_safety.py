"""Updates that end early or skip steps, so that no unusable step reaches the weights.

Each update stands above the test of it, as a constant of type `Update`. All of them run in one
start of ranks, on one layout of one rank and one of four.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlhf.batch import Experience
from mrlhf.errors import TrainingError
from mrlhf.parallel.layout import AxisSizes
from tests.dist.role_runs import (
    ONE_PACK,
    SEQUENCE_PARALLEL,
    Setting,
    actor_optim,
    build_actor,
    fingerprint,
    load_experience,
    logprobs_of,
    save_inputs,
    settings,
    update_actor,
)
from tests.oracle import plain_experience, plain_ppo
from tests.oracle.plain_ppo import Case
from tests.ranks import run_ranks

CASE = Case("llama", "token-mean")
FORMS = (ONE_PACK, SEQUENCE_PARALLEL)  # without and with the distributed optimizer
LAYOUTS = ((1, AxisSizes()), (4, AxisSizes(tp=2)))  # by world size; the others share the code


@dataclass(frozen=True)
class Update:
    """One update of the actor: two epochs of two mini-batches."""

    name: str  # no two updates have the same
    # For each mini-batch, by how much its old log-probs exceed the actor's.
    distances: tuple[float, float]
    broken: bool = False  # whether an advantage of the second mini-batch is no number
    keys: dict[str, Any] = field(default_factory=dict)  # keys of the actor section
    optim: dict[str, Any] = field(default_factory=dict)  # keys of its `optim`


@dataclass(frozen=True)
class Result:
    """What an update did on one rank, on one layout; an update that raised has no metrics."""

    title: str
    metrics: dict[str, float]
    error: str
    moved: bool

    def counts(self, *names: str) -> tuple[float, ...]:
        """The actor's metrics of these names."""
        return tuple(self.metrics[f"actor/{name}"] for name in names)


class Results:
    """The results of all updates, on all ranks and layouts."""

    def __init__(self, ranks: list[dict[str, list[Result]]]) -> None:
        self._ranks = ranks

    def of(self, update: Update) -> list[Result]:
        """Those of one update."""
        for rank in self._ranks:
            assert rank[update.name], "a rank has run no layout"
        return [result for rank in self._ranks for result in rank[update.name]]


@pytest.fixture(scope="module", params=[1, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of all constants of this module that are updates."""
    directory = tmp_path_factory.mktemp("safety")
    save_inputs(directory, models=[CASE.model])
    constants = list(globals().values())
    updates = [constant for constant in constants if isinstance(constant, Update)]
    return Results(run_ranks(request.param, _in_ranks, str(directory), updates))


def _in_ranks(
    rank: int, world_size: int, root: str, updates: Sequence[Update]
) -> dict[str, list[Result]]:
    results: dict[str, list[Result]] = {update.name: [] for update in updates}
    for setting in settings(Path(root), world_size, FORMS):
        if setting.layout in LAYOUTS:
            for update in updates:
                results[update.name].append(_run(setting, update))
    return results


def _run(setting: Setting, wanted: Update) -> Result:
    optim = actor_optim(setting, CASE).model_copy(update=wanted.optim)
    actor = build_actor(setting, CASE, optim=optim, **wanted.keys)

    experience = load_experience(setting.root, CASE)
    logprobs = logprobs_of(actor, experience.rollout, plain_ppo.MINI_BATCH)
    experience = _changed(replace(experience, old_logprobs=logprobs), wanted)

    before = fingerprint(actor)
    metrics: dict[str, float] = {}
    error = ""
    try:
        metrics = update_actor(actor, experience, plain_ppo.MINI_BATCH)
    except TrainingError as raised:
        error = str(raised)
    return Result(setting.name, metrics, error, moved=fingerprint(actor) != before)


def _changed(experience: Experience, wanted: Update) -> Experience:
    distances = torch.tensor(wanted.distances).repeat_interleave(plain_ppo.MINI_BATCH)
    far = replace(experience, old_logprobs=experience.old_logprobs + distances[:, None])
    return plain_experience.broken(far) if wanted.broken else far


STOPPED = Update("stopped", (0.0, 0.2), keys={"target_kl_stop": 0.1})


def test_an_update_ends_before_the_step_that_is_too_far(results: Results) -> None:
    for result in results.of(STOPPED):
        assert result.counts("kl_stopped", "optimizer_steps") == (1, 1), result.title
        assert result.moved, result.title
        # The one mini-batch that was trained on.
        assert result.metrics["actor/ppo_kl"] == 0.0, result.title
        assert 0.1 < result.metrics["actor/kl_at_stop"] < 1.0, result.title


STOPPED_AT_ONCE = Update("stopped at once", (0.2, 0.2), keys={"target_kl_stop": 0.1})


def test_an_update_that_ends_at_once_reports_the_mini_batch_that_stopped_it(
    results: Results,
) -> None:
    for result in results.of(STOPPED_AT_ONCE):
        assert result.counts("optimizer_steps") == (0,), result.title
        assert not result.moved, result.title
        kl, kl_at_stop = result.counts("ppo_kl", "kl_at_stop")
        assert kl == kl_at_stop == pytest.approx(0.2, abs=1e-5), result.title


NEAR_ENOUGH = Update("near enough", (0.0, 0.2), keys={"target_kl_stop": 0.3}, optim={"lr": 0.0})


def test_an_update_that_stays_near_takes_all_steps(results: Results) -> None:
    for result in results.of(NEAR_ENOUGH):
        assert result.counts("kl_stopped", "optimizer_steps") == (0, 4), result.title
        # The second mini-batch has 24 of 41 tokens, and nothing moves.
        wanted = pytest.approx(0.2 * 24 / 41, abs=1e-5)
        assert result.metrics["actor/ppo_kl"] == wanted, result.title


BROKEN = Update("one broken mini-batch", (0.0, 0.0), broken=True, optim={"max_skipped_steps": 2})


def test_a_gradient_that_is_no_number_is_skipped(results: Results) -> None:
    for result in results.of(BROKEN):
        assert result.counts("skipped_steps", "optimizer_steps") == (2, 2), result.title
        assert result.moved, result.title
        assert all(math.isfinite(value) for value in result.metrics.values()), result.title


TOO_LARGE = Update("too large", (0.0, 0.2), optim={"skip_grad_norm": 1e-6, "max_skipped_steps": 3})


def test_gradients_that_are_too_large_end_the_run(results: Results) -> None:
    for result in results.of(TOO_LARGE):
        assert not result.moved, result.title
        assert result.error.startswith("3 optimizer steps in a row"), result.title
        assert "limit skip_grad_norm 1e-06" in result.error, result.title


PATIENT = Update(
    "too large, patient", (0.0, 0.2), optim={"skip_grad_norm": 1e-6, "max_skipped_steps": 5}
)


def test_fewer_skipped_steps_than_the_limit_do_not_end_the_run(results: Results) -> None:
    for result in results.of(PATIENT):
        assert result.counts("skipped_steps", "optimizer_steps") == (4, 0), result.title
        assert not result.moved, result.title
        assert math.isnan(result.metrics["actor/grad_norm"]), result.title
