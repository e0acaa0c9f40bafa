"""Rules on literal responses. Those marked verl have the score that verl's compute_score gives."""

import pytest

from mrlhf.rewards.rules import ANSWERS, RULES, extract_number

FILLER = "x" * 300


@pytest.mark.parametrize(
    ("solution", "truth", "strict", "flexible"),
    [
        # verl
        ("So she has 18.\n#### 18", "18", 1.0, 1.0),
        ("#### 1,234,567", "1234567", 1.0, 1.0),
        ("#### -5", "-5", 1.0, 1.0),
        ("#### 17", "18", 0.0, 0.0),
        ("the answer is 18", "18", 0.0, 1.0),
        ("#### 3 then #### 18", "18", 1.0, 1.0),
        ("#### 18 then #### 3", "18", 0.0, 0.0),
        ("####18", "18", 0.0, 1.0),
        ("#### 18.0", "18", 0.0, 0.0),
        ("18 and that is all .", "18", 0.0, 1.0),
        ("no number", "18", 0.0, 0.0),
        ("", "18", 0.0, 0.0),
        (f"#### 18\n{FILLER}", "18", 0.0, 0.0),
        # ours is more lenient
        ("#### $18", "18", 1.0, 1.0),
        ("#### 18.", "18", 1.0, 1.0),
        ("it costs $1,000.", "1000", 0.0, 1.0),
        ("#### -$5", "-5", 1.0, 1.0),
        ("She makes 9 * 2 = $<<9*2=18>>18 per day\nA: 18", "18", 0.0, 1.0),
        ("... = 26\nA: 26", "18", 0.0, 0.0),
        ("#### 1,234", "1,234", 1.0, 1.0),
    ],
)
def test_gsm8k(solution, truth, strict, flexible):
    assert RULES["gsm8k"]("openai/gsm8k", solution, truth, {}) == strict
    assert RULES["gsm8k_flexible"]("openai/gsm8k", solution, truth, {}) == flexible


def test_extract_number():
    assert extract_number("a 1 b 2,5 #### 3", strict=False) == "3"
    assert extract_number("a 1 b 2.5 ... ,", strict=False) == "2.5"
    assert extract_number("#### .", strict=True) is None


@pytest.mark.parametrize(
    ("solution", "score"),
    [("85", 1.0), (" 85\n", 1.0), ("85.", 0.0), ("185", 0.0), ("", 0.0), ("8 5", 0.0)],
)
def test_exact_match(solution, score):
    assert RULES["exact_match"]("arithmetic", solution, "85", {}) == score


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("Work.\nMore.\n#### 18", 1.0),
        ("#### 18\n", 1.0),
        ("Work.\n#### -1,000.50", 1.0),
        ("Work. #### 18", 0.0),
        ("Work.\n#### 18 apples", 0.0),
        ("Work.\n#### 18\nmore", 0.0),
        ("#### 1\n#### 18", 0.0),
        ("Work.\n####18", 0.0),
        ("Work.\n#### ", 0.0),
        ("Work.\nA: 18", 0.0),
    ],
)
def test_format(solution, score):
    assert RULES["format"]("openai/gsm8k", solution, "18", {}) == score


def test_scores_are_floats():
    assert {type(rule("d", "1", "1", {})) for rule in RULES.values()} == {float}


def test_answers_are_what_the_rules_compare():
    solution = " 3 eggs\n#### $1,018. \n"
    assert {name: answer(solution) for name, answer in ANSWERS.items()} == {
        "exact_match": "3 eggs\n#### $1,018.",
        "gsm8k": "1018",
        "gsm8k_flexible": "1018",
    }
    assert ANSWERS["gsm8k"]("18") is None and ANSWERS["gsm8k_flexible"]("18") == "18"
