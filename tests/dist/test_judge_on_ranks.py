"""A model on the ranks that judges: its scores are those of a plain loop, on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
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


def _digits(model: Any, tokenizer: Tokenizer, message: str) -> list[str]:
    """The digits of the judge's greedy answer, token by token."""
    asked = tokenizer.encode(message, True)
    ids = torch.tensor([asked])
    for _ in range(TOKENS):
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        logits[[i for i in range(len(logits)) if i not in tokenizer.ids]] = -torch.inf
        ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
        if ids[0, -1] == tokenizer.eos_id:
            break
    answer = tokenizer.decode(ids[0, len(asked) :].tolist())
    return [character for character in answer if character.isdigit()]


def test_the_scores_are_those_of_a_plain_loop(runs: Runs) -> None:
    model = plain_models.load(runs.root / "judge")
    tokenizer = load_tokenizer(runs.root / "judge")
    unparsed = 0
    for step in runs.steps(WIDE):
        rollout = step.experience.rollout
        for row, length in enumerate(rollout.response_lengths):
            response = tokenizer.decode(rollout.response_ids[row, :length].tolist())
            digits = _digits(model, tokenizer, f"{rollout.prompts.text[row]}{response}+")
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


PAIRS = ["judge.compare=pairs", "judge.template='{{ response }}-{{ other }}+'"]
PAIRS_WIDE = Scenario("pairs, dp4", [*WIDE.overrides, *PAIRS])
PAIRS_DEEP = Scenario("pairs, tp2 pp2", [*DEEP.overrides, *PAIRS])


def _won(runs: Runs, responses: list[str]) -> list[float]:
    """The share that each of a prompt's responses wins, in both places against each other one."""
    model = plain_models.load(runs.root / "judge")
    tokenizer = load_tokenizer(runs.root / "judge")
    won = [0.0] * len(responses)
    for first, one in enumerate(responses):
        for second, other in enumerate(responses):
            if first == second:
                continue
            digits = _digits(model, tokenizer, f"{one}-{other}+")
            verdict = int(digits[-1]) / 9 if digits else 0.25
            won[first] += verdict
            won[second] += 1 - verdict
    return [share / (2 * (len(responses) - 1)) for share in won]


def test_the_responses_to_a_prompt_are_compared(runs: Runs) -> None:
    assert_same_on_every_layout(runs, PAIRS_WIDE, PAIRS_DEEP)
    tokenizer = load_tokenizer(runs.root / "data" / "tokenizer")
    step = runs.steps(PAIRS_DEEP)[0]
    prompts = step.experience.rollout.prompts
    for begin in range(0, len(step.responses), 4):
        texts = [tokenizer.decode(ids) for ids in step.responses[begin : begin + 4]]
        right = [text.strip() == str(prompts.ground_truth[begin]).strip() for text in texts]
        wanted = [2 * share + r for share, r in zip(_won(runs, texts), right, strict=True)]
        scores = step.experience.scores[begin : begin + 4].tolist()
        assert scores == pytest.approx(wanted, abs=1e-5)
    assert len(set(step.experience.scores.tolist())) > 8


def _mixed_up(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Each response gets the verdict on another one."""
    score = RankJudge.score
    patch.setattr(RankJudge, "score", lambda own, rows, of: score(own, [*rows[1:], rows[0]], of))


BROKEN = Scenario("broken", DEEP.overrides, _mixed_up)
BROKEN_PAIRS = Scenario("broken pairs", PAIRS_DEEP.overrides, _mixed_up)


def test_a_break_is_seen(runs: Runs) -> None:
    with pytest.raises(AssertionError):
        assert_same_on_every_layout(runs, WIDE, BROKEN)
    with pytest.raises(AssertionError):
        assert_same_on_every_layout(runs, PAIRS_WIDE, BROKEN_PAIRS)
