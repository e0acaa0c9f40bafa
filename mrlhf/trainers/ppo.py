"""Proximal policy optimisation of a language model: the training step, one line for each phase.

All ranks run it together, each holding its shards. Every phase returns what it produces, its
metrics included; nothing is kept from one phase to the next but what stands in `step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.checkpoint.restorer import Checkpoint
from mrlhf.config.roots import PPOConfig
from mrlhf.errors import Interrupted, TrainingError
from mrlhf.inference.base import SamplingParams
from mrlhf.log import PPO_COLUMNS
from mrlhf.metrics import PhaseTimer
from mrlhf.models.flops import training_flops
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.rl.kl import make_kl_controller
from mrlhf.roles.actor import Evaluation
from mrlhf.rollout.collector import Collected
from mrlhf.run.export import export_checkpoint
from mrlhf.run.metrics_file import ResumePoint
from mrlhf.run.report import closing_report
from mrlhf.run.reporter import Reporter
from mrlhf.run.startup import Run, start
from mrlhf.trainers.checkpoints import Checkpoints, find_checkpoint
from mrlhf.trainers.dump import dump_rollout, save_batch
from mrlhf.trainers.evaluate import measure, validation_metrics
from mrlhf.trainers.experience import ModelOutputs, correction_metrics, make_experience
from mrlhf.trainers.ppo_setup import Parts, assemble
from mrlhf.trainers.step_metrics import batch_metrics, sequence_lengths, trained_mini_batches
from mrlhf.trainers.step_progress import StepProgress


def train_ppo(config: PPOConfig) -> None:
    """Run PPO as configured; every rank calls it."""
    with start(config, config.distributed, config.trainer, config.seed) as run:
        checkpoint = find_checkpoint(run)
        trainer = PPOTrainer(config, run, assemble(config, run, initial=checkpoint is None))
        trainer.fit(checkpoint)


@dataclass(frozen=True)
class Cuts:
    """How each model cuts the batch of a step; None for a model that the run does not have."""

    actor: BatchCut
    critic: BatchCut | None
    reference: BatchCut | None


@dataclass(frozen=True)
class Evaluated:
    """What the models say about a rollout before the update.

    Attributes:
        outputs: log-probabilities and values.
        ref_logits: the reference's logits of this rank's packs, if the actor's loss needs them.
        metrics: the entropy, and how far the engine's policy is from the trainer's.
    """

    outputs: ModelOutputs
    ref_logits: Sequence[Tensor] | None
    metrics: dict[str, float]


class PPOTrainer:
    """The loop over training steps, and what lasts from one step to the next.

    Attributes:
        completed: the number of training steps that are done.
        last_metrics: of the last of them; before the first step, those of the validation then.
        progress: the step that is under way; None between steps.
    """

    def __init__(self, config: PPOConfig, run: Run, parts: Parts) -> None:
        self.config = config
        self.run = run
        self.parts = parts
        control = config.algorithm.kl_ctrl
        self.kl_controller = make_kl_controller(
            control.type, control.kl_coef, control.target_kl, control.horizon
        )
        self.sampling = SamplingParams(
            n=config.rollout.n,
            temperature=config.rollout.temperature,
            top_k=config.rollout.top_k,
            top_p=config.rollout.top_p,
            max_tokens=config.data.max_response_length,
            stop_token_ids=(parts.tokenizer.eos_id,),
            stop=tuple(config.rollout.stop),
            seed=config.seed,
        )
        self.completed = 0
        self.last_metrics: Mapping[str, float] = {}
        self.progress: StepProgress | None = None
        self.checkpoints = Checkpoints(
            run, config, parts.trained(), parts.steps, self.exports(config.trainer.save_hf)
        )

    def fit(self, checkpoint: Checkpoint | None = None) -> None:
        """Train, validate, export the policy to `output_dir/actor`, and report.

        Every rank calls it.

        Args:
            checkpoint: what to go on from; None to begin anew.

        Raises:
            Interrupted: the run was asked to stop; a checkpoint is saved.
        """
        began = time.monotonic()
        parts = self.parts
        trainer = self.config.trainer
        resumed = None
        if checkpoint is not None:
            self.restore(checkpoint)
            resumed = ResumePoint(checkpoint.manifest.step, checkpoint.manifest.metrics)

        reporter = Reporter(
            self.run.is_main_rank,
            self.run.output_dir,
            trainer.tensorboard,
            parts.steps,
            PPO_COLUMNS,
            resumed,
        )
        with reporter:
            try:
                self.train(reporter)
            except Interrupted:
                self.save_interrupted()
                raise

        directory = self.run.output_dir / "actor"
        export_checkpoint(parts.actor.engine, parts.tokenizer, directory, trainer.max_shard_size_mb)
        parts.scorer.close()
        if self.run.is_main_rank:
            seconds = time.monotonic() - began
            closing_report(self.run.output_dir, directory, parts.steps, seconds)

    def train(self, reporter: Reporter) -> None:
        """The steps that are left, with what comes before the first one."""
        trainer = self.config.trainer
        is_new = self.completed == 0 and not self.last_metrics
        if is_new and trainer.val_before_train and self.parts.held_out is not None:
            self.parts.generator.take_weights(version=0)
            self.last_metrics = self.validate()
            reporter.report(0, self.last_metrics)

        while self.completed < self.parts.steps:
            with self.run.stops.phase("between steps"):
                pass
            if self.progress is None:
                self.progress = self.begin_step(self.completed + 1)
            metrics = self.step(self.progress)

            self.completed = self.progress.number
            self.last_metrics = metrics
            self.progress = None
            saved = self.checkpoints.after_step(self.completed, metrics, self.state_dict)
            reporter.report(self.completed, metrics | saved)
        self.checkpoints.finish()

    def begin_step(self, number: int) -> StepProgress:
        """Training step `number`, counted from 1, before anything is done for it."""
        metrics: dict[str, float] = {
            "training/global_step": number,
            "training/epoch": self.parts.sampler.epoch,
        }
        return StepProgress(number, self.state_dict(), metrics)

    def step(self, progress: StepProgress) -> dict[str, float]:
        """The rest of a training step; returns its metrics."""
        parts = self.parts
        number = progress.number
        timer = PhaseTimer(self.run.device.synchronize)

        with timer("step"):
            collected = progress.collected or self.collect(progress, timer)
            cuts = self.cut(collected.rollout)
            experience, ref_logits = self.learn_from(progress, collected, cuts, timer)
            self.update(progress, experience, cuts, ref_logits, timer)
        parts.generator.end_step()

        metrics = dict(progress.metrics)
        if self.test_is_due(number):
            with timer("testing"):
                parts.generator.take_weights(version=number)
                metrics |= self.validate()
        self.dump(number, collected, experience)

        metrics |= batch_metrics(
            collected, experience, timer.seconds, self.config.data.max_prompt_length, self.run
        )
        metrics |= self.utilisation(collected.rollout, cuts, progress.metrics, timer.seconds)
        return metrics | timer.metrics()

    def collect(self, progress: StepProgress, timer: PhaseTimer) -> Collected:
        """Bring the weights into the engine, and generate and score responses."""
        generator = self.parts.generator
        with timer("reshard"):
            resharded = generator.take_weights(version=progress.number - 1)
        progress.metrics |= {f"reshard/{name}": value for name, value in vars(resharded).items()}

        collected = self.parts.collector.collect(progress.number, self.sampling, timer)
        progress.metrics |= collected.metrics
        progress.collected = collected
        return collected

    def cut(self, rollout: Rollout) -> Cuts:
        """Cut the batch for each model, once for all passes and updates of the step."""
        parts = self.parts
        samples = parts.samples_per_mini_batch
        sequences = rollout.sequences()
        prompt_lengths = rollout.prompt_lengths

        actor = parts.actor.engine.cut(sequences, prompt_lengths, "response", samples["actor"])
        critic = None
        if parts.critic is not None:
            engine = parts.critic.engine
            critic = engine.cut(sequences, prompt_lengths, "response", samples["critic"])
        reference = None
        if parts.reference is not None:
            reference = parts.reference.engine.cut(sequences, prompt_lengths, "response")
        return Cuts(actor, critic, reference)

    def learn_from(
        self, progress: StepProgress, collected: Collected, cuts: Cuts, timer: PhaseTimer
    ) -> tuple[Experience, Sequence[Tensor] | None]:
        """Make experience of the responses, unless that is done.

        Returns:
            The experience, and the reference's logits of this rank's packs, if the actor's loss
            needs them.
        """
        if progress.experience is not None:
            ref_logits = None
            if self.config.full_kl_in_loss:
                assert self.parts.reference is not None
                ref_logits = self.parts.reference.logits(cuts.actor)
            return progress.experience, ref_logits

        evaluated = self.evaluate(collected.rollout, cuts, timer)
        experience, reward_metrics = self.make_experience(collected, evaluated.outputs, timer)
        progress.metrics |= evaluated.metrics | reward_metrics
        progress.experience = experience
        return experience, evaluated.ref_logits

    def evaluate(self, rollout: Rollout, cuts: Cuts, timer: PhaseTimer) -> Evaluated:
        """Old and reference log-probabilities, and values."""
        parts = self.parts
        config = self.config
        ref_logprobs = ref_logits = old = values = None
        metrics: dict[str, float] = {}

        with timer("ref"):
            if parts.reference is not None:
                assert cuts.reference is not None
                ref_logprobs = parts.reference.logprobs(rollout, cuts.reference)
                if config.needs_full_kl:
                    ref_logits = parts.reference.logits(cuts.actor)
        if not config.algorithm.rollout_correction.bypass_mode:
            old, metrics = self.evaluate_actor(
                rollout, cuts.actor, ref_logits if config.full_kl_in_reward else None, timer
            )
        if not config.full_kl_in_loss:
            ref_logits = None  # they are large, so they go as soon as nobody needs them
        if parts.critic is not None:
            assert cuts.critic is not None
            with timer("values"):
                values = parts.critic.values(rollout, cuts.critic)
        return Evaluated(ModelOutputs(old, ref_logprobs, values), ref_logits, metrics)

    def evaluate_actor(
        self,
        rollout: Rollout,
        cut: BatchCut,
        ref_logits: Sequence[Tensor] | None,
        timer: PhaseTimer,
    ) -> tuple[Evaluation, dict[str, float]]:
        """The policy's log-probabilities, and metrics: its entropy, its distance to the engine's.

        Args:
            rollout: the global batch.
            cut: the actor's cut of it.
            ref_logits: the reference's logits, if the KL in the reward is over all tokens of the
                vocabulary.
            timer: measures the pass.
        """
        with timer("old_log_prob"):
            evaluation = self.parts.actor.evaluate(rollout, cut, ref_logits)

        mask = rollout.loss_mask
        metrics = {"actor/entropy": float(evaluation.entropy[mask].mean())}
        correction = self.config.algorithm.rollout_correction
        metrics |= correction_metrics(evaluation.logprobs, rollout, mask, correction)
        return evaluation, metrics

    def make_experience(
        self, collected: Collected, outputs: ModelOutputs, timer: PhaseTimer
    ) -> tuple[Experience, dict[str, float]]:
        """Rewards and advantages; moves the coefficient of the KL in the reward.

        Returns:
            The experience, and the metrics of the KL in the reward, if it is in use.
        """
        coefficient = self.kl_controller.value
        with timer("adv"):
            shaped = self.parts.shaper.shape(collected.scores.total, collected.rollout)
            experience, kl = make_experience(
                collected, shaped, outputs, self.config.algorithm, coefficient
            )
        if kl is None:
            return experience, {}
        self.kl_controller.update(kl, len(collected.rollout))
        return experience, {
            "actor/reward_kl_penalty": kl,
            "actor/reward_kl_penalty_coeff": coefficient,
        }

    def update(
        self,
        progress: StepProgress,
        experience: Experience,
        cuts: Cuts,
        ref_logits: Sequence[Tensor] | None,
        timer: PhaseTimer,
    ) -> None:
        """Train critic and actor, as far as that is not done.

        Raises:
            TrainingError: the gradients of a model could not be used too many times in a row; the
                batch is saved.
        """
        try:
            if "critic" not in progress.updated:
                progress.end_update("critic", self.update_critic(progress, experience, cuts, timer))
            if "actor" in progress.updated:
                return
            if progress.number >= self.config.trainer.critic_warmup:
                metrics = self.update_actor(progress, experience, cuts, ref_logits, timer)
                progress.end_update("actor", metrics)
            elif self.config.algorithm.rollout_correction.bypass_mode:
                # The update measures the actor in bypass mode; without one, a pass has to.
                rollout = experience.rollout
                progress.metrics |= self.evaluate_actor(rollout, cuts.actor, None, timer)[1]
        except TrainingError as error:
            raise self.with_saved_batch(error, progress.number, experience) from error

    def update_critic(
        self, progress: StepProgress, experience: Experience, cuts: Cuts, timer: PhaseTimer
    ) -> dict[str, float]:
        """Train the critic, if there is one; returns its metrics."""
        if self.parts.critic is None:
            return {}
        assert cuts.critic is not None
        with timer("update_critic"):
            return self.parts.critic.update(experience, cuts.critic, progress.critic)

    def update_actor(
        self,
        progress: StepProgress,
        experience: Experience,
        cuts: Cuts,
        ref_logits: Sequence[Tensor] | None,
        timer: PhaseTimer,
    ) -> dict[str, float]:
        """Train the actor; returns its metrics."""
        with timer("update_actor"):
            updated = self.parts.actor.update(experience, cuts.actor, ref_logits, progress.actor)
        if updated.logprobs is None:
            return updated.metrics
        correction = self.config.algorithm.rollout_correction
        return updated.metrics | correction_metrics(
            updated.logprobs, experience.rollout, updated.evaluated, correction
        )

    def with_saved_batch(
        self, error: TrainingError, number: int, experience: Experience
    ) -> TrainingError:
        """The error, naming the file in which the batch of step `number` was saved."""
        path = self.run.output_dir / f"failed_step_{number:06d}.pt"
        if self.run.is_main_rank:
            save_batch(path, experience)
        dist.barrier()  # a rank that ends earlier would end the others before the file is whole
        return TrainingError(f"training step {number}: {error}; the batch is in {path}")

    def dump(self, number: int, collected: Collected, experience: Experience) -> None:
        """Write the responses of step `number` to a file, if `rollout.dump_freq` asks for it."""
        dump_freq = self.config.rollout.dump_freq
        if self.run.is_main_rank and dump_freq and number % dump_freq == 0:
            tokenizer = self.parts.tokenizer
            dump_rollout(self.run.output_dir, number, experience, collected.scores, tokenizer)

    def utilisation(
        self,
        rollout: Rollout,
        cuts: Cuts,
        training_metrics: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> dict[str, float]:
        """`perf/mfu/{actor,critic}` of the models that were updated in this step."""
        metrics = {}
        lengths = sequence_lengths(rollout)
        for name, role, cut in (
            ("actor", self.parts.actor, cuts.actor),
            ("critic", self.parts.critic, cuts.critic),
        ):
            if role is None or cut is None or f"update_{name}" not in seconds:
                continue
            peak_tflops = self.config.trainer.peak_tflops
            peak_tflops = peak_tflops or self.run.device.peak_tflops(role.engine.dtype)
            if peak_tflops is None:
                continue
            trained = trained_mini_batches(name, training_metrics)
            flops = training_flops(role.engine.spec, lengths) * trained / len(cut.mini_batches)
            possible = seconds[f"update_{name}"] * self.run.world_size * peak_tflops * 1e12
            metrics[f"perf/mfu/{name}"] = flops / possible
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the models: where everything stands between two steps."""
        parts = self.parts
        return {
            "sampler": parts.sampler.state_dict(),
            "kl_controller": self.kl_controller.state_dict(),
            "shaper": parts.shaper.state_dict(),
            "response_lengths": parts.generator.state_dict(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError, DataError: it is of a run with other models or data.
        """
        parts = self.parts
        state = self.checkpoints.restore(checkpoint)
        parts.sampler.load_state_dict(state["sampler"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        parts.shaper.load_state_dict(state["shaper"])
        parts.generator.load_state_dict(state["response_lengths"])

        self.completed = checkpoint.manifest.step
        self.last_metrics = checkpoint.manifest.metrics
        if "drawn" in state:
            parts.generator.load_drawn_state(state["drawn"])
        if "progress" in state:
            self.progress = StepProgress.from_state(state["progress"], parts.prompts.with_uids)

    def save_interrupted(self) -> None:
        """Save the run as it is, in the middle of a step or between two."""
        progress = self.progress
        unfinished = progress is not None
        state: Mapping[str, Any]
        if progress is None:
            state = self.state_dict()
        elif progress.experience is None:
            # No model has changed in this step. It begins again, with the responses that it has.
            drawn = self.parts.generator.drawn_state()
            state = {**progress.before, "drawn": drawn}
            unfinished = bool(drawn)
        else:
            state = {**self.state_dict(), "progress": progress.state_dict()}
        self.checkpoints.save_interrupted(self.completed, self.last_metrics, state, unfinished)

    def exports(self, save_hf: bool) -> dict[str, Callable[[Path], None]]:
        """What is written into each checkpoint for other programs."""
        if not save_hf:
            return {}
        parts = self.parts
        max_shard_mb = self.config.trainer.max_shard_size_mb
        return {
            "hf": lambda directory: export_checkpoint(
                parts.actor.engine, parts.tokenizer, directory, max_shard_mb
            )
        }

    def test_is_due(self, number: int) -> bool:
        """Whether step `number` ends with a validation: every `test_freq` steps, and the last."""
        if self.parts.held_out is None:
            return False
        return self.config.trainer.test_is_due(number, self.parts.steps)

    def validate(self) -> dict[str, float]:
        """Greedy and, if asked for, sampled answers to the held-out prompts.

        The engine must hold the policy's weights; it sleeps afterwards.
        """
        parts = self.parts
        assert parts.held_out is not None
        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=self.sampling.max_tokens,
            stop_token_ids=self.sampling.stop_token_ids,
            stop=self.sampling.stop,
            seed=self.config.seed,
        )
        n = self.config.trainer.val_n

        greedy_answers = parts.generator.generate(parts.held_out, greedy, stream="validation")
        sampled_answers = None
        if self.config.trainer.val_sampled:
            sampling = replace(self.sampling, n=n)
            sampled_answers = parts.generator.generate(
                parts.held_out, sampling, stream="validation"
            )
        parts.generator.sleep()  # scoring may need the memory

        sampled_metrics: dict[str, float] = {}
        greedy_metrics = measure(parts.scorer, greedy_answers.rollout)
        if sampled_answers is not None:
            sampled_metrics = measure(parts.scorer, sampled_answers.rollout, n)
        return validation_metrics(greedy_metrics, sampled_metrics)
