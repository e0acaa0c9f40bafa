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
from mrlhf.trainers.ppo.report import SampleViewer, StepReport
from mrlhf.trainers.ppo.resume import Between, Drawing, StepState, Updating
from mrlhf.trainers.ppo.setup import PPOParts
from mrlhf.trainers.ppo.work import Cuts, Work


class PPOTrainer:
    """Makes training steps."""

    def __init__(self, config: PPOConfig, run: Run, parts: PPOParts) -> None:
        self.parts = parts
        self.state: StepState = Between()
        samples = SampleViewer(run, parts.inputs.tokenizer, config.trainer.log_samples)
        self.held_out = HeldOut(config.trainer, run.phases, parts, samples)
        self._config = config
        self._phases = run.phases
        self._profiles = run.profiles
        self._work = Work(config, run, parts)
        self._report = StepReport(config, run, parts, samples)

    def begin_step(self, number: int) -> Drawing:
        """Begin training step `number`, counted from 1."""
        state = Drawing.begin(number, self.parts)
        self.state = state
        return state

    def step(self, state: Drawing | Updating) -> dict[str, float]:
        """Do the rest of a training step; returns its metrics."""
        work = self._work
        with self._profiles.of_step(state.number), self._phases.enter("step"):
            if isinstance(state, Drawing):
                collected = self.collect(state)
                cuts = work.cut(collected.rollout)
                state = self.learn_from(state, collected, cuts)
                self.state = state
            else:
                cuts = work.cut(state.collected.rollout)
            # They are large, so they come last.
            ref_states = work.states_in_loss(state.number, state.collected.rollout, cuts)
            self.update(state, cuts, ref_states)
        self.parts.generator.end_step()

        validated = self.held_out.after_step(state.number)
        return self._report.of_step(state, cuts, validated)

    def collect(self, drawing: Drawing) -> Collected:
        """Bring the weights into the engine, and generate and score responses."""
        parts = self.parts
        drawing.metrics |= self._work.reshard(drawing.version)
        responses = parts.collector.generate(drawing.number, parts.sampling)
        collected = parts.collector.score(*responses)
        drawing.metrics |= collected.metrics
        return collected

    def learn_from(self, drawing: Drawing, collected: Collected, cuts: Cuts) -> Updating:
        """Make experience of the responses."""
        work = self._work
        number = drawing.number
        rollout = collected.rollout

        ref_logprobs = work.reference_logprobs(rollout, cuts)
        spared = self._config.algorithm.rollout_correction.bypass_mode or work.update_evaluates(
            number, rollout, cuts
        )
        policy, measured = (None, {}) if spared else work.evaluate(rollout, cuts, drawing.version)
        values = work.values(rollout, cuts)
        outputs = ModelOutputs(policy, ref_logprobs, values, work.teacher_logprobs(rollout, cuts))
        experience, shaped = work.advantages(collected, outputs)

        updating = Updating(number, drawing.metrics | measured | shaped, collected, experience)
        if policy is not None and self._config.rollout.dump_is_due(number):
            updating.entropy = policy.entropy
        return updating

    def update(
        self, updating: Updating, cuts: Cuts, ref_states: Sequence[ReferenceStates] | None
    ) -> None:
        """Train critic and actor, and move the teacher, unless that is done.

        TrainingError says that too many gradients in a row were of no use; the batch is saved.
        """
        try:
            if "critic" not in updating.updated:
                updating.end_update("critic", self._work.update_critic(updating, cuts))
            if "actor" not in updating.updated:
                updating.end_update("actor", self._work.update_actor(updating, cuts, ref_states))
            if self.parts.earlier is not None and "teacher" not in updating.updated:
                with self._phases.enter("teacher"):
                    self.parts.earlier.after_step(updating.number)
                updating.end_update("teacher", {})
        except TrainingError as error:
            raise self._report.of_failure(error, updating) from error
