"""Reports a PPO step: its metrics, some samples, and the files that it leaves.

It changes nothing in the run. Metrics of a phase come from the phase; these are of the whole step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mrlhf.batch import Experience, Rollout, Sequences
from mrlhf.config.roots import PPOConfig
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import TrainingError
from mrlhf.metrics import data_metrics, throughput_metrics
from mrlhf.models.flops import training_flops
from mrlhf.parallel.collectives import wait_for_all
from mrlhf.parallel.device_memory import memory_metrics
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.parallel.phases import timing_metrics
from mrlhf.rollout.collector import Collected
from mrlhf.rollout.scoring import Scores
from mrlhf.run.board import ShownSample
from mrlhf.run.startup import Run
from mrlhf.trainers.ppo.dump import Dump, save_batch, write_dump, write_validation
from mrlhf.trainers.ppo.resume import Updating
from mrlhf.trainers.ppo.setup import PPOParts
from mrlhf.trainers.ppo.work import Cuts

logger = logging.getLogger(__name__)

SAMPLES_EVERY = 10  # training steps, where there are no held-out prompts to show
_MOST_CHARACTERS = 600


class StepReport:
    """Reports each step; every rank calls each method together."""

    def __init__(self, config: PPOConfig, run: Run, parts: PPOParts, samples: SampleViewer) -> None:
        self._config = config
        self._run = run
        self._parts = parts
        self._samples = samples

    def of_step(
        self, updating: Updating, cuts: Cuts, validated: dict[str, float]
    ) -> dict[str, float]:
        """Show and write down a complete step; returns all its metrics.

        `validated` are the metrics of the validation after it.
        """
        number = updating.number
        collected = updating.collected
        experience = updating.experience

        shows_training = "val" not in self._parts.inputs.held_out
        if shows_training and (number == 1 or number % SAMPLES_EVERY == 0):
            title = f"training step {number}"
            self._samples.show("training", title, collected.rollout, collected.scores)
        if self._config.rollout.dump_is_due(number):
            with self._run.phases.enter("dump"):
                self._dump(updating, cuts)
        self._run.board.distributions = {
            "critic/score": experience.scores.tolist(),
            "response_length": collected.rollout.response_lengths,
        }

        seconds = self._run.end_step(number)
        metrics = updating.metrics | validated
        metrics |= self._run.factory.machine.compute_on_leader(
            lambda: self._batch_metrics(collected, experience, seconds)
        )
        for role, engine in self._parts.trained().items():
            cut = cuts.of(role)
            metrics |= cut.balance.metrics(role, engine.groups.layout)
            metrics |= self._utilisation(role, updating, cuts.read_by(role), cut, seconds)
        memory = memory_metrics(self._run.phases.memory.take_peaks())
        return metrics | memory | timing_metrics(seconds)

    def of_failure(self, error: TrainingError, updating: Updating) -> TrainingError:
        """The error, naming the file in which the batch of the step was saved."""
        path = self._run.output_dir / f"failed_step_{updating.number:06d}.pt"
        if self._run.is_main_rank:
            save_batch(path, updating.experience)
        wait_for_all(None)  # a rank that ends earlier would end the others before the file is whole
        return TrainingError(f"training step {updating.number}: {error}; the batch is in {path}")

    def _dump(self, updating: Updating, cuts: Cuts) -> None:
        """Write the responses of the step to a file."""
        section = self._config.rollout
        new_logprobs = None
        if section.dump_format == "parquet" and section.dump_ratios:
            rollout = updating.collected.rollout
            new_logprobs = self._parts.actor.evaluate(rollout, cuts.actor).logprobs
        if self._run.is_main_rank:
            scores = updating.collected.scores
            dump = Dump(
                updating.number, updating.experience, scores, updating.entropy, new_logprobs
            )
            write_dump(self._run.output_dir, dump, section, self._parts.inputs.tokenizer)

    def _batch_metrics(
        self, collected: Collected, experience: Experience, seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Metrics of scores, advantages, lengths, speed (from each phase's seconds) and memory."""
        rollout = collected.rollout
        drawn = (~rollout.given).nonzero()[:, 0].tolist()
        metrics = collected.scores.select(drawn).metrics()
        metrics |= data_metrics(experience, self._config.data.max_prompt_length)
        metrics |= throughput_metrics(
            seconds,
            prompt_tokens=sum(rollout.prompt_lengths),
            response_tokens=sum(rollout.response_lengths),
            generated_tokens=collected.generated_tokens,
            world_size=self._run.world_size,
        )
        metrics["perf/max_memory_allocated_gb"] = self._run.device.max_memory_allocated() / 1e9
        return metrics

    def _utilisation(
        self,
        role: str,
        updating: Updating,
        sequences: Sequences,
        cut: BatchCut,
        seconds: Mapping[str, float],
    ) -> dict[str, float]:
        """`perf/mfu/<role>`: the share of the devices' peak that the update of a model reached.

        What a shared prompt spares does not count. The result is empty if the model was not updated
        in this process's part of the step, or if no peak is known.
        """
        run = self._run
        engine = self._parts.trained()[role]
        peak = self._config.trainer.peak_tflops or run.device.peak_tflops(engine.dtype)
        if peak is None or f"update_{role}" not in seconds:
            return {}

        responses = sequences.lengths - sequences.prompt_lengths
        lengths = list(zip(sequences.lengths.tolist(), responses.tolist(), strict=True))
        passes = trained_mini_batches(role, updating.metrics) / len(cut.mini_batches)
        flops = training_flops(engine.spec, lengths) * cut.balance.work * passes
        possible = seconds[f"update_{role}"] * run.world_size * peak * 1e12
        return {f"perf/mfu/{role}": flops / possible}


def trained_mini_batches(role: str, metrics: Mapping[str, float]) -> float:
    """The number of mini-batches that the update of `role` ran forward and backward."""
    # Steps that were taken or skipped, and the mini-batch at which the update stopped.
    counts = (f"{role}/optimizer_steps", f"{role}/skipped_steps", f"{role}/kl_stopped")
    return sum(metrics[count] for count in counts if count in metrics)


class SampleViewer:
    """Shows some responses to people and trackers; only the main rank does."""

    def __init__(self, run: Run, tokenizer: Tokenizer, count: int) -> None:
        """Show `count` prompts of each batch; none if that is 0."""
        self._run = run
        self._board = run.board if run.is_main_rank and count else None
        self._tokenizer = tokenizer
        self._count = count

    def keep(self, step: int, rollout: Rollout, scores: Scores, most: int) -> None:
        """Write down the answers to the first `most` prompts of the validation after `step`."""
        if most and self._run.is_main_rank:
            write_validation(self._run.output_dir, step, rollout, scores, most, self._tokenizer)

    def show(self, kind: str, title: str, rollout: Rollout, scores: Scores) -> None:
        """Show the first responses of a batch.

        Trackers keep them under the name `kind`; `title` names the batch for people.
        """
        if self._board is None:
            return
        text = describe_samples(rollout, scores, self._tokenizer, self._count)
        self._board.add_sample(ShownSample(kind, title, text))
        if not self._board.has_view:
            logger.info("samples of %s\n%s", title, text)


def describe_samples(rollout: Rollout, scores: Scores, tokenizer: Tokenizer, count: int) -> str:
    """The first `count` prompts of a batch, each with its first response, score and answer.

    Texts are quoted as Python quotes them, each on one line; the middle of a long text is left out.
    """
    prompts = rollout.prompts
    rows = [row for row, sample in enumerate(rollout.sample_index) if sample == 0]
    rewards = rollout.with_turn_rewards(scores.total)
    given = rollout.given
    lines = []

    for row in rows[:count]:
        score = float(rewards[row])
        tokens = rollout.response_ids[row, : rollout.response_lengths[row]].tolist()
        ending = "" if bool(rollout.stopped[row]) else ", cut off at a limit"
        if bool(given[row]):
            ending = ", of the row: not drawn"
        if rollout.episodes and rollout.episodes[row].failure:
            ending = f", failed: {rollout.episodes[row].failure}"
        lines += [
            f"  {prompts.data_source[row]}, score {score:.4g}{ending}",
            f"    prompt   {_quoted(prompts.text[row])}",
            f"    response {_quoted(tokenizer.decode(tokens))}",
        ]

        answer = prompts.ground_truth[row]
        if answer is not None:
            lines.append(f"    answer   {_quoted(str(answer))}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """The text on one line, without its middle if it is long."""
    left_out = len(text) - _MOST_CHARACTERS
    if left_out > 0:
        half = _MOST_CHARACTERS // 2
        return f"{text[:half]!r} ... {left_out} characters ... {text[-half:]!r}"
    return repr(text)
