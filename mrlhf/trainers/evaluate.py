"""Measures the policy on held-out prompts: mean reward and accuracy of each data set, over one or
many answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from mrlhf.batch import Rollout
from mrlhf.rollout.scoring import Scorer, Scores

OF_MANY = ("/pass@", "/maj@")


def measure(scorer: Scorer, rollout: Rollout, n: int = 1) -> dict[str, float]:
    """Score a rollout of `n` responses a prompt and sum it up; every rank calls it.

    Returns:
        `<data_source>/reward_mean` over all responses; where a reward term tells right from wrong,
        `.../acc@1` over all responses and, for n > 1, `.../pass@<n>`; where the term says what each
        answer is, `.../maj@<n>` too.
    """
    return summarise(scorer.score(rollout, with_answers=n > 1), rollout.prompts.data_source[::n], n)


def summarise(scores: Scores, sources: Sequence[str], n: int) -> dict[str, float]:
    """The metrics of `measure` from its scores; right is a response whose correctness is above one
    half.

    Args:
        scores: of every response [prompts * n], those of one prompt side by side.
        sources: data source of each prompt.
        n: responses a prompt.
    """
    assert len(scores.total) == len(sources) * n, (
        f"{len(scores.total)} scores of {len(sources)} prompts x {n}"
    )
    prompts_of: dict[str, list[int]] = {}
    for prompt, source in enumerate(sources):
        prompts_of.setdefault(source, []).append(prompt)
    metrics = {}
    for source, prompts in prompts_of.items():
        groups = [range(prompt * n, prompt * n + n) for prompt in prompts]
        rows = [row for group in groups for row in group]
        metrics[f"{source}/reward_mean"] = float(scores.total[rows].mean())
        if scores.correct is None:
            continue
        right = scores.correct
        metrics[f"{source}/acc@1"] = fmean(right[row] for row in rows)
        if n > 1:
            metrics[f"{source}/pass@{n}"] = fmean(
                any(right[row] > 0.5 for row in group) for group in groups
            )
        if n > 1 and scores.answers is not None:
            answers = scores.answers
            votes = [
                majority([answers[row] for row in group], [right[row] > 0.5 for row in group])
                for group in groups
            ]
            metrics[f"{source}/maj@{n}"] = fmean(votes)
    return metrics


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> bool:
    """Whether the most frequent answer of one prompt is right: self-consistency,
    https://arxiv.org/abs/2203.11171.

    Of answers equally frequent, the one drawn first counts. A response without an answer (None) has
    no vote; where none has one, the prompt counts as wrong.
    """
    votes = Counter(
        answer for answer in answers if answer is not None
    )  # in the order of first occurrence
    if not votes:
        return False
    return right[answers.index(votes.most_common(1)[0][0])]


def validation_metrics(
    greedy: Mapping[str, float], sampled: Mapping[str, float]
) -> dict[str, float]:
    """What a validation reports: `val/` greedy answers and what is said of many samples,
    `val_sampled/` the rest.

    Args:
        greedy: metrics of `measure` on greedy answers.
        sampled: metrics of `measure` on samples; empty where there are none.
    """
    metrics = {f"val/{name}": value for name, value in greedy.items()}
    for name, value in sampled.items():
        of_many = any(mark in name for mark in OF_MANY)
        metrics[f"{'val' if of_many else 'val_sampled'}/{name}"] = value
    return metrics
