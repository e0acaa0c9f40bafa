"""The work of each phase of a PPO step: which model runs, and on which cut of the batch.

It does not know the order of the phases; `step` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from mrlhf.batch import Experience, Rollout, Sequences
from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.config.roots import PPOConfig
from mrlhf.errors import RewardError
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.rl.correction import correct
from mrlhf.rl.masking import selected
from mrlhf.rl.mismatch import (
    mismatch_metrics,
    probability_metrics,
    rejection_metrics,
    weight_metrics,
)
from mrlhf.rl.names import estimator_traits
from mrlhf.roles.actor import Evaluation
from mrlhf.roles.policy_loss import make_correction
from mrlhf.roles.token_logprobs import ReferenceStates
from mrlhf.rollout.collector import Collected
from mrlhf.rollout.components import reward_components
from mrlhf.rollout.reward_units import RewardUnits
from mrlhf.rollout.score_checks import check_correctness
from mrlhf.run.startup import Run
from mrlhf.trainers.ppo.experience import ModelOutputs, equal_score_metrics, make_experience
from mrlhf.trainers.ppo.resume import Updating
from mrlhf.trainers.ppo.setup import PPOParts


@dataclass(frozen=True)
class Cuts:
    """The batch of a step, cut for each model that trains."""

    sequences: Sequences  # the uncut batch; the ranks of a machine share it
    actor: BatchCut
    critic: BatchCut | None  # None if the run has no critic
    own: Mapping[str, Sequences]  # the batch with the prompts of a role that reads its own

    def read_by(self, role: str) -> Sequences:
        """The uncut batch as a role reads it."""
        return self.own.get(role, self.sequences)

    def of(self, role: str) -> BatchCut:
        """The cut of a model that trains."""
        cut = {"actor": self.actor, "critic": self.critic}[role]
        assert cut is not None, f"the run has no {role}"
        return cut


class Work:
    """The phases of a step; every rank calls each method together."""

    def __init__(self, config: PPOConfig, run: Run, parts: PPOParts) -> None:
        self.config = config
        self.parts = parts
        self.phases = run.phases
        self.machine = run.factory.machine

    def reshard(self, version: int) -> dict[str, float]:
        """Bring the actor's weights into the engine as `version`; returns the metrics of this."""
        with self.phases.enter("reshard"):
            resharded = self.parts.generator.take_weights(version)
        costs = {name: cost for name, cost in vars(resharded).items() if cost is not None}
        return {f"reshard/{name}": cost for name, cost in costs.items()}

    def cut(self, rollout: Rollout) -> Cuts:
        """Cut the batch for each model that trains, once for all passes and updates of the step."""
        parts = self.parts
        samples = parts.samples_per_mini_batch
        shared = (rollout.masks,)
        sequences = self.machine.compute_on_leader(rollout.sequences, shared)

        own = {}
        for role, ids_of in parts.inputs.prompts.other_ids.items():
            other = [ids_of[uid] for uid in rollout.prompts.uid]
            own[role] = self.machine.compute_on_leader(partial(rollout.sequences, other), shared)

        actor = parts.actor.engine.cut(sequences, "response", samples["actor"])
        cuts = Cuts(sequences, actor, None, own)
        if parts.critic is None:
            return cuts
        of_critic = parts.critic.engine.cut(cuts.read_by("critic"), "response", samples["critic"])
        return replace(cuts, critic=of_critic)

    def reference_logprobs(self, rollout: Rollout, cuts: Cuts) -> Tensor | None:
        """The reference's log-probabilities, or None without one."""
        reference = self.parts.reference
        with self.phases.enter("ref"):
            if reference is None:
                return None
            return reference.logprobs(rollout, reference.engine.cut(cuts.sequences, "response"))

    def teacher_logprobs(self, rollout: Rollout, cuts: Cuts) -> Tensor | None:
        """The teachers' log-probabilities, if they are part of the reward."""
        teachers = self.parts.teachers
        if teachers is None or self.config.distils_in == "loss":
            return None
        with self.phases.enter("teacher"):
            return teachers.logprobs(rollout, cuts.read_by("teacher"))

    def states_in_loss(
        self, number: int, rollout: Rollout, cuts: Cuts
    ) -> Sequence[ReferenceStates] | None:
        """The states of other models that the actor's loss in step `number` needs, if any."""
        teachers = self.parts.teachers
        if number < self.config.trainer.critic_warmup:
            return None
        if teachers is not None and self.config.distils_in == "loss":
            sources = rollout.prompts.data_source
            asked = cuts.actor.packs if self.parts.actor.engine.groups.is_last_stage else []
            with self.phases.enter("teacher"):
                return teachers.states_for(sources, cuts.read_by("teacher"), asked)
        return self._reference_states(cuts) if self.config.full_kl_in_loss else None

    def _reference_states(self, cuts: Cuts) -> Sequence[ReferenceStates]:
        assert self.parts.reference is not None
        with self.phases.enter("ref"):
            return self.parts.reference.states(cuts.actor)

    def evaluate(
        self, rollout: Rollout, cuts: Cuts, newest: int
    ) -> tuple[Evaluation, dict[str, float]]:
        """The policy's log-probabilities, and metrics: its entropy, its distance to the engine's.

        `newest` is its version.
        """
        ref_states = self._reference_states(cuts) if self.config.full_kl_in_reward else None
        traits = estimator_traits(self.config.algorithm.adv_estimator)
        with self.phases.enter("old_log_prob"):
            evaluation = self.parts.actor.evaluate(
                rollout, cuts.actor, ref_states, traits.needs_squared_probabilities
            )

        metrics = self._measure(evaluation.logprobs, evaluation.entropy, rollout, newest)
        if evaluation.disagreement is not None:
            metrics["training/rollout_experts_differ"] = evaluation.disagreement
        return evaluation, metrics

    def _measure(
        self, logprobs: Tensor, entropy: Tensor, rollout: Rollout, newest: int
    ) -> dict[str, float]:
        """Metrics of the policy before the update."""
        correction = self.config.algorithm.rollout_correction

        def measure() -> dict[str, float]:
            mask = rollout.loss_mask
            metrics = {"actor/entropy": float(selected(entropy, mask).mean())}
            same_weights = rollout.versions == newest
            return metrics | correction_metrics(logprobs, rollout, mask, correction, same_weights)

        return self.machine.compute_on_leader(measure)

    def update_evaluates(self, number: int, rollout: Rollout, cuts: Cuts) -> bool:
        """Whether the update of step `number` makes its only pass with the weights of before.

        It then gives the old log-probabilities and entropies, bit for bit those of a pass before
        it, unless somebody needs them earlier.
        """
        config = self.config
        needed_earlier = config.needs_old_logprobs_early or rollout.experts is not None
        is_trained = number >= config.trainer.critic_warmup
        passes = config.actor.ppo_epochs * len(cuts.actor.mini_batches)
        return is_trained and passes == 1 and not needed_earlier

    def values(self, rollout: Rollout, cuts: Cuts) -> Tensor | None:
        """The critic's predictions, or None without a critic."""
        if self.parts.critic is None:
            return None
        with self.phases.enter("values"):
            return self.parts.critic.values(rollout, cuts.of("critic"))

    def advantages(
        self, collected: Collected, outputs: ModelOutputs
    ) -> tuple[Experience, dict[str, float]]:
        """Compute rewards and advantages; move the coefficient of the KL in the reward.

        Returns:
            The experience, and metrics.

        Raises:
            RewardError: the scores are too large, one that is compared is missing, or contexts have
                rewards of their own where whole responses are compared.
            ConfigError: no reward term says which responses are right, although the loss needs it.
        """
        rollout = collected.rollout
        scores = collected.scores
        algorithm = self.config.algorithm
        controller = self.parts.kl_controller
        coefficient = controller.value
        positive_coef = self.config.actor.positive_lm_coef
        if positive_coef > 0:
            check_correctness(scores.correct, f"actor.positive_lm_coef {positive_coef:g}")

        metrics = {}
        components = None
        traits = estimator_traits(algorithm.adv_estimator)
        with self.phases.enter("adv"):
            if traits.compares_terms or algorithm.gdpo_reward_keys is not None:
                components = reward_components(scores, rollout, algorithm, self.config.reward)
                metrics = components.metrics()
            shaped = self.parts.shaper.shape(scores.total, rollout)
            units = RewardUnits.of(rollout)
            compares_whole = components is not None or collected.greedy_scores is not None
            if units.rows is not None and (compares_whole or traits.pairs):
                raise RewardError(
                    "trajectories have rewards of their own, and remax, gdpo and online_dpo "
                    "compare whole responses; set algorithm.adv_estimator to another, such as rloo"
                )
            compared = units.scores(shaped, rollout)
            if components is not None:
                compared = components.scores
            has_reward = any(term.weight for term in self.config.reward.terms)
            if has_reward or components is not None:  # else a teacher alone teaches
                drawn = ~units.spread(rollout.given)
                metrics |= equal_score_metrics(
                    compared[..., drawn], units.groups[drawn], algorithm.adv_estimator
                )
            experience, kl = self.machine.compute_on_leader(
                lambda: make_experience(
                    collected, shaped, outputs, algorithm, coefficient, components
                ),
                shared=(rollout, rollout.loss_mask, rollout.rollout_logprobs, *outputs.tables()),
            )
        policy = outputs.policy
        if policy is not None and policy.experts is not None:
            experience = replace(experience, experts=policy.experts)

        if outputs.teacher_logprobs is not None:
            assert experience.old_logprobs is not None
            log_ratio = experience.old_logprobs - outputs.teacher_logprobs
            metrics["actor/distillation_kl"] = float(selected(log_ratio, rollout.loss_mask).mean())
            assert self.parts.teachers is not None and self.config.teacher is not None
            shares = self.parts.teachers.shares(rollout.prompts.data_source)
            for name, rows in shares.items() if self.config.teacher.several else ():
                of_teacher = selected(log_ratio, rollout.loss_mask & rows[:, None])
                metrics[f"actor/distillation_kl/{name}"] = float(of_teacher.mean())
        if kl is not None:
            controller.update(kl, len(rollout))
            metrics["actor/reward_kl_penalty"] = kl
            metrics["actor/reward_kl_penalty_coeff"] = coefficient
        return experience, metrics

    def update_critic(self, updating: Updating, cuts: Cuts) -> dict[str, float]:
        """Train the critic, if there is one; returns its metrics."""
        if self.parts.critic is None:
            return {}
        with self.phases.enter("update_critic"):
            return self.parts.critic.update(updating.experience, cuts.of("critic"), updating.critic)

    def update_actor(
        self, updating: Updating, cuts: Cuts, ref_states: Sequence[ReferenceStates] | None
    ) -> dict[str, float]:
        """Train the actor, unless the critic warms up; returns its metrics."""
        experience = updating.experience
        rollout = experience.rollout
        correction = self.config.algorithm.rollout_correction
        newest = updating.version
        if updating.number < self.config.trainer.critic_warmup:
            # In bypass mode the update measures the actor; without an update, a pass has to.
            return self.evaluate(rollout, cuts, newest)[1] if correction.bypass_mode else {}

        measured: dict[str, float] = {}
        evaluates = self.update_evaluates(updating.number, rollout, cuts)
        if experience.old_logprobs is None and not evaluates:
            # The step was interrupted, and goes on with other keys.
            policy, measured = self.evaluate(rollout, cuts, newest)
            experience = replace(experience, old_logprobs=policy.logprobs)

        with self.phases.enter("update_actor"):
            updated = self.parts.actor.update(experience, cuts.actor, ref_states, updating.actor)
        first = updated.first_pass
        if first is not None and experience.old_logprobs is None:
            updating.experience = replace(experience, old_logprobs=first.logprobs)
            if self.config.rollout.dump_is_due(updating.number):
                updating.entropy = first.entropy
            measured = self._measure(first.logprobs, first.entropy, rollout, newest)
        elif first is not None:
            measured = self.machine.compute_on_leader(
                lambda: correction_metrics(
                    first.logprobs,
                    rollout,
                    first.evaluated,
                    correction,
                    same_weights=first.before_step & (rollout.versions == newest),
                )
            )
        return updated.metrics | measured


def correction_metrics(
    logprobs: Tensor,
    rollout: Rollout,
    mask: Tensor,
    section: RolloutCorrectionSection,
    same_weights: Tensor,
) -> dict[str, float]:
    """Measure the distance from the engine's policy to the trainer's, and the effect of correction.

    `mask` [batch, response_len] selects tokens that have an entry in the trainer's `logprobs`.
    `training/rollout_*` are of those in `same_weights` [batch, response_len], which the weights of
    `logprobs` drew: there the two are equal but for what the engine computes otherwise.
    """
    log_ratio = logprobs - rollout.rollout_logprobs
    correction = make_correction(section)
    corrected = correct(log_ratio, mask, correction)

    mismatch = mismatch_metrics(logprobs, rollout.rollout_logprobs, mask)
    if correction.level is not None:
        mismatch |= weight_metrics(corrected, correction, log_ratio, mask)
    if correction.criteria:
        mismatch |= rejection_metrics(corrected, correction, log_ratio, mask)
    metrics = {f"rollout_corr/{name}": value for name, value in mismatch.items()}

    compared = probability_metrics(logprobs, rollout.rollout_logprobs, mask & same_weights)
    return metrics | {f"training/{name}": value for name, value in compared.items()}
