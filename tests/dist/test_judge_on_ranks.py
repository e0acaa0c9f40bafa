"""A model on the ranks that judges: its scores are those of a plain loop, on every layout."""

from __future__ import annotations

import pytest
import torch

from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.rollout.judging import RankJudge
from tests.dist.ppo_runs import (
    DP4,
    TP2_PP2,
    Runs,
    Scenario,
    assert_engine_and_trainer_agree,
    assert_same_on_every_layout,
)
from tests.oracle import plain_models

TEMPLATE = "{{ prompt }}{{ response }}+"
TOKENS = 4
JUDGED = [
    "reward.terms=[{name: judge, weight: 2.0}, {name: exact_match}]",
    f"judge={{template: '{TEMPLATE}', max_tokens: {TOKENS}, unparsed: 0.25}}",
    r"judge.pattern='(\d)'",
    "judge.range=[0,9]",
    "reward_model=null",
    "algorithm.adv_estimator=grpo",
    "rollout.n=4",
]
WIDE = Scenario("dp4", [*JUDGED, "judge_model={path: ROOT/judge, max_prompt_tokens: 40}", *DP4[:1]])
DEEP = Scenario(
    "tp2 pp2",
    [
        *JUDGED,
        *TP2_PP2,
        "judge_model={path: ROOT/judge, tp: 2, pp: 2, offload: [params], max_prompt_tokens: 40}",
    ],
)
ONE = Scenario(
    "tp4", [*JUDGED, "judge_model={path: ROOT/judge, tp: 4, max_prompt_tokens: 40}", "actor.cp=2"]
)
VOTES = ["judge.n=3", "judge.temperature=1.0", "algorithm.adv_estimator=remax"]
VOTES_WIDE = Scenario("votes, dp4", [*WIDE.overrides, *VOTES])
VOTES_DEEP = Scenario("votes, tp2 pp2", [*DEEP.overrides, *VOTES])
SHORT = Scenario(
    "short", [*JUDGED, "judge_model={path: ROOT/judge, max_prompt_tokens: 8}", "judge.unparsed=7"]
)


def test_the_scores_are_those_of_a_plain_loop(runs: Runs) -> None:
    model = plain_models.load(runs.root / "judge")
    tokenizer = load_tokenizer(runs.root / "judge")
    unparsed = 0
    for step in runs.steps(WIDE):
        rollout = step.experience.rollout
        for row, length in enumerate(rollout.response_lengths):
            response = tokenizer.decode(rollout.response_ids[row, :length].tolist())
            asked = tokenizer.encode(f"{rollout.prompts.text[row]}{response}+", True)
            ids = torch.tensor([asked])
            for _ in range(TOKENS):
                with torch.no_grad():
                    logits = model(ids).logits[0, -1]
                logits[[i for i in range(len(logits)) if i not in tokenizer.ids]] = -torch.inf
                ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
                if ids[0, -1] == tokenizer.eos_id:
                    break
            answer = tokenizer.decode(ids[0, len(asked) :].tolist())
            digits = [character for character in answer if character.isdigit()]
            unparsed += not digits
            score = int(digits[-1]) / 9 if digits else 0.25
            right = response.strip() == str(rollout.prompts.ground_truth[row]).strip()
            assert step.experience.scores[row] == pytest.approx(2 * score + right)
        assert len(set(step.experience.scores.tolist())) > 2
    measured = [step.metrics["judge/unparsed"] for step in runs.steps(WIDE)]
    assert sum(measured) * 32 == pytest.approx(unparsed)


def test_they_are_the_same_on_every_layout(runs: Runs) -> None:
    assert_engine_and_trainer_agree(runs)
    assert_same_on_every_layout(runs, WIDE, DEEP, ONE)
    assert_same_on_every_layout(runs, VOTES_WIDE, VOTES_DEEP)
    scores = runs.steps(VOTES_WIDE)[0].experience.scores
    assert not torch.equal(scores, runs.steps(WIDE)[0].experience.scores)


def test_a_message_that_is_too_long_has_no_verdict(runs: Runs) -> None:
    step = runs.steps(SHORT)[0]
    assert 0 < step.metrics["judge/unparsed"] <= 1
    assert 14 in step.experience.scores.round().tolist()


def _mixed_up(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Each response gets the verdict on another one."""
    score = RankJudge.score
    patch.setattr(RankJudge, "score", lambda judge, rows: score(judge, [*rows[1:], rows[0]]))


BROKEN = Scenario("broken", DEEP.overrides, _mixed_up)


def test_a_break_is_seen(runs: Runs) -> None:
    with pytest.raises(AssertionError):
        assert_same_on_every_layout(runs, WIDE, BROKEN)
