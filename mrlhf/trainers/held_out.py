"""Asks the policy the held-out prompts: those of the validation, and those of the test.

It knows when each are due. It does not know how responses are generated or scored.
"""

from __future__ import annotations

from dataclasses import replace

from mrlhf.config.trainer import PPOTrainerSection
from mrlhf.inference.base import SamplingParams
from mrlhf.trainers.evaluate import held_out_metrics, summarise
from mrlhf.trainers.ppo_setup import Parts
from mrlhf.trainers.samples import SampleViewer

# Names the random numbers of each split.
STREAMS = {"val": "validation", "test": "test"}


class HeldOut:
    """The held-out prompts of a run; every rank calls each method together."""

    def __init__(
        self,
        section: PPOTrainerSection,
        parts: Parts,
        sampling: SamplingParams,
        samples: SampleViewer,
    ) -> None:
        """Ask nothing yet.

        Args:
            section: when to ask, and whether for samples as well as for greedy answers.
            parts: the parts of the run.
            sampling: how training samples.
            samples: shows some answers of the validation.
        """
        self._section = section
        self._parts = parts
        self._samples = samples
        self._greedy = SamplingParams(
            temperature=0.0,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sampling.stop_token_ids,
            stop=sampling.stop,
            seed=sampling.seed,
        )
        self._sampled = replace(sampling, n=section.val_n, record_experts=False)

    def due(self, number: int) -> list[str]:
        """Which prompts are asked after training step `number`; 0 is before the first one.

        Those of the validation every `test_freq` steps and at both ends of the run; those of the
        test at both ends alone.
        """
        last = self._parts.steps
        if number == 0:
            due = ["val", "test"] if self._section.val_before_train else []
        elif number == last:
            due = ["val", "test"]
        else:
            due = ["val"] if self._section.test_is_due(number, last) else []
        return [split for split in due if split in self._parts.held_out]

    def measure(self, number: int) -> dict[str, float]:
        """Greedy and, if asked for, sampled answers to the prompts that are due.

        The engine must hold the policy's weights; it sleeps afterwards.
        """
        splits = self.due(number)
        generate = self._parts.generator.generate
        prompts = self._parts.held_out

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
            scores = score(greedy[split])
            if split == "val":
                title = "held-out prompts, greedy"
                self._samples.show("held-out", title, greedy[split], scores)
            greedy_metrics = summarise(scores, sources, n=1)
            sampled_metrics: dict[str, float] = {}
            if split in sampled:
                n = self._section.val_n
                scores = score(sampled[split], with_answers=n > 1)
                sampled_metrics = summarise(scores, sources, n)
            metrics |= held_out_metrics(split, greedy_metrics, sampled_metrics)
        return metrics
