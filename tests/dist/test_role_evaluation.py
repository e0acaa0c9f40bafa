"""What roles compute stays near transformers in bfloat16, in which the ratio is 1 exactly, too.

`test_invariance` checks float32.
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
    SEQUENCE_PARALLEL,
    STAGED,
    Setting,
    build_actor,
    load_experience,
    logprobs_of,
    save_inputs,
    settings,
    update_actor,
)
from tests.oracle import plain_models, plain_tables
from tests.oracle.plain_ppo import Case
from tests.ranks import run_ranks

LAYOUTS = {"llama": AxisSizes(tp=2, pp=2), "qwen2-tied": STAGED}
# The `abs` KL to the old log-probs is a sum of sizes, so it is 0 only if no token's log-prob
# differs.
ABS_KL = {"use_kl_loss": True, "kl_loss_type": "abs", "entropy_coeff": 0.1}
UPDATED = {model: Case(model, "token-mean", ABS_KL) for model in LAYOUTS}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and, for each, an experience."""
    directory = tmp_path_factory.mktemp("evaluation")
    save_inputs(directory, models=list(LAYOUTS))
    return directory


def _in_bfloat16(rank: int, world_size: int, root: str) -> dict[str, Any]:
    results = {}
    for model, sizes in LAYOUTS.items():
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


def test_bfloat16_stays_near(root: Path) -> None:
    *_, last = run_ranks(4, _in_bfloat16, str(root))
    for model, (metrics, logprobs) in last.items():
        rollout = load_experience(root, UPDATED[model]).rollout
        wanted = plain_tables.evaluate(plain_models.load(root / model), rollout)[0]

        gap = (torch.tensor(logprobs) - wanted).abs()
        assert 1e-4 < gap.max() < 0.1
        assert gap[rollout.response_mask].mean() < 0.02
        assert metrics["actor/kl_loss"] == 0.0
        assert math.isfinite(metrics["actor/grad_norm"])
