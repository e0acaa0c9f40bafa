"""Proximal policy optimisation of a language model: the training step, one line for each phase.

All ranks run it together, each holding its shards. Every phase returns what it produces, its
metrics included; nothing is kept from one phase to the next but what stands in `step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from mrlhf.batch import Experience, Rollout, Sequences
from mrlhf.config.roots import PPOConfig
from mrlhf.errors import TrainingError
from mrlhf.inference.base import SamplingParams
from mrlhf.metrics import PhaseTimer
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.rl.kl import make_kl_controller
from mrlhf.rl.masking import selected
from mrlhf.rl.names import estimator_traits
from mrlhf.roles.actor import Evaluation
from mrlhf.roles.token_logprobs import ReferenceStates
from mrlhf.rollout.collector import Collected
from mrlhf.rollout.components import reward_components
from mrlhf.rollout.score_checks import check_correctness
from mrlhf.run.startup import Run
from mrlhf.trainers.dump import Dump, save_batch, write_dump
from mrlhf.trainers.equal_scores import equal_score_metrics
from mrlhf.trainers.experience import ModelOutputs, correction_metrics, make_experience
from mrlhf.trainers.held_out import HeldOut
from mrlhf.trainers.ppo_setup import Parts
from mrlhf.trainers.samples import SampleViewer
from mrlhf.trainers.step_metrics import balance_metrics, batch_metrics, utilisation
from mrlhf.trainers.step_progress import StepProgress

SAMPLES_EVERY = 10  # training steps, where there are no held-out prompts to show


@dataclass(frozen=True)
class Cuts:
    """How the models that train cut the batch of a step.

    Attributes:
        sequences: what is cut; the ranks of a machine share it.
        actor: the actor's cut.
        critic: the critic's cut; None if the run has no critic.
    """

    sequences: Sequences
    actor: BatchCut
    critic: BatchCut | None


@dataclass(frozen=True)
class Evaluated:
    """What the models say about a rollout before the update.

    Attributes:
        outputs: log-probabilities and values.
        ref_states: the reference's states of this rank's packs, if the actor's loss needs them.
        metrics: the entropy, and how far the engine's policy is from the trainer's.
    """

    outputs: ModelOutputs
    ref_states: Sequence[ReferenceStates] | None
    metrics: dict[str, float]


class PPOTrainer:
    """Makes training steps, and holds what lasts from one step to the next."""

    def __init__(self, config: PPOConfig, run: Run, parts: Parts) -> None:
        self.config = config
        self.run = run
        self.parts = parts
        self.machine = run.factory.machine

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
            stop_token_ids=parts.endings.token_ids,
            stop=parts.endings.strings,
            seed=config.seed,
            record_experts=config.rollout.records_experts
            and parts.actor.engine.spec.experts is not None,
        )
        self.samples = SampleViewer(run, parts.tokenizer, config.trainer.log_samples)
        self.held_out = HeldOut(config.trainer, parts, self.sampling, self.samples)

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
        timer = self.run.timer()

        with timer("step"):
            collected = progress.collected or self.collect(progress, timer)
            cuts = self.cut(collected.rollout)
            experience, ref_states = self.learn_from(progress, collected, cuts, timer)
            self.update(progress, experience, cuts, ref_states, timer)
        parts.generator.end_step()

        metrics = dict(progress.metrics)
        if self.held_out.due(number):
            with timer("testing"):
                parts.generator.take_weights(version=number)
                metrics |= self.held_out.measure(number)
        if "val" not in parts.held_out and (number == 1 or number % SAMPLES_EVERY == 0):
            self.samples.show(
                "training", f"training step {number}", collected.rollout, collected.scores
            )
        self.dump(progress, collected, experience, cuts, timer)
        self.run.board.distributions = {
            "critic/score": collected.scores.total.tolist(),
            "response_length": collected.rollout.response_lengths,
        }

        metrics |= self.machine.once(
            lambda: batch_metrics(
                collected, experience, timer.seconds, self.config.data.max_prompt_length, self.run
            )
        )
        cut_of = {"actor": cuts.actor, "critic": cuts.critic}
        for name, engine in parts.trained().items():
            cut = cut_of[name]
            assert cut is not None
            metrics |= balance_metrics(name, engine, cut)
            metrics |= utilisation(
                name,
                engine,
                collected.rollout,
                mini_batches=len(cut.mini_batches),
                update_metrics=progress.metrics,
                seconds=timer.seconds,
                run=self.run,
                peak_tflops=self.config.trainer.peak_tflops,
            )
        self.run.record_phases(number, timer)
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
        """Cut the batch for each model that trains, once for all passes and updates of the step."""
        parts = self.parts
        samples = parts.samples_per_mini_batch
        sequences = self.machine.once(rollout.sequences)

        actor = parts.actor.engine.cut(sequences, "response", samples["actor"])
        critic = None
        if parts.critic is not None:
            critic = parts.critic.engine.cut(sequences, "response", samples["critic"])
        return Cuts(sequences, actor, critic)

    def learn_from(
        self, progress: StepProgress, collected: Collected, cuts: Cuts, timer: PhaseTimer
    ) -> tuple[Experience, Sequence[ReferenceStates] | None]:
        """Make experience of the responses, unless that is done.

        Returns:
            The experience, and the reference's states of this rank's packs, if the actor's loss
            needs them.
        """
        if progress.experience is not None:
            ref_states = None
            if self.config.full_kl_in_loss:
                assert self.parts.reference is not None
                ref_states = self.parts.reference.states(cuts.actor)
            return progress.experience, ref_states

        evaluated = self.evaluate(collected.rollout, cuts, timer)
        experience, reward_metrics = self.make_experience(collected, evaluated.outputs, timer)
        progress.metrics |= evaluated.metrics | reward_metrics
        progress.experience = experience
        policy = evaluated.outputs.policy
        if policy is not None and self.dump_is_due(progress.number):
            progress.entropy = policy.entropy
        return experience, evaluated.ref_states

    def evaluate(self, rollout: Rollout, cuts: Cuts, timer: PhaseTimer) -> Evaluated:
        """Old and reference log-probabilities, and values."""
        parts = self.parts
        config = self.config
        ref_logprobs = ref_states = old = values = None
        metrics: dict[str, float] = {}

        with timer("ref"):
            if parts.reference is not None:
                cut = parts.reference.engine.cut(cuts.sequences, "response")
                ref_logprobs = parts.reference.logprobs(rollout, cut)
                del cut  # its packs take more memory than the batch, and nobody needs them again
                if config.needs_full_kl:
                    ref_states = parts.reference.states(cuts.actor)
        if not config.algorithm.rollout_correction.bypass_mode:
            old, metrics = self.evaluate_actor(
                rollout, cuts.actor, ref_states if config.full_kl_in_reward else None, timer
            )
        if not config.full_kl_in_loss:
            ref_states = None  # they are large, so they go as soon as nobody needs them
        if parts.critic is not None:
            assert cuts.critic is not None
            with timer("values"):
                values = parts.critic.values(rollout, cuts.critic)
        return Evaluated(ModelOutputs(old, ref_logprobs, values), ref_states, metrics)

    def evaluate_actor(
        self,
        rollout: Rollout,
        cut: BatchCut,
        ref_states: Sequence[ReferenceStates] | None,
        timer: PhaseTimer,
    ) -> tuple[Evaluation, dict[str, float]]:
        """The policy's log-probabilities, and metrics: its entropy, its distance to the engine's.

        Args:
            rollout: the global batch.
            cut: the actor's cut of it.
            ref_states: the reference's states, if the KL in the reward is over all tokens of the
                vocabulary.
            timer: measures the pass.
        """
        traits = estimator_traits(self.config.algorithm.adv_estimator)
        with timer("old_log_prob"):
            evaluation = self.parts.actor.evaluate(
                rollout, cut, ref_states, traits.needs_squared_probabilities
            )

        correction = self.config.algorithm.rollout_correction

        def measure() -> dict[str, float]:
            mask = rollout.loss_mask
            metrics = {"actor/entropy": float(selected(evaluation.entropy, mask).mean())}
            return metrics | correction_metrics(evaluation.logprobs, rollout, mask, correction)

        metrics = self.machine.once(measure)
        if evaluation.disagreement is not None:
            metrics["training/rollout_experts_differ"] = evaluation.disagreement
        return evaluation, metrics

    def make_experience(
        self, collected: Collected, outputs: ModelOutputs, timer: PhaseTimer
    ) -> tuple[Experience, dict[str, float]]:
        """Rewards and advantages; moves the coefficient of the KL in the reward.

        Returns:
            The experience, and the metrics of equal scores, of the KL in the reward and of the
            terms that are compared one by one, if they are in use.

        Raises:
            RewardError: the scores are too large, or one that is compared is missing.
            ConfigError: nothing says which responses are right, although the loss needs it.
        """
        rollout = collected.rollout
        scores = collected.scores
        algorithm = self.config.algorithm
        coefficient = self.kl_controller.value
        positive_coef = self.config.actor.positive_lm_coef
        if positive_coef > 0:
            check_correctness(scores.correct, f"actor.positive_lm_coef {positive_coef:g}")

        metrics = {}
        components = None
        policy = outputs.policy
        with timer("adv"):
            if estimator_traits(algorithm.adv_estimator).compares_terms or (
                algorithm.gdpo_reward_keys is not None
            ):
                components = reward_components(scores, rollout, algorithm, self.config.reward)
                metrics = components.metrics()
            shaped = self.parts.shaper.shape(scores.total, rollout)
            metrics |= equal_score_metrics(
                shaped if components is None else components.scores,
                rollout.prompt_groups,
                algorithm.adv_estimator,
            )
            experience, kl = self.machine.once(
                lambda: make_experience(
                    collected, shaped, outputs, algorithm, coefficient, components
                ),
                known=(rollout, rollout.loss_mask, rollout.rollout_logprobs, *outputs.tables()),
            )
        if policy is not None and policy.experts is not None:
            experience = replace(experience, experts=policy.experts)

        if kl is not None:
            self.kl_controller.update(kl, len(rollout))
            metrics["actor/reward_kl_penalty"] = kl
            metrics["actor/reward_kl_penalty_coeff"] = coefficient
        return experience, metrics

    def update(
        self,
        progress: StepProgress,
        experience: Experience,
        cuts: Cuts,
        ref_states: Sequence[ReferenceStates] | None,
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
                metrics = self.update_actor(progress, experience, cuts, ref_states, timer)
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
        ref_states: Sequence[ReferenceStates] | None,
        timer: PhaseTimer,
    ) -> dict[str, float]:
        """Train the actor; returns its metrics."""
        with timer("update_actor"):
            updated = self.parts.actor.update(experience, cuts.actor, ref_states, progress.actor)
        logprobs = updated.logprobs
        evaluated = updated.evaluated
        if logprobs is None or evaluated is None:
            return updated.metrics
        correction = self.config.algorithm.rollout_correction
        return updated.metrics | self.machine.once(
            lambda: correction_metrics(logprobs, experience.rollout, evaluated, correction)
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

    def dump_is_due(self, number: int) -> bool:
        """Whether the responses of step `number` are written down."""
        dump_freq = self.config.rollout.dump_freq
        return bool(dump_freq and number % dump_freq == 0)

    def dump(
        self,
        progress: StepProgress,
        collected: Collected,
        experience: Experience,
        cuts: Cuts,
        timer: PhaseTimer,
    ) -> None:
        """Write the responses of a step to a file, if `rollout.dump_freq` asks for it."""
        if not self.dump_is_due(progress.number):
            return

        section = self.config.rollout
        with timer("dump"):
            new_logprobs = None
            if section.dump_format == "parquet" and section.dump_ratios:
                new_logprobs = self.parts.actor.evaluate(collected.rollout, cuts.actor).logprobs
            if self.run.is_main_rank:
                scores = collected.scores
                dump = Dump(progress.number, experience, scores, progress.entropy, new_logprobs)
                write_dump(self.run.output_dir, dump, section, self.parts.tokenizer)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the models: where everything stands between two steps."""
        parts = self.parts
        return {
            "sampler": parts.sampler.state_dict(),
            "kl_controller": self.kl_controller.state_dict(),
            "shaper": parts.shaper.state_dict(),
            "response_lengths": parts.generator.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` gave.

        Raises:
            DataError: it is of a run with other data.
        """
        parts = self.parts
        parts.sampler.load_state_dict(state["sampler"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        parts.shaper.load_state_dict(state["shaper"])
        parts.generator.load_state_dict(state["response_lengths"])
