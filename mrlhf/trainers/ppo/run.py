"""A whole PPO run: begin or go on, train, save, export, report.

It does not know what a training step is; `step` does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from mrlhf.checkpoint.restorer import Checkpoint
from mrlhf.config.roots import PPOConfig
from mrlhf.errors import CheckpointError, Interrupted
from mrlhf.inputs import read_ppo_inputs
from mrlhf.run.export import ExportedModel, export_checkpoint
from mrlhf.run.reporter import Reporter, ResumePoint, ppo_achievements
from mrlhf.run.startup import Run, start
from mrlhf.trainers.checkpoints import Checkpoints, find_checkpoint
from mrlhf.trainers.ppo.progress import StepProgress, fixed_settings
from mrlhf.trainers.ppo.setup import Parts, assemble
from mrlhf.trainers.ppo.step import PPOTrainer

logger = logging.getLogger(__name__)


def train_ppo(config: PPOConfig) -> None:
    """Run PPO as configured; every rank calls it."""
    # Bad input is refused before the output directory is touched.
    inputs = read_ppo_inputs(config)
    with start(config) as run:
        checkpoint = find_checkpoint(run)
        parts = assemble(config, inputs, run, initial=checkpoint is None)
        ppo = PPORun(config, run, parts, checkpoint)
        run.begin()
        ppo.fit()


class PPORun:
    """The loop over training steps; every rank runs it."""

    def __init__(
        self, config: PPOConfig, run: Run, parts: Parts, checkpoint: Checkpoint | None
    ) -> None:
        """Begin at the first step, or go on from `checkpoint`.

        Raises:
            CheckpointError, DataError: the checkpoint is of a run with other models or data.
        """
        self._run = run
        self._parts = parts
        self._config = config
        self._trainer = PPOTrainer(config, run, parts)
        self._exported = ExportedModel(
            parts.actor.engine,
            parts.tokenizer,
            config.trainer.max_shard_size_mb,
            parts.generation_config,
            config.trainer.export_merged,
        )
        self._checkpoints = Checkpoints(
            run,
            config,
            parts.trained(),
            parts.steps,
            partial(export_checkpoint, self._exported),
            "val" in parts.held_out,
            config.trainer.critic_warmup,
        )

        self._completed = 0
        self._last_metrics: Mapping[str, float] = {}
        self._progress: StepProgress | None = None
        self._resumed: ResumePoint | None = None
        if checkpoint is not None:
            self._restore(checkpoint)

    def fit(self) -> None:
        """Train, validate, export the policy to `output_dir/actor`, and report.

        Raises:
            Interrupted: the run was asked to stop; a checkpoint is saved.
        """
        parts = self._parts
        with closing(Reporter.of(self._run, self._config, parts.steps, self._resumed)) as reporter:
            try:
                self._train(reporter)
            except Interrupted:
                self._save_interrupted()
                raise

        parts.scorer.close()
        self._checkpoints.end_run(
            self._exported,
            self._last_metrics,
            parts.state_dict,
            self._achievements,
        )

    def _achievements(self) -> dict[str, Any]:
        """What the run has reached, and on how many held-out prompts."""
        reached: dict[str, Any] = dict(ppo_achievements(self._run.output_dir))
        held_out = self._parts.held_out.get("test") or self._parts.held_out.get("val")
        return reached if held_out is None else reached | {"held_out_prompts": len(held_out)}

    def _train(self, reporter: Reporter) -> None:
        """Run the remaining steps, and the validation before the first one."""
        trainer = self._trainer
        is_new = self._completed == 0 and not self._last_metrics
        if is_new and trainer.held_out.due(0):
            self._last_metrics = trainer.held_out.measure(0)
            reporter.report(0, self._last_metrics)
            self._checkpoints.before_training(self._last_metrics)

        while self._completed < self._parts.steps:
            with self._run.phases.interruptible():
                pass  # between two steps
            if self._progress is None:
                self._progress = trainer.begin_step(self._completed + 1)
            metrics = trainer.step(self._progress)

            self._completed = self._progress.number
            self._last_metrics = metrics
            self._progress = None
            saved = self._checkpoints.after_step(self._completed, metrics, self._parts.state_dict)
            reporter.report(self._completed, metrics | saved)
        self._checkpoints.finish()

    def _restore(self, checkpoint: Checkpoint) -> None:
        parts = self._parts
        state = self._checkpoints.restore(checkpoint)
        parts.load_state_dict(state)
        if "drawn" in state:
            if state["settings"] == fixed_settings(self._config):
                parts.generator.load_drawn_state(state["drawn"])
            elif self._run.is_main_rank:
                logger.warning("sampling has changed, so all responses of the step are drawn again")
        if "progress" in state:
            self._check_settings(state["settings"], checkpoint.path)
            self._progress = StepProgress.from_state(
                state["progress"], parts.prompts.with_uids, self._run.factory.machine
            )

        self._completed = checkpoint.manifest.step
        self._last_metrics = checkpoint.manifest.metrics
        self._resumed = ResumePoint(self._completed, self._last_metrics)

    def _check_settings(self, stored: Mapping[str, Any], path: Path) -> None:
        """Raise a CheckpointError if a key that must not change within a step has changed."""
        current = fixed_settings(self._config)
        for key, value in stored.items():
            if current[key] != value:
                raise CheckpointError(
                    f"{path} was saved in the middle of a step, in which {key} was {value} and not "
                    f"{current[key]}; restore it, or go on from the checkpoint before"
                )

    def _save_interrupted(self) -> None:
        """Save the run as it is, in the middle of a step or between two."""
        progress = self._progress
        parts = self._parts

        if progress is None:
            state = parts.state_dict()
            unfinished = False
        elif progress.experience is None:
            # No model has changed in this step. It begins again, with the responses that it has.
            drawn = parts.generator.drawn_state()
            state = {**progress.before, "drawn": drawn, "settings": fixed_settings(self._config)}
            unfinished = bool(drawn)
        else:
            state = {
                **parts.state_dict(),
                "progress": progress.state_dict(),
                "settings": fixed_settings(self._config),
            }
            unfinished = True

        self._checkpoints.save_at_end(self._completed, self._last_metrics, state, unfinished)
