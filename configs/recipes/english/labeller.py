"""The labeller: what a good answer is, and a noisy choice between two answers.

The labeller stands for the people of InstructGPT. It likes a friendly tone in a well-formed
answer:

    score = tone x form, both from 0 to 1

Tone is the sentiment of vaderSentiment, form the share of five checks that the answer passes. Its
choices are noisy: they are drawn from the model of Bradley and Terry (1952), so that a reward model
cannot agree with all of them.

Where it breaks: sentiment saturates, so after some five warm words more of them change little, and
a list of different warm words with a full stop is a "sentence". It does not know whether an answer
is true. Words that occur again count once for the tone, so "wonderful wonderful ..." is not its
optimum.

`score` is the term of a reward (`reward.terms`). It also gives its score as `acc`, so that a run
whose reward is something else, such as a reward model, tells it of held-out answers as acc@1.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections.abc import Mapping
from typing import Any

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

# Answers of so many tokens were cut off; data.max_response_length of the recipe's runs.
LONGEST = 40
# How sure the labeller's choice is: a difference of 0.1 in the score decides 88 % of pairs.
SHARPNESS = 20.0
FEWEST_WORDS = 5
LONGEST_RUN = 6
# Words that say nothing about the subject, or about whether the question is repeated.
# fmt: off
_SMALL = frozenset((
    "a", "an", "and", "as", "at", "be", "by", "for", "from", "in", "into", "is", "it", "my", "of",
    "on", "one", "or", "our", "so", "that", "the", "their", "to", "was", "we", "who", "with", "you",
    "your",
))
# fmt: on


def score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """The score of an answer, and its parts; as mrlhf calls a reward function."""
    return judge(
        solution_str,
        question=extra_info["question"],
        subject=extra_info["subject"],
        tokens=extra_info["response_tokens"],
    )


def judge(answer: str, *, question: str, subject: str, tokens: int) -> dict[str, float]:
    """The score of an answer of so many tokens to a question about `subject`, with its parts."""
    checks = {
        "ends": ends(answer, tokens),
        "one_sentence": is_one_sentence(answer),
        "own_words": uses_own_words(answer, question),
        "no_repetition": repeats_no_word(answer),
        "on_subject": names(answer, subject),
    }
    friendly = tone(answer)
    form = sum(checks.values()) / len(checks)
    parts = {name: float(passed) for name, passed in checks.items()}
    total = friendly * form
    return {"score": total, "acc": total, "tone": friendly, "form": form, **parts}


def tone(answer: str) -> float:
    """The sentiment from 0, unfriendly, to 1; a word that occurs again does not count."""
    known: set[str] = set()
    kept = []
    for word in answer.split():
        plain = word.lower().strip(".,;:!?\"'")
        if plain not in known or plain in _SMALL:
            kept.append(word)
        known.add(plain)
    compound = _analyzer().polarity_scores(" ".join(kept))["compound"]
    return (1 + float(compound)) / 2


def ends(answer: str, tokens: int) -> bool:
    """Whether the answer was not cut off, and ends as a sentence does."""
    return tokens < LONGEST and re.search(r"[.!?]['\"”’)]*$", answer.strip()) is not None


def is_one_sentence(answer: str) -> bool:
    """Whether it is one line with at most one end of a sentence, and not a mere phrase."""
    text = re.sub(r"\b(Dr|Mr|Mrs|Ms|St)\.", r"\1", answer.strip())
    inner = re.findall(r"[.!?]+['\"”’)]*\s", text)
    return not inner and "\n" not in text and len(words(text)) >= FEWEST_WORDS


def uses_own_words(answer: str, question: str) -> bool:
    """Whether it repeats no six words in a row of the question; a subject has fewer."""
    return not _runs(words(answer)) & _runs(words(question))


def repeats_no_word(answer: str) -> bool:
    """Whether no word occurs more than twice; small words may."""
    said = [word for word in words(answer) if word not in _SMALL]
    return all(said.count(word) <= 2 for word in set(said))


def names(answer: str, subject: str) -> bool:
    """Whether a word of the subject occurs, in any form that begins with the same five letters."""
    stems = {word[:5] for word in words(subject) if word not in _SMALL and len(word) > 2}
    return any(word[:5] in stems for word in words(answer))


def words(text: str) -> list[str]:
    """The words of a text in small letters."""
    return re.findall(r"[a-z']+", text.lower().replace("’", "'"))


def _runs(said: list[str]) -> set[tuple[str, ...]]:
    return {tuple(said[at : at + LONGEST_RUN]) for at in range(len(said) - LONGEST_RUN + 1)}


def preference(first: float, second: float) -> float:
    """The probability that an answer of score `first` is chosen over one of score `second`."""
    return 1 / (1 + math.exp(-SHARPNESS * (first - second)))


def chooses_first(first: float, second: float, draw: random.Random) -> bool:
    """A noisy choice between two answers of these scores."""
    return draw.random() < preference(first, second)


@functools.cache
def _analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()
