"""Generates answers to the held-out prompts, and summarises their scores for each data set.

It knows when the prompts of the validation are due, and those of the test. It does not know how
responses are generated or scored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from mrlhf.config.trainer import PPOTrainerSection
from mrlhf.metrics.tally import standard_errors
from mrlhf.parallel.phases import Phases
from mrlhf.rollout.scoring import Scores
from mrlhf.trainers.ppo.report import SampleViewer
from mrlhf.trainers.ppo.setup import PPOParts

# The name of each split's stream of random numbers.
STREAMS = {"val": "validation", "test": "test"}
MANY_ANSWERS = ("/pass@", "/maj@")


class HeldOut:
    """The held-out prompts of a run; every rank calls each method together."""

    def __init__(
        self, section: PPOTrainerSection, phases: Phases, parts: PPOParts, samples: SampleViewer
    ) -> None:
        """Ask nothing yet; `samples` shows some answers of the validation."""
        sampling = parts.sampling
        self._section = section
        self._phases = phases
        self._parts = parts
        self._samples = samples
        self._greedy = sampling.greedy()
        self._sampled = replace(sampling.without_records(), n=section.val_n)

    def due(self, number: int) -> list[str]:
        """The splits that are due after training step `number`; 0 is before the first one."""
        last = self._parts.inputs.steps
        if number == 0:
            due = ["val", "test"] if self._section.val_before_train else []
        elif number == last:
            due = ["val", "test"]
        else:
            due = ["val"] if self._section.test_is_due(number, last) else []
        return [split for split in due if split in self._parts.inputs.held_out]

    def after_step(self, number: int) -> dict[str, float]:
        """Measure the splits that are due after training step `number`; none may be."""
        if not self.due(number):
            return {}
        with self._phases.enter("testing"):
            return self.measure(number)

    def measure(self, number: int) -> dict[str, float]:
        """Generate greedy and, if asked for, sampled answers to the prompts that are due.

        The engine gets the policy's weights, and sleeps afterwards.
        """
        self._parts.generator.take_weights(version=number)
        splits = self.due(number)
        generate = self._parts.generator.generate
        prompts = self._parts.inputs.held_out

        greedy = {}
        sampled = {}
        for split in splits:
            stream = STREAMS[split]
            greedy[split] = generate(prompts[split], self._greedy, stream).rollout
            if self._section.val_sampled:
                sampled[split] = generate(prompts[split], self._sampled, stream).rollout
        self._parts.generator.sleep()  # scoring may need the memory

        metrics: dict[str, float] = {}
        score = self._parts.scorer.score
        for split in splits:
            sources = prompts[split].data_source
            greedy[split], scores = score(greedy[split])
            if split == "val":
                title = "held-out prompts, greedy"
                self._samples.show("held-out", title, greedy[split], scores)
                self._samples.keep(number, greedy[split], scores, self._section.val_samples)
            scores = replace(scores, total=greedy[split].with_turn_rewards(scores.total))
            greedy_metrics = summarise(scores, sources, n=1)
            metrics |= prompt_errors(split, scores, sources, n=1)
            sampled_metrics: dict[str, float] = {}
            if split in sampled:
                n = self._section.val_n
                sampled[split], scores = score(sampled[split], with_answers=n > 1)
                scores = replace(scores, total=sampled[split].with_turn_rewards(scores.total))
                sampled_metrics = summarise(scores, sources, n)
                metrics |= prompt_errors(f"{split}_sampled", scores, sources, n)
            metrics |= held_out_metrics(split, greedy_metrics, sampled_metrics)
        return metrics


def summarise(scores: Scores, sources: Sequence[str], n: int) -> dict[str, float]:
    """Summarise the scores of `n` responses to each prompt.

    A response is right if its correctness is above one half.

    Args:
        scores: the scores of all responses [prompts * n], those of one prompt next to each other.
        sources: the data source of each prompt.

    Returns:
        For each data source:
        `<data_source>/reward_mean` over all responses;
        `<data_source>/acc@1` over all responses, if a reward term tells right from wrong, and
        `<data_source>/pass@<n>`, if n > 1 too;
        `<data_source>/maj@<n>`, if that term also gives the answers;
        `<data_source>/acc_unknown`, the number of responses that the term does not judge, if there
        are any: they count in none of the three, nor does a prompt that has no other.
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


def prompt_errors(kind: str, scores: Scores, sources: Sequence[str], n: int) -> dict[str, float]:
    """The standard errors of `acc@1`, or of `reward_mean` if nothing tells right from wrong."""
    totals = scores.total.tolist()
    correct = scores.correct or [math.nan] * len(totals)
    right: dict[str, list[float]] = {}
    rewards: dict[str, list[float]] = {}
    for prompt, source in enumerate(sources):
        rows = range(prompt * n, prompt * n + n)
        rewards.setdefault(source, []).append(fmean(totals[row] for row in rows))
        known = [correct[row] for row in rows if not math.isnan(correct[row])]
        if known:
            right.setdefault(source, []).append(fmean(known))

    means = {}
    for source in rewards:
        name, values = ("acc@1", right) if source in right else ("reward_mean", rewards)
        means[f"{kind}/{source}/{name}"] = values[source]
    return standard_errors(means)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> bool:
    """Whether the most frequent answer to a prompt is right.

    This is self-consistency, https://arxiv.org/abs/2203.11171. Of equally frequent answers the one
    that was drawn first counts. None is no answer; a prompt without answers counts as wrong.
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
    """The metrics of the held-out prompts of `split`, "val" or "test", from those of `summarise`.

    Metrics that need many samples (`pass@`, `maj@`) are named `<split>/<name>`, like those of the
    greedy answers; the others of the samples are named `<split>_sampled/<name>`.
    """
    metrics = {f"{split}/{name}": value for name, value in greedy.items()}
    for name, value in sampled.items():
        needs_many = any(mark in name for mark in MANY_ANSWERS)
        prefix = split if needs_many else f"{split}_sampled"
        metrics[f"{prefix}/{name}"] = value
    return metrics
