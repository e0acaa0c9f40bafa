"""Training a mixture of experts equals the plain loop, however its experts lie on the ranks.

Old and current log-probabilities of the same weights are also equal bit for bit, although the
experts of a rank compute on tokens of all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mrlhf.parallel.layout import AxisSizes
from tests import plain_ppo
from tests.dist.role_runs import (
    MANY_PACKS,
    ONE_PACK,
    SEQUENCE_PARALLEL,
    actor_optim,
    assert_near,
    build_actor,
    load_experience,
    logprobs_of,
    save_inputs,
    settings,
    train,
    update_actor,
)
from tests.plain_ppo import Case, Outcome
from tests.ranks import run_ranks

CASE = Case("qwen2-moe", "token-mean", {"entropy_coeff": 0.05}, clip_grad=1.0)
FORMS = (MANY_PACKS, ONE_PACK, SEQUENCE_PARALLEL)
# Experts lie on ranks of data parallelism, of tensor parallelism, or of both; with ep 1 and etp 1
# the ranks of tensor parallelism have replicas of them.
LAYOUTS = {
    1: [AxisSizes()],
    2: [AxisSizes(ep=2), AxisSizes(tp=2, ep=2), AxisSizes(tp=2, etp=1), AxisSizes(cp=2, ep=2)],
    4: [
        AxisSizes(ep=2),
        AxisSizes(pp=2, ep=2),
        AxisSizes(tp=2, ep=2),
        AxisSizes(tp=2, ep=2, etp=2),
        AxisSizes(tp=2, ep=4),
        AxisSizes(tp=2, pp=2, ep=2),
        AxisSizes(tp=2, cp=2, ep=2),
    ],
}

Results = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and an experience."""
    directory = tmp_path_factory.mktemp("mixture")
    save_inputs(directory)
    return directory


@pytest.fixture(scope="module")
def expected(root: Path) -> dict[str, Outcome]:
    """Actor and critic as the plain loop trains them."""
    experience = load_experience(root, CASE)
    return {
        "actor": plain_ppo.train_actor(CASE, root / CASE.model, experience),
        "critic": plain_ppo.train_critic(CASE, root / CASE.model, experience),
    }


def _in_ranks(rank: int, world_size: int, root: str) -> Results:
    torch.set_num_threads(1)
    out = Path(root) / f"out{world_size}"
    results = {}
    for setting in settings(Path(root), world_size, FORMS, LAYOUTS):
        label = f"{setting.name}{setting.groups.layout.etp}"
        results[label] = train(setting, CASE, out / label)
    return results


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_updates_equal_the_plain_loop(
    root: Path, expected: dict[str, Outcome], world_size: int
) -> None:
    ranks = run_ranks(world_size, _in_ranks, str(root))
    loads = set()
    for label, metrics in ranks[0].items():
        assert all(rank[label] == metrics for rank in ranks), f"{label}: the ranks' metrics differ"
        loads.add((metrics["actor/expert_load_max"], metrics["actor/expert_load_entropy"]))
        for role, outcome in expected.items():
            for name, value in outcome.metrics.items():
                assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), f"{label}: {name}"

            weights = load_file(
                Path(root) / f"out{world_size}" / label / role / "model.safetensors"
            )
            assert weights.keys() == outcome.weights.keys()
            for name, tensor in weights.items():
                assert_near(tensor, outcome.weights[name], atol=1e-5, title=f"{label}: {name}")

    assert len(loads) == 1, "the load of experts depends on the layout"
    [(largest, entropy)] = loads
    assert 1 < largest < 4 and 0.5 < entropy < 1


def _first_ratio(rank: int, world_size: int, root: str) -> list[float]:
    """What updates that change nothing call the KL between old and current policy."""
    kls = []

    for setting in settings(Path(root), world_size, (MANY_PACKS, SEQUENCE_PARALLEL), LAYOUTS):
        experience = load_experience(setting.root, CASE)
        optim = actor_optim(setting, CASE).model_copy(update={"lr": 0.0})
        actor = build_actor(setting, CASE, optim=optim)
        old = logprobs_of(actor, experience.rollout, plain_ppo.MINI_BATCH)
        experience = replace(experience, old_logprobs=old)
        metrics = update_actor(actor, experience, plain_ppo.MINI_BATCH)
        kls.append(metrics["actor/ppo_kl"])
    return kls


@pytest.mark.parametrize("world_size", [2, 4])
def test_old_and_current_logprobs_are_the_same_numbers(root: Path, world_size: int) -> None:
    for kls in run_ranks(world_size, _first_ratio, str(root)):
        assert set(kls) == {0.0}
