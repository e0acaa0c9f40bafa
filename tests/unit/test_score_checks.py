"""Scores that training cannot use are refused in one line, after shaping and as advantages."""

import re

import pytest
import torch

from mrlhf.batch import Prompts
from mrlhf.config.algorithm import AlgorithmSection
from mrlhf.config.reward import RewardSection
from mrlhf.errors import ConfigError, RewardError
from mrlhf.roles.actor import Evaluation
from mrlhf.rollout.collector import Collected
from mrlhf.rollout.components import RewardComponents, reward_components
from mrlhf.rollout.score_checks import check_correctness
from mrlhf.rollout.scoring import Scores
from mrlhf.trainers.ppo.experience import ModelOutputs, make_experience
from tests.rollouts import as_episodes, make_rollout

HUGE = 3e38
MASK = torch.tensor([[True, True], [True, False]])
PROMPTS = Prompts(
    [[1], [1]],
    [7, 7],
    ["What is 2 + 2?\nThink first, and then give the answer.", "What"],
    ["", ""],
    ["", ""],
    [{}, {}],
)
RESPONSE = "response 1 to prompt 7 ('What is 2 + 2? Think first, and then giv...')"


def _rollout():
    engine = torch.full((2, 2), -1.0).masked_fill(~MASK, 0)
    return make_rollout(PROMPTS, [0, 1], MASK.long(), MASK, engine, torch.tensor([True, True]))


def _experience(scores, **algorithm):
    section = AlgorithmSection.model_validate(algorithm)
    totals = torch.tensor(scores)
    collected = Collected(_rollout(), Scores(totals, {}), None, 3, {})
    policy = Evaluation(torch.full((2, 2), -1.0), torch.zeros(2, 2), None)
    outputs = ModelOutputs(policy, None, torch.zeros(2, 2))
    return make_experience(collected, totals, outputs, section, 0.1)


@pytest.mark.parametrize(
    ("algorithm", "what"),
    [
        ({"adv_estimator": "gpg", "f_norm": 1e-3}, "an advantage"),
        ({"adv_estimator": "rloo"}, "an advantage"),
        ({"adv_estimator": "grpo"}, None),
        ({"adv_estimator": "reinforce_plus_plus"}, None),
    ],
)
def test_advantages_are_finite_or_refused(algorithm, what):
    scores = [HUGE, -HUGE]
    if what is None:
        assert _experience(scores, **algorithm)[0].advantages.isfinite().all()
        return
    line = (
        f"algorithm.adv_estimator {algorithm['adv_estimator']} gives a token of {RESPONSE}, whose "
        f"score is 3e+38, {what} that is not a finite float32; the scores of the batch are too "
        "large, so make them smaller, for example by their weight in reward.terms"
    )
    with pytest.raises(RewardError, match=f"^{re.escape(line)}$"):
        _experience(scores, **algorithm)


def test_numbers_that_a_model_spoils_are_not_blamed_on_scores():
    section = AlgorithmSection.model_validate({})
    collected = Collected(_rollout(), Scores(torch.ones(2), {}), None, 3, {})
    policy = Evaluation(torch.full((2, 2), -1.0), torch.zeros(2, 2), None)
    outputs = ModelOutputs(policy, None, torch.full((2, 2), torch.nan))
    experience, _ = make_experience(collected, torch.ones(2), outputs, section, 0.1)
    assert experience.advantages[MASK].isnan().all()  # the update skips such a step


def test_correctness_that_no_term_reports():
    check_correctness([1.0, 0.0], "actor.positive_lm_coef 0.1")
    line = (
        "actor.positive_lm_coef 0.1 needs to know which responses are right, but no reward term "
        "has said so for any response of the batch; let your function return acc (0 or 1) beside "
        "its score, or add {name: exact_match, weight: 0} or gsm8k to reward.terms"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        check_correctness(None, "actor.positive_lm_coef 0.1")


TERMS = {
    "format": [1.0, 0.0],
    "marker": [0.5, 0.25],
    "other": [7.0, 8.0],
    "marker/score_of_style": [1.0, 9.0],
    "marker/style": [2.0, 4.0],
    "other/style": [0.0, 0.0],
    "marker/acc": [1.0, float("nan")],
}


REWARD = RewardSection.model_validate(
    {
        "terms": [
            {"name": "format", "weight": 0.5},
            {"name": "my.py:marker"},
            {"name": "my.py:other", "weight": 0.0},
        ]
    }
)


STYLE = {"gdpo_reward_keys": ["score_of_style", "other"], "gdpo_reward_weights": [2, -1]}
OF_TURNS = {"gdpo_reward_keys": ["turn_rewards", "marker"], "gdpo_reward_weights": [3, 1]}
PAID = [[0.25, 0.5], [2.0]]


@pytest.mark.parametrize(
    ("turn_rewards", "algorithm", "names", "weights"),
    [
        (None, {}, ("format", "marker"), (0.5, 1.0)),
        (None, {"gdpo_reward_keys": ["marker", "format"]}, ("marker", "format"), (1.0, 1.0)),
        (None, STYLE, ("marker/score_of_style", "other"), (2.0, -1.0)),
        # Rewards of turns are compared as one term.
        (PAID, {}, ("format", "marker", "turn_rewards"), (0.5, 1.0, 1.0)),
        (PAID, {"gdpo_reward_keys": ["marker"]}, ("marker",), (1.0,)),
        (PAID, OF_TURNS, ("turn_rewards", "marker"), (3.0, 1.0)),
        ([[], []], {}, ("format", "marker"), (0.5, 1.0)),
        ([[], []], {"gdpo_reward_keys": ["turn_rewards"]}, ("turn_rewards",), (1.0,)),
    ],
)
def test_terms_are_found_by_name(turn_rewards, algorithm, names, weights):
    section = AlgorithmSection.model_validate(algorithm)
    rollout = _rollout() if turn_rewards is None else as_episodes(_rollout(), turn_rewards)
    found = reward_components(Scores(torch.zeros(2), TERMS), rollout, section, REWARD)
    assert (found.names, found.weights) == (names, weights)
    columns = {**TERMS, "turn_rewards": [sum(own) for own in turn_rewards or []]}
    assert found.scores.tolist() == [columns[name] for name in names]


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("style", "style may be any of marker/style, other/style; give the full name"),
        (
            "length",
            "no response has a score named length; those reported are format, marker, other, "
            "marker/score_of_style, marker/style, other/style, marker/acc",
        ),
        (
            "acc",
            "marker/acc is nan for a response to prompt 7; gdpo compares this score, so every "
            "response must have one",
        ),
    ],
)
def test_terms_that_cannot_be_compared_are_refused(key, line):
    section = AlgorithmSection.model_validate({"gdpo_reward_keys": [key]})
    with pytest.raises(RewardError, match=f"^algorithm.gdpo_reward_keys: {re.escape(line)}$"):
        reward_components(Scores(torch.zeros(2), TERMS), _rollout(), section, REWARD)


def test_terms_whose_functions_have_the_same_name():
    terms = [{"name": "q1.py:f"}, {"name": "q2.py:f", "weight": 0.5}]
    reward = RewardSection.model_validate({"terms": terms})
    scores = Scores(torch.zeros(2), {"q1.f": [1.0, 2.0], "q2.f": [3.0, 4.0]})
    found = reward_components(scores, _rollout(), AlgorithmSection(), reward)
    assert (found.names, found.weights) == (("q1.f", "q2.f"), (1.0, 0.5))
    assert found.scores.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_metrics_of_terms():
    table = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    assert RewardComponents(("a", "b"), (1.0, 1.0), table).metrics() == {
        "gdpo/a/mean": 2.0, "gdpo/a/std": 1.0, "gdpo/a/max": 3.0, "gdpo/a/min": 1.0,
        "gdpo/b/mean": 2.0, "gdpo/b/std": 0.0, "gdpo/b/max": 2.0, "gdpo/b/min": 2.0,
    }  # fmt: skip
