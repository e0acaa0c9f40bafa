"""One training step of PPO, a line for each phase: the file to read first.

All ranks run it together, each with its shards of every model. `work` does the work of each phase,
and `report` shows and writes down the step. Everything that passes from one phase to the next is in
this file, and everything that passes from one step to the next is in `parts`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mrlhf.config.roots import PPOConfig
from mrlhf.errors import TrainingError
from mrlhf.roles.token_logprobs import ReferenceStates
from mrlhf.rollout.collector import Collected
from mrlhf.run.startup import Run
from mrlhf.trainers.ppo.experience import ModelOutputs
from mrlhf.trainers.ppo.held_out import HeldOut
from mrlhf.trainers.ppo.progress import StepProgress
from mrlhf.trainers.ppo.report import SampleViewer, StepReport
from mrlhf.trainers.ppo.setup import Parts
from mrlhf.trainers.ppo.work import Cuts, Work


class PPOTrainer:
    """Makes training steps."""

    def __init__(self, config: PPOConfig, run: Run, parts: Parts) -> None:
        self.parts = parts
        samples = SampleViewer(run, parts.tokenizer, config.trainer.log_samples)
        self.held_out = HeldOut(config.trainer, run.phases, parts, samples)
        self._config = config
        self._phases = run.phases
        self._profiles = run.profiles
        self._work = Work(config, run, parts)
        self._report = StepReport(config, run, parts, samples)

    def begin_step(self, number: int) -> StepProgress:
        """The empty progress of training step `number`, counted from 1."""
        epoch = self.parts.sampler.epoch
        metrics: dict[str, float] = {"training/global_step": number, "training/epoch": epoch}
        return StepProgress(number, self.parts.state_dict(), metrics)

    def step(self, progress: StepProgress) -> dict[str, float]:
        """Do the rest of a training step; returns its metrics."""
        with self._profiles.of_step(progress.number), self._phases.enter("step"):
            collected = progress.collected or self.collect(progress)
            cuts = self._work.cut(collected.rollout)
            ref_states = self.learn_from(progress, collected, cuts)
            self.update(progress, cuts, ref_states)
        self.parts.generator.end_step()

        validated = self.held_out.after_step(progress.number)
        return self._report.of_step(progress, cuts, validated)

    def collect(self, progress: StepProgress) -> Collected:
        """Bring the weights into the engine, and generate and score responses."""
        parts = self.parts
        progress.metrics |= self._work.reshard(progress.version)
        responses = parts.collector.generate(progress.number, parts.sampling)
        collected = parts.collector.score(*responses)

        progress.metrics |= collected.metrics
        progress.collected = collected
        return collected

    def learn_from(
        self, progress: StepProgress, collected: Collected, cuts: Cuts
    ) -> Sequence[ReferenceStates] | None:
        """Make experience of the responses, unless that is done.

        Returns:
            The reference's states of this rank's packs, if the actor's loss needs them.
        """
        work = self._work
        if progress.experience is not None:
            return work.reference_states(cuts)
        rollout = collected.rollout

        ref_logprobs, ref_states = work.reference(rollout, cuts)
        spared = self._config.algorithm.rollout_correction.bypass_mode or work.update_evaluates(
            progress.number, rollout, cuts
        )
        policy, measured = (
            (None, {}) if spared else work.evaluate(rollout, cuts, progress.version, ref_states)
        )
        if not self._config.full_kl_in_loss:
            ref_states = None  # they are large, so they go as soon as nobody needs them
        values = work.values(rollout, cuts)
        outputs = ModelOutputs(policy, ref_logprobs, values)
        progress.experience, shaped = work.advantages(collected, outputs)

        progress.metrics |= measured | shaped
        if policy is not None and self._config.rollout.dump_is_due(progress.number):
            progress.entropy = policy.entropy
        return ref_states

    def update(
        self, progress: StepProgress, cuts: Cuts, ref_states: Sequence[ReferenceStates] | None
    ) -> None:
        """Train critic and actor, unless that is done.

        Raises:
            TrainingError: the gradients of a model could not be used too many times in a row; the
                batch is saved.
        """
        try:
            if "critic" not in progress.updated:
                progress.end_update("critic", self._work.update_critic(progress, cuts))
            if "actor" not in progress.updated:
                progress.end_update("actor", self._work.update_actor(progress, cuts, ref_states))
        except TrainingError as error:
            raise self._report.of_failure(error, progress) from error
