"""Proximal policy optimisation of a language model: the step, a line a phase.

Everything it calls is told what to do with plain batches; all ranks run it in step, each holding
its shards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.config.roots import PPOConfig
from mrlhf.errors import TrainingError
from mrlhf.inference.base import SamplingParams
from mrlhf.log import PPO_COLUMNS
from mrlhf.metrics import PhaseTimer, data_metrics, throughput_metrics
from mrlhf.models.flops import training_flops
from mrlhf.rl.kl import make_kl_controller
from mrlhf.roles.actor import Evaluation
from mrlhf.rollout.collector import Collected
from mrlhf.run.report import closing_report
from mrlhf.run.reporter import Reporter
from mrlhf.run.startup import Run, export_checkpoint, start
from mrlhf.trainers.dump import dump_rollout, save_batch
from mrlhf.trainers.evaluate import measure, validation_metrics
from mrlhf.trainers.experience import Opinions, correction_metrics, make_experience
from mrlhf.trainers.ppo_setup import Parts, assemble

logger = logging.getLogger(__name__)


def train_ppo(config: PPOConfig) -> None:
    """Run PPO as configured; every rank calls it."""
    run = start(config, config.distributed, config.trainer.output_dir, config.seed)
    trainer = PPOTrainer(config, run, assemble(config, run))
    trainer.fit()


class PPOTrainer:
    """The loop over steps, and what lasts from one step to the next."""

    def __init__(self, config: PPOConfig, run: Run, parts: Parts) -> None:
        self.config, self.run, self.parts = config, run, parts
        control = config.algorithm.kl_ctrl
        self.kl_controller = make_kl_controller(
            control.type, control.kl_coef, control.target_kl, control.horizon
        )
        self._ref_logits: list[Tensor] | None = None
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

    def fit(self) -> None:
        """Train, validate, export the policy to `output_dir/actor`, and report; every rank calls
        it.
        """
        began = time.monotonic()
        parts, trainer = self.parts, self.config.trainer
        arguments = (
            self.run.speaks,
            self.run.output_dir,
            trainer.tensorboard,
            parts.steps,
            PPO_COLUMNS,
        )
        with Reporter(*arguments) as reporter:
            if trainer.val_before_train and parts.held_out is not None:
                parts.generator.take_weights(version=0)
                reporter.report(0, self.validate())
            for step in range(1, parts.steps + 1):
                reporter.report(step, self.step(step))
        checkpoint = self.run.output_dir / "actor"
        export_checkpoint(parts.actor, parts.tokenizer, checkpoint, trainer.max_shard_size_mb)
        parts.scorer.close()
        if self.run.speaks:
            closing_report(self.run.output_dir, checkpoint, parts.steps, time.monotonic() - began)

    def step(self, number: int) -> dict[str, float]:
        """One training step; returns its metrics."""
        parts, timer = self.parts, PhaseTimer(self.run.device.synchronize)
        metrics: dict[str, float] = {
            "training/global_step": number,
            "training/epoch": parts.sampler.epoch,
        }
        with timer("step"):
            with timer("reshard"):
                handover = parts.generator.take_weights(version=number - 1)
            collected = parts.collector.collect(number, self.sampling, timer)
            rollout, scores = collected.rollout, collected.scores
            metrics |= collected.metrics
            experience = self.evaluate_rollout(collected, timer, metrics)
            try:
                self.update(number, experience, timer, metrics)
            except TrainingError as error:
                raise self.with_saved_batch(error, number, experience) from error
            self._ref_logits = None
        if self.test_is_due(number):
            with timer("testing"):
                parts.generator.take_weights(version=number)
                metrics |= self.validate()
        dump_freq = self.config.rollout.dump_freq
        if self.run.speaks and dump_freq and number % dump_freq == 0:
            dump_rollout(self.run.output_dir, number, experience, scores, parts.tokenizer)
        metrics |= scores.metrics() | data_metrics(experience, self.config.data.max_prompt_length)
        metrics |= {f"reshard/{name}": value for name, value in vars(handover).items()}
        prompt_tokens, response_tokens = (
            sum(rollout.prompt_lengths),
            int(rollout.response_mask.sum()),
        )
        generated = collected.generated_tokens
        metrics |= throughput_metrics(
            timer.seconds, prompt_tokens, response_tokens, generated, self.run.world_size
        )
        metrics["perf/max_memory_allocated_gb"] = self.run.device.max_memory_allocated() / 1e9
        return metrics | self.utilisation(rollout, metrics, timer.seconds) | timer.metrics()

    def evaluate_rollout(
        self, collected: Collected, timer: PhaseTimer, metrics: dict[str, float]
    ) -> Experience:
        """Old and reference log-probs, values, rewards, advantages; adds to `metrics` what comes up
        on the way.
        """
        parts, algorithm, rollout = self.parts, self.config.algorithm, collected.rollout
        ref_logprobs = old = values = None
        with timer("ref"):
            if parts.reference is not None:
                ref_logprobs = parts.reference.logprobs(rollout)
                if self.config.needs_full_kl:
                    self._ref_logits = parts.reference.logits(rollout, parts.actor_plan(rollout))
        if not algorithm.rollout_correction.bypass_mode:
            old = self.evaluate_actor(rollout, timer, metrics)
            if not (self.config.actor.use_kl_loss and self.config.actor.kl_loss_type == "full"):
                self._ref_logits = None
        if parts.critic is not None:
            with timer("values"):
                values = parts.critic.values(rollout, parts.critic_plan(rollout))
        with timer("adv"):
            coefficient = self.kl_controller.value
            shaped = parts.shaper.shape(collected.scores.total, rollout)
            opinions = Opinions(old, ref_logprobs, values)
            experience, kl = make_experience(collected, shaped, opinions, algorithm, coefficient)
        if kl is not None:
            metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}
            self.kl_controller.update(kl, len(rollout))
        return experience

    def evaluate_actor(
        self, rollout: Rollout, timer: PhaseTimer, metrics: dict[str, float]
    ) -> Evaluation:
        """The policy's own view of the rollout; adds its entropy and its distance from the engine's
        to `metrics`.
        """
        algorithm, plan = self.config.algorithm, self.parts.actor_plan(rollout)
        in_reward = algorithm.use_kl_in_reward and algorithm.kl_penalty == "full"
        with timer("old_log_prob"):
            seen = self.parts.actor.evaluate(rollout, plan, self._ref_logits if in_reward else None)
        mask, correction = rollout.response_mask, algorithm.rollout_correction
        metrics["actor/entropy"] = float(seen.entropy[mask].mean())
        metrics |= correction_metrics(seen.logprobs, rollout, mask, correction)
        return seen

    def update(
        self, number: int, experience: Experience, timer: PhaseTimer, metrics: dict[str, float]
    ) -> None:
        """Train critic and actor, adding their metrics to `metrics`.

        Raises:
            TrainingError: a role's gradients were not usable too many times in a row.
        """
        parts, rollout = self.parts, experience.rollout
        if parts.critic is not None:
            with timer("update_critic"):
                metrics |= parts.critic.update(experience, parts.critic_plan(rollout))
        correction = self.config.algorithm.rollout_correction
        if number < self.config.trainer.critic_warmup:
            if correction.bypass_mode:  # else it is known already
                self.evaluate_actor(rollout, timer, metrics)
            return
        with timer("update_actor"):
            done = parts.actor.update(experience, parts.actor_plan(rollout), self._ref_logits)
        metrics |= done.metrics
        if done.logprobs is not None:
            metrics |= correction_metrics(done.logprobs, rollout, done.evaluated, correction)

    def with_saved_batch(
        self, error: TrainingError, number: int, experience: Experience
    ) -> TrainingError:
        """The error, with the place where the batch that it arose from now lies."""
        path = self.run.output_dir / f"failed_step_{number:06d}.pt"
        if self.run.speaks:
            save_batch(path, experience)
        dist.barrier()  # a rank that ends now would end the others before the file is whole
        return TrainingError(f"training step {number}: {error}; the batch is in {path}")

    def utilisation(
        self, rollout: Rollout, metrics: Mapping[str, float], seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """`perf/mfu/{actor,critic}`: operations that the update needed, over what the devices could
        have done.
        """
        parts, found = self.parts, {}
        lengths = [len(tokens) for tokens in rollout.sequences()]
        for name, role in (("actor", parts.actor), ("critic", parts.critic)):
            if role is None or f"update_{name}" not in seconds:
                continue
            peak = self.config.trainer.peak_tflops or self.run.device.peak_tflops(role.dtype)
            if peak is None:
                continue
            mini_batches = -(-len(rollout) // parts.samples_per_mini_batch[name])
            counted = (f"{name}/optimizer_steps", f"{name}/skipped_steps", f"{name}/kl_stopped")
            trained = sum(metrics[count] for count in counted if count in metrics)
            flops = training_flops(role.spec, lengths) * trained / mini_batches
            found[f"perf/mfu/{name}"] = flops / (
                seconds[f"update_{name}"] * self.run.world_size * peak * 1e12
            )
        return found

    def test_is_due(self, number: int) -> bool:
        """Whether step `number` ends with a validation: every `test_freq` steps, and the last."""
        freq = self.config.trainer.test_freq
        return self.parts.held_out is not None and (
            number == self.parts.steps or bool(freq and number % freq == 0)
        )

    def validate(self) -> dict[str, float]:
        """Greedy and, if asked for, sampled answers to the held-out prompts; the engine has the
        policy's weights.
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
        drawn = parts.generator.generate(parts.held_out, greedy, stream="validation").rollout
        sampled, n = None, self.config.trainer.val_n
        if self.config.trainer.val_sampled:
            sampled = parts.generator.generate(
                parts.held_out, replace(self.sampling, n=n), stream="validation"
            ).rollout
        parts.generator.sleep()  # scoring may need the memory
        return validation_metrics(
            measure(parts.scorer, drawn),
            {} if sampled is None else measure(parts.scorer, sampled, n),
        )
