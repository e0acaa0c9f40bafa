"""What roles compute without training equals transformers, on every layout and packing.

An update of one mini-batch on log-probs that were just computed has the ratio 1 exactly.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrlhf.parallel.layout import AxisSizes
from tests import plain_ppo
from tests.dist.role_runs import (
    LAYOUTS,
    MANY_PACKS,
    ONE_PACK,
    SEQUENCE_PARALLEL,
    STAGED_LAYOUTS,
    Setting,
    assert_near,
    build_actor,
    evaluate,
    load_experience,
    logprobs_of,
    save_inputs,
    settings,
    update_actor,
)
from tests.plain_ppo import Case
from tests.ranks import run_ranks

FORM_MODELS = {
    MANY_PACKS: ("qwen2-tied", "qwen3"),
    ONE_PACK: ("llama",),
    SEQUENCE_PARALLEL: ("qwen2-tied",),
}
MODELS = ("llama", "qwen2-tied", "qwen3")
EVALUATED = {model: Case(model, "token-mean") for model in MODELS}

# The `abs` KL to the old log-probs is a sum of sizes, so it is 0 only if no token's log-prob
# differs.
ABS_KL = {"use_kl_loss": True, "kl_loss_type": "abs", "entropy_coeff": 0.1}
UPDATED = {model: Case(model, "token-mean", ABS_KL) for model in MODELS}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and, for each, an experience."""
    directory = tmp_path_factory.mktemp("evaluation")
    save_inputs(directory)
    return directory


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, root: Path) -> list[dict[str, Any]]:
    """What each rank computed."""
    return run_ranks(request.param, _in_ranks, str(root))


def _in_ranks(rank: int, world_size: int, root: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    results: dict[str, Any] = {"evaluated": {}, "first update": {}, "bfloat16": {}}

    everywhere = settings(Path(root), world_size, tuple(FORM_MODELS))
    staged = settings(Path(root), world_size, tuple(FORM_MODELS), STAGED_LAYOUTS)
    for setting in chain(everywhere, staged):
        for model in FORM_MODELS[setting.form]:
            if setting.is_staged and model not in plain_ppo.DEEP:
                continue
            label = f"{setting.name}, {model}"
            tables = evaluate(setting, EVALUATED[model])
            results["evaluated"][label] = {name: table.tolist() for name, table in tables.items()}
            results["first update"][label], _ = _first_update(setting, UPDATED[model])

        deep = (4, AxisSizes(tp=2, pp=2))
        if setting.layout == deep and setting.form is SEQUENCE_PARALLEL:
            model = "qwen2-tied" if setting.is_staged else "llama"
            metrics, logprobs = _first_update(setting, UPDATED[model], dtype="bfloat16")
            results["bfloat16"][model] = metrics, logprobs.tolist()
    return results


def _first_update(
    setting: Setting, case: Case, dtype: str = "float32"
) -> tuple[dict[str, float], Tensor]:
    """Update once, on one mini-batch whose old log-probs the same actor has just evaluated.

    Returns:
        The metrics, and those log-probs [batch, response_len].
    """
    experience = load_experience(setting.root, case)
    rows = len(experience.rollout)
    actor = build_actor(setting, case, ppo_epochs=1, dtype=dtype)
    logprobs = logprobs_of(actor, experience.rollout, rows)
    fresh = replace(experience, old_logprobs=logprobs, ref_logprobs=logprobs)
    return update_actor(actor, fresh, rows), logprobs


def test_evaluations_equal_transformers(ranks: list[dict[str, Any]], root: Path) -> None:
    for model in MODELS:
        wanted = _with_transformers(root, model)
        for rank in ranks:
            labels = [label for label in rank["evaluated"] if label.endswith(model)]
            assert labels
            for label in labels:
                tables = rank["evaluated"][label]
                for name, table in wanted.items():
                    title = f"{label}: {name}"
                    assert_near(torch.tensor(tables[name]), table, atol=2e-5, title=title)


def _with_transformers(root: Path, model: str) -> dict[str, Tensor]:
    experience = load_experience(root, EVALUATED[model])
    rollout = experience.rollout
    policy = plain_ppo.load(root / model)
    reference = plain_ppo.load(root / f"{model}-ref")
    critic = plain_ppo.load(root / f"{model}-critic")

    logprobs, entropy = plain_ppo.evaluate(policy, rollout)
    assert experience.ref_logprobs is not None
    return {
        "logprobs": logprobs,
        "entropy": entropy,
        "full_kl": plain_ppo.full_kl(policy, reference, rollout),
        "sum_of_squares": plain_ppo.sum_of_squares(policy, rollout),
        "ref_logprobs": experience.ref_logprobs,
        "values": plain_ppo.token_values(critic, rollout),
    }


def test_in_the_first_mini_batch_every_ratio_is_one(ranks: list[dict[str, Any]]) -> None:
    for label, metrics in ranks[0]["first update"].items():
        assert metrics["actor/kl_loss"] == 0.0, label
        assert metrics["actor/ppo_kl"] == 0.0, label
        assert metrics["actor/pg_clipfrac"] == 0.0, label
        assert metrics["actor/grad_norm"] > 0.1, label


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_bfloat16_stays_near(ranks: list[dict[str, Any]], root: Path) -> None:
    assert ranks[-1]["bfloat16"].keys() == {"llama", "qwen2-tied"}  # the latter with virtual stages
    for model, (metrics, logprobs) in ranks[-1]["bfloat16"].items():
        rollout = load_experience(root, EVALUATED[model]).rollout
        wanted = plain_ppo.evaluate(plain_ppo.load(root / model), rollout)[0]

        gap = (torch.tensor(logprobs) - wanted).abs()
        assert 1e-4 < gap.max() < 0.1
        assert gap[rollout.response_mask].mean() < 0.02
        assert metrics["actor/kl_loss"] == 0.0
        assert math.isfinite(metrics["actor/grad_norm"])
