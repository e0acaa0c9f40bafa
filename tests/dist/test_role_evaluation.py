"""What roles compute without training equals transformers on one rank, and stays near in bfloat16.

An update of one mini-batch on log-probs that were just computed has the ratio 1 exactly, in
bfloat16 too. `test_invariance` checks float32 on all other layouts.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrlhf.parallel.layout import AxisSizes
from tests.dist.role_runs import (
    MANY_PACKS,
    ONE_PACK,
    SEQUENCE_PARALLEL,
    STAGED,
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
from tests.oracle import plain_models, plain_tables
from tests.oracle.plain_ppo import Case
from tests.oracle.plain_tables import all_tables
from tests.ranks import run_ranks

FORM_MODELS = {MANY_PACKS: ("qwen2-tied", "qwen3"), ONE_PACK: ("llama",)}
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
    save_inputs(directory, models=MODELS)
    return directory


def _in_one_rank(rank: int, world_size: int, root: str) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    results = {}
    for setting in settings(Path(root), world_size, tuple(FORM_MODELS)):
        for model in FORM_MODELS[setting.form]:
            tables = evaluate(setting, EVALUATED[model])
            results[model] = {name: table.tolist() for name, table in tables.items()}
    return results


def _in_bfloat16(rank: int, world_size: int, root: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    results = {}
    layouts = {"llama": AxisSizes(tp=2, pp=2), "qwen2-tied": STAGED}
    for model, sizes in layouts.items():
        [setting] = settings(Path(root), world_size, [SEQUENCE_PARALLEL], {4: [sizes]})
        metrics, logprobs = _first_update(setting, UPDATED[model])
        results[model] = metrics, logprobs.tolist()
    return results


def _first_update(setting: Setting, case: Case) -> tuple[dict[str, float], Tensor]:
    """Update once, on one mini-batch whose old log-probs the same actor has just evaluated.

    Returns:
        The metrics, and those log-probs [batch, response_len].
    """
    experience = load_experience(setting.root, case)
    rows = len(experience.rollout)
    actor = build_actor(setting, case, ppo_epochs=1, dtype="bfloat16")
    logprobs = logprobs_of(actor, experience.rollout, rows)
    fresh = replace(experience, old_logprobs=logprobs, ref_logprobs=logprobs)
    return update_actor(actor, fresh, rows), logprobs


def test_evaluations_equal_transformers(root: Path) -> None:
    [evaluated] = run_ranks(1, _in_one_rank, str(root))
    for model in MODELS:
        rollout = load_experience(root, EVALUATED[model]).rollout
        for name, table in all_tables(root / model, rollout).items():
            found = torch.tensor(evaluated[model][name])
            assert_near(found, table, atol=2e-5, title=f"{model}: {name}")


def test_bfloat16_stays_near(root: Path) -> None:
    *_, last = run_ranks(4, _in_bfloat16, str(root))
    for model, (metrics, logprobs) in last.items():
        rollout = load_experience(root, EVALUATED[model]).rollout
        wanted = plain_tables.evaluate(plain_models.load(root / model), rollout)[0]

        gap = (torch.tensor(logprobs) - wanted).abs()
        assert 1e-4 < gap.max() < 0.1
        assert gap[rollout.response_mask].mean() < 0.02
        assert metrics["actor/kl_loss"] == 0.0
        assert math.isfinite(metrics["actor/grad_norm"])
