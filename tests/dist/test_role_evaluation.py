"""What roles compute stays near transformers in bfloat16, in which the ratio is 1 exactly, too.

`test_invariance` checks float32.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mrlhf.batch import Prompts
from mrlhf.host import products
from mrlhf.inference import sizes
from mrlhf.inference.base import SamplingParams
from mrlhf.inference.native.sampler import TokenSampler
from mrlhf.parallel.layout import AxisSizes
from tests.dist.role_runs import (
    ONE_PACK,
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
from tests.models.engines import answer, make_engine
from tests.oracle import plain_models, plain_tables
from tests.oracle.plain_ppo import Case
from tests.padding import pad_responses
from tests.ranks import run_ranks
from tests.rollouts import make_rollout

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
    for model, of_model in LAYOUTS.items():
        [setting] = settings(Path(root), world_size, [SEQUENCE_PARALLEL], {4: [of_model]})
        metrics, logprobs = _first_update(setting, UPDATED[model])
        results[model] = metrics, logprobs.tolist()
    return results


def _by_engine_and_trainer(rank: int, world_size: int, root: str) -> list[list[float]]:
    """Log-probs of tokens that the engine drew: by the engine and the actor, and exact ones."""
    # Otherwise the engine's weights are widened on some machines.
    products.float32_is_faster = sizes.float32_is_faster = lambda: False
    [setting] = settings(Path(root), world_size, [ONE_PACK], {1: [AxisSizes()]})
    model = plain_models.load(setting.root / "llama")
    prompts = [[7, 3 * number, 60 - number] for number in range(20)]
    uids = [*range(len(prompts))]
    sampling = SamplingParams(temperature=plain_tables.TEMPERATURE, max_tokens=50, seed=5)
    with mock.patch.object(
        TokenSampler, "draw", autospec=True, side_effect=TokenSampler.draw
    ) as drawn:
        samples = answer(make_engine(model, dtype=torch.bfloat16), prompts, uids, sampling)
    logits = drawn.call_args.args[1]
    assert (logits != logits.bfloat16()).float().mean() > 0.9

    ids, mask = pad_responses([sample.token_ids for sample in samples], torch.int32)
    nothing = [""] * len(prompts)
    rollout = make_rollout(
        Prompts(prompts, uids, nothing, nothing, nothing, [{}] * len(prompts)),
        [0] * len(prompts),
        ids,
        mask,
        pad_responses([sample.logprobs for sample in samples], torch.float32)[0],
        torch.ones(len(prompts), dtype=torch.bool),
    )
    actor = build_actor(setting, UPDATED["llama"], dtype="bfloat16")
    of_actor = logprobs_of(actor, rollout, len(rollout))
    exact = plain_tables.evaluate(model, rollout)[0]
    return [table[mask].tolist() for table in (rollout.rollout_logprobs, of_actor, exact)]


def test_engine_and_trainer_differ_by_less_than_bfloat16_errs(root: Path) -> None:
    """Rotation by numbers of bfloat16 in one of them alone would be most of what both err."""
    [tables] = run_ranks(1, _by_engine_and_trainer, str(root))
    engine, trainer, exact = map(torch.tensor, tables)
    apart, err = ((found - trainer).square().mean().sqrt() for found in (engine, exact))
    assert 0 < apart < 0.3 * err


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
