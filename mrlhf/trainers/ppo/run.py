"""A whole PPO run: begin or go on, train, save, export, report.

It does not know what a training step is; `step` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from mrlhf.checkpoint.restorer import Checkpoint
from mrlhf.config.roots import PPOConfig
from mrlhf.errors import Interrupted
from mrlhf.inputs import read_ppo_inputs
from mrlhf.run.export import ExportedModel, export_checkpoint
from mrlhf.run.reporter import Reporter, ResumePoint, ppo_achievements
from mrlhf.run.startup import Run, start
from mrlhf.trainers.checkpoints import Checkpoints, find_checkpoint, warm_start
from mrlhf.trainers.ppo.resume import TEACHER, Between, parts_state, restore, saved_state
from mrlhf.trainers.ppo.setup import PPOParts, assemble
from mrlhf.trainers.ppo.step import PPOTrainer


def train_ppo(config: PPOConfig) -> None:
    """Run PPO as configured; every rank calls it."""
    # Bad input is refused before the output directory is touched.
    inputs = read_ppo_inputs(config)
    judge = inputs.reward.judge
    if judge is not None:
        judge.reach()
    with start(config) as run:
        checkpoint = find_checkpoint(run)
        parts = assemble(config, inputs, run, initial=checkpoint is None)
        ppo = PPORun(config, run, parts, checkpoint)
        run.begin()
        if judge is not None:
            judge.keep_answers(run.output_dir / "judge" / f"rank_{run.rank}.jsonl")
        ppo.fit()


class PPORun:
    """The loop over training steps; every rank runs it."""

    def __init__(
        self, config: PPOConfig, run: Run, parts: PPOParts, checkpoint: Checkpoint | None
    ) -> None:
        """Begin at the first step, or go on from `checkpoint`.

        Raises:
            CheckpointError, DataError: the checkpoint is of a run with other models or data.
        """
        self._run = run
        self._parts = parts
        self._parts_state = partial(parts_state, parts)
        self._config = config
        self._trainer = PPOTrainer(config, run, parts)
        trainer = config.trainer
        shared = (parts.inputs.tokenizer, trainer.max_shard_size_mb)
        self._exported = ExportedModel(
            parts.actor.engine, *shared, parts.inputs.generation_config, trainer.export_merged
        )
        self._beside: dict[str, ExportedModel] = {}  # by the name of its directory
        if trainer.export_critic and parts.critic is not None:
            self._beside["critic"] = ExportedModel(parts.critic.engine, *shared)
        self._checkpoints = Checkpoints(
            run,
            config,
            parts.trained(),
            parts.inputs.steps,
            partial(export_checkpoint, self._exported),
            "val" in parts.inputs.held_out,
            trainer.critic_warmup,
            {} if parts.earlier is None else {TEACHER: parts.earlier.save},
        )

        self._completed = 0
        self._last_metrics: Mapping[str, float] = {}
        self._resumed: ResumePoint | None = None
        if checkpoint is not None:
            self._restore(checkpoint)
        elif parts.critic is not None and config.critic.warm_start == "state":
            warm_start(parts.critic.engine, Path(config.critic.path))

    def fit(self) -> None:
        """Train, validate, export what `trainer` says to `output_dir`, and report.

        Raises:
            Interrupted: the run was asked to stop; a checkpoint is saved.
        """
        parts = self._parts
        steps = parts.inputs.steps
        with closing(Reporter.of(self._run, self._config, steps, self._resumed)) as reporter:
            try:
                self._train(reporter)
            except Interrupted:
                state, unfinished = saved_state(self._trainer.state, parts, self._config)
                step = (self._completed, self._last_metrics)
                self._checkpoints.save_at_end(*step, state, unfinished)
                raise

        parts.scorer.close()
        self._checkpoints.end_run(
            self._exported,
            self._last_metrics,
            self._parts_state,
            self._achievements,
            self._beside,
        )

    def _achievements(self) -> dict[str, Any]:
        """The results of the run, and the number of held-out prompts that show them."""
        reached: dict[str, Any] = dict(ppo_achievements(self._run.output_dir))
        held_out = self._parts.inputs.held_out.get("test") or self._parts.inputs.held_out.get("val")
        return reached if held_out is None else reached | {"held_out_prompts": len(held_out)}

    def _train(self, reporter: Reporter) -> None:
        """Run the remaining steps, and the validation before the first one."""
        trainer = self._trainer
        is_new = self._completed == 0 and not self._last_metrics
        if is_new and trainer.held_out.due(0):
            self._last_metrics = trainer.held_out.measure(0)
            reporter.report(0, self._last_metrics)
            self._checkpoints.before_training(self._last_metrics)

        while self._completed < self._parts.inputs.steps:
            with self._run.phases.interruptible():
                pass  # between two steps
            state = trainer.state
            if isinstance(state, Between):
                state = trainer.begin_step(self._completed + 1)
            metrics = trainer.step(state)

            self._completed = state.number
            self._last_metrics = metrics
            trainer.state = Between()
            saved = self._checkpoints.after_step(self._completed, metrics, self._parts_state)
            reporter.report(self._completed, metrics | saved)
        self._checkpoints.finish()

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = self._checkpoints.restore(checkpoint)
        self._trainer.state = restore(state, checkpoint, self._parts, self._config)
        self._completed = checkpoint.manifest.step
        self._last_metrics = checkpoint.manifest.metrics
        self._resumed = ResumePoint(self._completed, self._last_metrics)
