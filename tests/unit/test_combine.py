"""Weighted terms: their mix, what is kept of each, and what is refused."""

import math
from contextlib import closing

import pytest

from mrlhf.errors import ConfigError, RewardError
from mrlhf.rewards.combine import RewardFunction, mix
from mrlhf.rewards.interface import RewardInput
from mrlhf.rewards.term_names import term_names


def inputs(*solutions):
    return [RewardInput("openai/gsm8k", "q", solution, "18", {}, 4) for solution in solutions]


def test_mix():
    assert mix({"a": [1.0, 2.0], "b": [10.0, 0.5]}, {"b": 0.1, "a": -1.0}) == pytest.approx(
        [0.0, -1.95]
    )
    assert mix({"a": []}, {"a": 1.0}) == []


@pytest.mark.parametrize(
    ("terms", "weights", "message"),
    [
        ({"a": [1.0]}, {"b": 1.0}, "give both for each term"),
        ({"a": [1.0], "b": []}, {"a": 1.0, "b": 1.0}, "different numbers of scores"),
        ({"a": [0.0, math.nan]}, {"a": 0.0}, "term a gives response 1 the score nan"),
        ({"a": [1e16]}, {"a": 0.0}, r"term a gives response 0 the score 1e\+16; return a finite"),
        ({"a": [1.0, 10.0]}, {"a": 2e14}, r"a, weighted, gives response 1 the score 2e\+15"),
        (
            {"a": [1e15], "b": [-1e15]},
            {"a": 1e300, "b": 1e300},
            "weighted, gives response 0 .* inf",
        ),
        ({"a": [8e14], "b": [8e14]}, {"a": 1.0, "b": 1.0}, r"sum of all terms .* 1.6e\+15"),
    ],
)
def test_mix_refuses(terms, weights, message):
    with pytest.raises(RewardError, match=message):
        mix(terms, weights)


def test_weighs_rules_and_keeps_each_score():
    reward = RewardFunction([("gsm8k", 1.0), ("format", 0.25)])
    result = reward.score(inputs("Work.\n#### 18", "Work.\n#### 17", "#### 18 or so"))
    assert result.scores == [1.25, 0.25, 1.0]
    assert result.metrics == {"gsm8k": [1.0, 0.0, 1.0], "format": [1.0, 1.0, 0.0]}
    assert result.answers == {"gsm8k": ["18", "17", "18"]}
    assert RewardFunction([("gsm8k", 1.0)]).score(inputs("none", "#### 3")).answers == {
        "gsm8k": [None, "3"]
    }


def test_given_scores_alone_need_no_text():
    assert not RewardFunction([("reward_model", 1.0)]).reads_text
    assert RewardFunction([("reward_model", 1.0), ("format", 0.5)]).reads_text


def test_without_terms_every_score_is_0():
    with closing(RewardFunction([])) as function:
        result = function.score(inputs("#### 18", "?"))
    assert result.scores == [0.0, 0.0]
    assert not result.metrics and not function.reads_text


def test_external_scores():
    reward = RewardFunction([("reward_model", 0.5), ("gsm8k", 2.0)])
    assert reward.external == ["reward_model"]
    result = reward.score(inputs("#### 18", "#### 1"), {"reward_model": [3.0, -1.0]})
    assert result.scores == [3.5, -0.5]
    assert result.metrics["reward_model"] == [3.0, -1.0]

    with pytest.raises(RewardError, match="give both for each term"):
        reward.score(inputs("#### 18"))
    with pytest.raises(RewardError, match="different numbers"):
        reward.score(inputs("#### 18"), {"reward_model": [1.0, 2.0]})
    with pytest.raises(
        RewardError, match=r"term reward_model gives .* solution '#### 1', prompt 'q'"
    ):
        reward.score(inputs("#### 18", "#### 1"), {"reward_model": [1.0, math.inf]})
    with pytest.raises(RewardError, match="brought 1 scores for 2 responses"):
        RewardFunction([("reward_model", 1.0)]).score(inputs("a", "b"), {"reward_model": [1.0]})


def test_user_functions_and_their_metrics(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def bonus(data_source, solution_str, ground_truth, extra_info):\n"
        "    rest = {'long': 1} if len(solution_str) > 2 else {}\n"
        "    return {'score': len(solution_str), **rest}\n"
    )
    with closing(RewardFunction([("exact_match", 1.0), (f"{file}:bonus", 0.1)])) as reward:
        assert reward.weights == {"exact_match": 1.0, "bonus": 0.1}
        result = reward.score(inputs("18", "180"))
    assert result.scores == pytest.approx([1.2, 0.3])
    assert result.metrics["bonus"] == [2.0, 3.0]
    assert math.isnan(result.metrics["bonus/long"][0]) and result.metrics["bonus/long"][1] == 1.0


def test_a_users_answers(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def last(data_source, solution_str, ground_truth, extra_info):\n"
        "    words = solution_str.split()\n"
        "    return {'score': 0, 'acc': 1, **({'pred': words[-1]} if words else {})}\n"
        "def plain(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1\n"
    )
    with closing(RewardFunction([(f"{file}:plain", 1.0), (f"{file}:last", 0.1)])) as reward:
        result = reward.score(inputs("so it is 18", "", "18"))
    assert result.answers == {"last": ["18", None, "18"]}
    assert set(result.metrics) == {"plain", "last", "last/acc"}


def test_functions_of_the_same_name_are_told_apart_by_their_files(tmp_path):
    for name, score in (("q1", 1), ("q2", 10)):
        (tmp_path / f"{name}.py").write_text(
            "def f(data_source, solution_str, ground_truth, extra_info):\n"
            f"    return {{'score': {score}, 'acc': 1, 'pred': '{name}'}}\n"
        )
    terms = [(f"{tmp_path}/q1.py:f", 1.0), (f"{tmp_path}/q2.py:f", 0.5)]
    with closing(RewardFunction(terms)) as reward:
        result = reward.score(inputs("18"))
    assert reward.weights == {"q1.f": 1.0, "q2.f": 0.5}
    assert result.scores == [6.0]
    assert result.metrics == {"q1.f": [1], "q2.f": [10], "q1.f/acc": [1], "q2.f/acc": [1]}
    assert result.answers == {"q1.f": ["q1"], "q2.f": ["q2"]}


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        (["gsm8k", "a/q.py:f", "q.py:g"], ["gsm8k", "f", "g"]),
        (["a/q.py:f", "b/q.py:f", "g.py:f"], ["a.q.f", "b.q.f", "g.f"]),
        (["gsm8k", "my.py:gsm8k"], ["gsm8k", "my.gsm8k"]),
        (["my.py:reward_model"], ["my.reward_model"]),
    ],
)
def test_names_of_terms(terms, names):
    assert term_names(terms) == names


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([("exactmatch", 1.0)], "did you mean exact_match"),
        ([("zzz", 1.0)], "use one of exact_match, "),
        ([("gsm8k", 1.0), ("gsm8k", 2.0)], "holds 'gsm8k' 2 times; keep one"),
        ([("f.py:f", 1.0), ("./f.py:f", 2.0)], "holds './f.py:f' 2 times; keep one"),
        ([("gsm8k", math.inf)], "weights must be finite"),
    ],
)
def test_refuses_terms(terms, message):
    with pytest.raises(ConfigError, match=message):
        RewardFunction(terms)


def test_refuses_a_missing_file():
    with pytest.raises(RewardError, match="there is no file"):
        RewardFunction([("nowhere.py:f", 1.0)])
