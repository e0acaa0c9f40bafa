"""Prompts, labeller and pairs of configs/recipes/english, without the real model."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mrlhf.config.load import load_config
from mrlhf.config.roots import PPOConfig
from tests.e2e.programs import ROOT
from tests.pages import commands_of
from tools.english import STAGES

COMMANDS = commands_of(
    "configs/recipes/english/README.md",
    "^make english|english/(prepare|prompts|answers|pairs|rm|ppo)",
) + commands_of("configs/recipes/english/README.md", "english/(grpo|summary)")
RECIPE = ROOT / "configs" / "recipes" / "english"
QUESTION = "Describe a stray dog in one sentence."


@pytest.fixture(scope="module")
def recipe() -> Mapping[str, ModuleType]:
    """The modules of the recipe."""
    pytest.importorskip("vaderSentiment", reason="vaderSentiment is not installed (make dev)")
    sys.path.insert(0, str(RECIPE))
    try:
        import labeller
        import pairs
        import prompts
        import summary
    finally:
        sys.path.remove(str(RECIPE))
    return {"labeller": labeller, "pairs": pairs, "prompts": prompts, "summary": summary}


def test_prompts_are_many_and_held_out_by_subject(recipe: Mapping[str, ModuleType]) -> None:
    prompts = recipe["prompts"]
    train = prompts.mixed(held_out=False)
    held_out = prompts.mixed(held_out=True)
    assert len(train) >= 600 and len(held_out) == 120

    questions = [row["question"] for row in train + held_out]
    assert len(set(questions)) == len(questions)
    assert all(row["prompt"] == [{"role": "user", "content": row["question"]}] for row in train)

    trained_on = {row["subject"] for row in train}
    assert trained_on.isdisjoint(row["subject"] for row in held_out)
    for row in held_out:  # not as a part of another subject either
        assert not any(row["subject"].rstrip(".") in question["question"] for question in train)

    def wordings(rows: list[dict[str, str]]) -> set[str]:
        return {row["question"].replace(row["subject"], "{}") for row in rows}

    assert wordings(held_out) == wordings(train)
    assert len(wordings(train)) >= 19
    assert len({row["subject"] for row in held_out[:12]}) > 6  # those that a report shows


def test_a_subject_is_shorter_than_what_counts_as_repeated(
    recipe: Mapping[str, ModuleType],
) -> None:
    """Else an answer could not name it; a sentence of news may not be said again."""
    labeller = recipe["labeller"]
    for kind in recipe["prompts"].KINDS[:3]:
        for subject in kind.subjects + kind.held_out:
            assert len(labeller.words(subject)) < labeller.LONGEST_RUN, subject


@pytest.mark.parametrize(
    ("answer", "tokens", "failed"),
    [
        ("A stray dog can be a good friend.", 9, ()),
        ("Dr. Grey says: 'A stray dog can be a good friend!'", 15, ()),
        ("A stray dog can be a good", 40, ("ends",)),
        ("A stray dog can be a good friend.", 40, ("ends",)),
        ("A stray dog can be good. I like it.", 11, ("one_sentence",)),
        ("A stray dog.", 4, ("one_sentence",)),
        ("- a stray dog\n- a good friend to have.", 12, ("one_sentence",)),
        ("To describe a stray dog in one sentence: friendly.", 11, ("own_words",)),
        ("A good dog is a good friend, a good one.", 12, ("no_repetition",)),
        ("It can be a very good friend.", 9, ("on_subject",)),
        ("good good good good good", 40, ("ends", "no_repetition", "on_subject")),
    ],
)
def test_the_form_of_an_answer(
    recipe: Mapping[str, ModuleType], answer: str, tokens: int, failed: tuple[str, ...]
) -> None:
    parts = _judge(recipe, answer, tokens)
    checks = ("ends", "one_sentence", "own_words", "no_repetition", "on_subject")
    assert tuple(name for name in checks if not parts[name]) == failed
    assert parts["form"] == pytest.approx(1 - len(failed) / 5)
    assert parts["score"] == parts["acc"] == pytest.approx(parts["tone"] * parts["form"])


def test_tone_is_sentiment_and_counts_a_word_once(recipe: Mapping[str, ModuleType]) -> None:
    tone = recipe["labeller"].tone
    assert tone("The table is made of wood.") == 0.5
    assert tone("A stray dog can be a good friend.") == pytest.approx(0.86345, abs=1e-4)
    assert tone("A stray dog is a terrible danger.") == pytest.approx(0.12105, abs=1e-4)
    assert tone("wonderful") == pytest.approx(0.78595, abs=1e-4)
    assert tone("wonderful, wonderful, Wonderful!") == pytest.approx(tone("wonderful,"), abs=1e-4)
    # It saturates: the fourth warm word adds much less than the second.
    warm = [tone(" ".join(("wonderful", "lovely", "happy", "great")[:n])) for n in (1, 2, 3, 4)]
    assert warm[1] - warm[0] > 3 * (warm[3] - warm[2]) > 0


def test_a_repeated_word_is_not_the_best_answer(recipe: Mapping[str, ModuleType]) -> None:
    plain = _judge(recipe, "A stray dog can be a good friend.", 9)["score"]
    assert _judge(recipe, "wonderful " * 40, 40)["score"] < 0.5 * plain


def test_the_choice_is_that_of_bradley_and_terry(recipe: Mapping[str, ModuleType]) -> None:
    labeller = recipe["labeller"]
    assert labeller.preference(0.5, 0.5) == 0.5
    assert labeller.preference(0.6, 0.5) == pytest.approx(0.8808, abs=1e-4)
    assert labeller.preference(0.5, 0.6) == pytest.approx(1 - 0.8808, abs=1e-4)

    draw = random.Random(3)
    chosen = sum(labeller.chooses_first(0.6, 0.5, draw) for _ in range(4000))
    assert chosen / 4000 == pytest.approx(0.8808, abs=0.03)


def test_pairs_are_drawn_and_their_limit_is_told(
    recipe: Mapping[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    for number in range(300):
        rows.append(_answer(number, "The dog is a friend.", 0.75))
        rows.append(_answer(number, "The dog is a good friend.", 0.86))
        rows += 2 * [_answer(number, "The dog is a dog.", 0.5)]  # equal: no pair
        rows.append(_answer(number, "The dog is a lovely, wonderful", 0.9, "length"))  # no pair
    for split in ("train", "held_out"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"answers_{split}.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["pairs.py", "--out", str(tmp_path)])
    recipe["pairs"].main()

    labels = json.loads((tmp_path / "labels.json").read_text(encoding="utf-8"))
    found = [json.loads(x) for x in (tmp_path / "pairs_held_out.jsonl").open(encoding="utf-8")]
    assert labels["held_out_pairs"] == len(found) == 300
    better = sum("good" in pair["chosen"] for pair in found) / 300
    assert labels["held_out_limit"] == pytest.approx(better, abs=1e-4)
    assert better == pytest.approx(0.9, abs=0.05)  # 1 / (1 + e^-2.2)

    # What is chosen of all answers against what is always rejected: less noise, a wider gap.
    found = [json.loads(x) for x in (tmp_path / "pairs_train.jsonl").open(encoding="utf-8")]
    assert labels["train_pairs"] == len(found) == 300
    assert 0.85 < sum("good" in pair["chosen"] for pair in found) / 300 < 0.95
    assert sum("a dog" in pair["rejected"] for pair in found) > 285
    assert labels["train_limit"] > 0.98
    best = [json.loads(line) for line in (tmp_path / "best.jsonl").open(encoding="utf-8")]
    assert len(best) == 300 and all("good" in row["response"] for row in best)
    assert not any("lovely" in json.dumps(row) for row in found + best)


def test_make_english_runs_the_commands_of_the_page() -> None:
    """In their order; it adds how the runs show themselves."""
    stages = [stage.command for stage in STAGES]
    told = [command for command in COMMANDS if any(at.startswith(command) for at in stages)]
    assert len(told) == len(stages)
    assert all(stage.startswith(command) for stage, command in zip(stages, told, strict=True))


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_a_run_rewards_answers_of_the_length_that_the_labeller_knows(
    recipe: Mapping[str, ModuleType], name: str
) -> None:
    config = load_config(PPOConfig, [RECIPE / f"{name}.yaml"], [])
    assert config.data.max_response_length == recipe["labeller"].LONGEST
    (term,) = (term for term in config.reward.terms if "labeller" in term.name)
    assert term.name == "configs/recipes/english/labeller.py:score"


def test_the_summary_has_the_figures_of_all_runs(
    recipe: Mapping[str, ModuleType], tmp_path: Path
) -> None:
    figures = {"start_accuracy": 0.5, "final_accuracy": 0.75, "kl_final": 0.1}
    figures |= {"start_sampled_accuracy": 0.4, "final_sampled_accuracy": 0.7}
    figures |= {"reward_start": -1.0, "reward_final": 2.0}
    _write(tmp_path / "ppo" / "summary.json", [figures])
    _write(tmp_path / "grpo" / "summary.json", [figures | {"final_accuracy": 0.8}])
    _write(tmp_path / "data" / "labels.json", [{"held_out_limit": 0.9, "train_pairs": 640}])
    rows = [{"step": 1, "val/accuracy": 0.5}, {"step": 2, "val/accuracy": 0.6}, {"step": 3}]
    _write(tmp_path / "rm" / "metrics.jsonl", rows)
    for run in ("ppo", "grpo"):
        _write(tmp_path / run / "validation" / "step_000000.jsonl", [_held_out("a b a b", False)])
        _write(tmp_path / run / "validation" / "step_000012.jsonl", [_held_out("a | b", True)])
    _write(tmp_path / "sums" / "summary.json", [{"start_accuracy": 0.1, "final_accuracy": 0.95}])

    found = recipe["summary"].gather(tmp_path, tmp_path / "sums", 900.0)
    expected = {
        "labeller_start": 0.5,
        "labeller_final": 0.75,
        "labeller_final_grpo": 0.8,
        "labeller_start_sampled": 0.4,
        "learned_reward_final": 2.0,
        "rm_pair_accuracy": 0.6,
        "rm_pair_limit": 0.9,
        "sums_accuracy_start": 0.1,
        "sums_accuracy_final": 0.95,
        "seconds": 900.0,
        "kl_final": 0.1,
        "words_start": 4.0,
        "distinct_1_start": 0.5,
        "distinct_2_start": 0.6667,
        "ended_start": 0.0,
        "ended_final": 1.0,
        "tone_final": 0.25,
    }
    assert {name: found[name] for name in expected} == expected

    *_, row = recipe["summary"].page(tmp_path).splitlines()
    assert row == "| Why? | a b a b … (0.50) | a \\| b (0.50) |"


def _write(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _held_out(response: str, stopped: bool) -> dict[str, Any]:
    prompt = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    terms = {"score/acc": 0.5, "score/tone": 0.25, "score/form": 1.0}
    return {"prompt": prompt, "response": response, "stopped": stopped, "terms": terms}


def _judge(recipe: Mapping[str, ModuleType], answer: str, tokens: int) -> dict[str, float]:
    extra = {"question": QUESTION, "subject": "a stray dog", "response_tokens": tokens}
    return recipe["labeller"].score("english", answer, None, extra)  # type: ignore[no-any-return]


def _answer(uid: int, response: str, reward: float, finish: str = "stop") -> dict[str, Any]:
    """A line of `mrlhf generate`, as far as pairs read it."""
    message = {"role": "user", "content": f"Describe dog {uid} in one sentence."}
    row = {"uid": uid, "prompt": [message], "response": response, "reward": reward}
    return row | {"finish_reason": finish}
