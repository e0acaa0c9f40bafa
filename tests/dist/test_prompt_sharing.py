"""A prompt that is computed once: wrong keys are refused by name before the first pass, and what is
saved is reported. `test_invariance` shows that losses and gradients stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrlhf.errors import TrainingError
from mrlhf.parallel import packed_sequences
from mrlhf.parallel.layout import AxisSizes
from tests.dist.role_runs import (
    Form,
    build_actor,
    build_critic,
    cut_responses,
    load_experience,
    logprobs_of,
    save_inputs,
    settings,
)
from tests.oracle.plain_experience import PROMPT_LENGTHS, RESPONSE_LENGTHS
from tests.oracle.plain_ppo import Case
from tests.ranks import run_ranks

CASE = Case("llama", "token-mean")
SHARING = Form("sharing", 1000, distributed_optimizer=False, keys={"share_prompts": True})
LAYOUTS = {2: [AxisSizes(tp=2), AxisSizes(cp=2), AxisSizes(pp=2)]}


def _refusals(rank: int, world_size: int, root: str) -> list[str]:
    """What a model says whose queries see other keys; first in each layout it sees the right ones.

    On a pipeline the last stage alone has outputs; the others are told.
    """
    right = packed_sequences.seen_places
    said = []
    for setting in settings(Path(root), world_size, [SHARING], LAYOUTS):
        rollout = load_experience(Path(root), CASE).rollout
        logprobs_of(build_actor(setting, CASE), rollout, len(rollout))

        def wrong(boundaries: Any, tokens: int, segments: Any, trees: Any = None) -> Any:
            places = right(boundaries, tokens, segments, trees)
            return places if trees is None else places.flip(0)

        actor = build_actor(setting, CASE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_sequences, "seen_places", wrong)
            try:
                logprobs_of(actor, rollout, len(rollout))
            except TrainingError as error:
                said.append(str(error))
    return said


def test_wrong_keys_are_refused_on_every_rank(tmp_path: Path) -> None:
    save_inputs(tmp_path, models=["llama"])
    for said in run_ranks(2, _refusals, str(tmp_path)):
        assert len(said) == len(LAYOUTS[2])
        assert all(line.startswith("share_prompts: ") for line in said)


def _saved(rank: int, world_size: int, root: str) -> dict[str, float]:
    [setting] = settings(Path(root), world_size, [SHARING], {1: [AxisSizes()]})
    cut = cut_responses(build_critic(setting, CASE), load_experience(Path(root), CASE).rollout)
    return cut.balance.metrics("critic", setting.groups.layout)


def test_what_is_saved_is_reported(tmp_path: Path) -> None:
    save_inputs(tmp_path, models=["llama"])
    [metrics] = run_ranks(1, _saved, str(tmp_path))
    # Three rows share a prompt of three tokens, and two one of two.
    tokens = sum(PROMPT_LENGTHS) + sum(RESPONSE_LENGTHS)
    assert metrics["perf/shared_tokens/critic"] == pytest.approx((2 * 3 + 2) / tokens)
