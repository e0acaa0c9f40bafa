"""Measures the policy on held-out prompts: mean reward and accuracy on each data set.

A prompt may have one answer or many. This file does not know how responses are generated or scored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from mrlhf.rollout.scoring import Scores

MANY_ANSWERS = ("/pass@", "/maj@")


def summarise(scores: Scores, sources: Sequence[str], n: int) -> dict[str, float]:
    """Summarise the scores of `n` responses to each prompt.

    A response is right if its correctness is above one half.

    Args:
        scores: the scores of all responses [prompts * n], those of one prompt side by side.
        sources: the data source of each prompt.
        n: responses to each prompt.

    Returns:
        For each data source:
        `<data_source>/reward_mean` over all responses;
        `<data_source>/acc@1` over all responses, if a reward term tells right from wrong, and
        `<data_source>/pass@<n>`, if n > 1 too;
        `<data_source>/maj@<n>`, if that term also says what each answer is;
        `<data_source>/acc_unknown`, the number of responses of which that term says nothing, if
        there are any: they count in none of the three, nor does a prompt that has no other.
    """
    assert len(scores.total) == len(sources) * n, (
        f"{len(scores.total)} scores of {len(sources)} prompts x {n}"
    )

    prompts_of: dict[str, list[int]] = {}
    for prompt, source in enumerate(sources):
        prompts_of.setdefault(source, []).append(prompt)

    correct = scores.correct
    metrics = {}
    for source, prompts in prompts_of.items():
        prompt_groups = [range(prompt * n, prompt * n + n) for prompt in prompts]
        rows = [row for prompt_group in prompt_groups for row in prompt_group]
        metrics[f"{source}/reward_mean"] = float(scores.total[rows].double().mean())

        if correct is None:
            continue
        known = [correct[row] for row in rows if not math.isnan(correct[row])]
        if len(known) < len(rows):
            metrics[f"{source}/acc_unknown"] = float(len(rows) - len(known))
        if not known:
            continue
        metrics[f"{source}/acc@1"] = fmean(known)
        if n == 1:
            continue

        passed = []
        votes = []
        for prompt_group in prompt_groups:
            if all(math.isnan(correct[row]) for row in prompt_group):
                continue
            right = [correct[row] > 0.5 for row in prompt_group]
            passed.append(any(right))
            if scores.answers is not None:
                answers = [scores.answers[row] for row in prompt_group]
                votes.append(majority(answers, right))
        metrics[f"{source}/pass@{n}"] = fmean(passed)
        if scores.answers is not None:
            metrics[f"{source}/maj@{n}"] = fmean(votes)
    return metrics


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> bool:
    """Whether the most frequent answer to a prompt is right.

    This is self-consistency, https://arxiv.org/abs/2203.11171. If several answers are equally
    frequent, the one that was drawn first counts. A response without an answer (None) has no vote;
    if no response has one, the prompt counts as wrong.
    """
    # A Counter keeps the order of first occurrence, also among equally frequent answers.
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False

    winner, _ = votes.most_common(1)[0]
    return right[answers.index(winner)]


def held_out_metrics(
    split: str, greedy: Mapping[str, float], sampled: Mapping[str, float]
) -> dict[str, float]:
    """The metrics that a run reports of held-out prompts.

    Args:
        split: "val" or "test".
        greedy: what `summarise` says of greedy answers.
        sampled: what it says of sampled answers; empty if there are none.

    Returns:
        `<split>/<name>` for greedy answers and for what only many samples can tell (`pass@`,
        `maj@`); `<split>_sampled/<name>` for the rest of the samples' metrics.
    """
    metrics = {f"{split}/{name}": value for name, value in greedy.items()}
    for name, value in sampled.items():
        needs_many = any(mark in name for mark in MANY_ANSWERS)
        prefix = split if needs_many else f"{split}_sampled"
        metrics[f"{prefix}/{name}"] = value
    return metrics
