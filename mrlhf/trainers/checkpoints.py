"""Decides when a trainer saves, which checkpoint it goes on from, and which stay on disk.

The trainer brings its state. This file does not know what is in it.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from mrlhf.checkpoint.frozen import (
    ROWS,
    check_frozen,
    fingerprint,
    fingerprint_of_rows,
    fingerprint_of_start,
)
from mrlhf.checkpoint.manifest import CHECKPOINTS, MANIFEST, checkpoint_name, critic_beside
from mrlhf.checkpoint.model_slices import load_slices
from mrlhf.checkpoint.restorer import Checkpoint, newest_checkpoint, open_checkpoint, set_aside
from mrlhf.checkpoint.retention import Best, delete_old, is_due
from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.config.roots import PPOConfig, SupervisedConfig
from mrlhf.config.sections import AdaptedSection
from mrlhf.errors import CheckpointError
from mrlhf.parallel.collectives import from_first
from mrlhf.run.directory import keep_aside
from mrlhf.run.export import ExportedModel, export_result
from mrlhf.run.reporter import closing_report
from mrlhf.run.startup import Run
from mrlhf.trainers.best_export import BestExport
from mrlhf.training.engine import ModelEngine

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run; every rank calls each method together."""

    def __init__(
        self,
        run: Run,
        config: PPOConfig | SupervisedConfig,
        models: Mapping[str, ModelEngine],
        last_step: int,
        export: Callable[[Path], None],
        has_validation: bool,
        first_full_step: int = 1,
        further: Mapping[str, Callable[[Path], None]] = MappingProxyType({}),
    ) -> None:
        """Save nothing yet.

        Args:
            models: the first of them is what the run is for.
            export: writes it as a Hugging Face checkpoint.
            has_validation: whether the run measures more than its steps.
            first_full_step: the first step that trains everything, and so measures everything.
            further: what else each checkpoint holds, as `Contents.exports`.
        """
        self._run = run
        self._section = config.trainer
        self._models = models
        self._last_step = last_step
        self._further = dict(further)
        self._exports = self._further | ({"hf": export} if config.trainer.save_hf else {})

        files = config.data.train_files
        machine = run.factory.machine
        frozen = {ROWS: machine.compute_on_leader(lambda: fingerprint_of_rows(files))}
        for role, section in config.roles().items():
            if isinstance(section, AdaptedSection) and section.lora.is_on:
                frozen[f"{role}.lora"] = fingerprint_of_start(section.lora)
            if role not in models or models[role].spec.keeps_weights:
                frozen[role] = fingerprint(section.path)
        self._frozen = frozen

        self._program = type(config).__name__
        identity = RunIdentity(self._program, config.model_dump(), frozen)
        directory = run.output_dir / CHECKPOINTS
        verify = None if run.lock is None else run.lock.verify
        trainer = config.trainer
        self._saver = Saver(directory, identity, _world(), trainer.async_save, verify)

        self._best = Best("trainer.keep_best", trainer.keep_best, trainer.keep_best_mode)
        self._saved_best = copy.copy(self._best)
        self._best_export = BestExport(
            Best("trainer.export_best", trainer.export_best, trainer.export_best_mode),
            export,
            run.output_dir / f"{next(iter(models))}_best",
            _world(),
        )
        self._last_saved = time.monotonic()
        self._began = time.monotonic()
        self._has_validation = has_validation
        self._first_full_step = first_full_step
        self._names: set[str] = set()
        # Name of the newest whole checkpoint in the run's directory, if it has its step's metrics.
        self._newest = ""

    def restore(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Bring back models and random numbers; returns the trainer's own state.

        A CheckpointError says that it is of another kind of run, or of other models.
        """
        if checkpoint.manifest.program != self._program:
            raise CheckpointError(
                f"{checkpoint.path} is of {checkpoint.manifest.program} and this run is of "
                f"{self._program}; to begin with its weights, convert it to Hugging Face with "
                "tools/convert_checkpoint.py (adapters with --merge), and name the result as the "
                "model's path"
            )
        check_frozen(checkpoint.manifest.frozen, self._frozen)
        checkpoint.load_models(self._models)
        checkpoint.restore_random_numbers()
        state = checkpoint.state
        for role, engine in self._models.items():
            engine.load_state_dict(state["models"][role])

        self._best.load_state_dict(state["best"])
        self._saved_best = copy.copy(self._best)
        if "best_export" in state and not self._best_export.restore(state["best_export"]):
            changes = self._run.changes
            if self._run.is_main_rank:
                best = self._best_export.directory
                is_replayed = self._section.resume == "auto"
                changes.append(partial(keep_aside, self._run.output_dir, best, is_replayed))
            if not checkpoint.manifest.unfinished_step:  # this model is the first one to beat
                row = (checkpoint.manifest.step, checkpoint.manifest.metrics)
                changes.append(partial(self._best_export.after_step, *row))

        is_own = checkpoint.path.parent.resolve() == self._saver.directory.resolve()
        self._began -= state.get("seconds", 0.0)
        if is_own and checkpoint.manifest.metrics:
            self._newest = checkpoint_name(checkpoint.manifest.step, False)

        if self._run.is_main_rank:
            manifest = checkpoint.manifest
            part = " and a part of the next" if manifest.unfinished_step else ""
            logger.info("going on from %s: step %d%s", checkpoint.path, manifest.step, part)
        return dict(state["trainer"])

    def before_training(self, metrics: Mapping[str, float]) -> None:
        """Note the metrics of the initial model; ConfigError if they lack that of a best one."""
        self._best.check_validation(metrics.keys())
        self._best_export.best.check_validation(metrics.keys())
        self._names |= metrics.keys()
        self._best_export.after_step(0, metrics)

    def after_step(
        self, step: int, metrics: Mapping[str, float], state: Callable[[], Mapping[str, Any]]
    ) -> dict[str, float]:
        """Save a checkpoint after step `step` if one is due; it may still be written afterwards.

        If it cannot be written, the error is logged and training goes on. Returns
        `timing_s/save_checkpoint`, the seconds for which training waited, if it did.

        Raises:
            ConfigError: after the first validation, if `trainer.keep_best` or `export_best` is no
                metric of the run.
        """
        began = time.monotonic()
        self._names |= metrics.keys()
        is_validated = any(name.startswith("val") for name in self._names)
        if step >= self._first_full_step and (is_validated or not self._has_validation):
            self._best.check(self._names)
            self._best_export.best.check(self._names)
        self._best_export.after_step(step, metrics)

        waited = self._attempt(lambda: self._saver.finish(wait=False))
        if self._is_due(step, metrics):
            self._attempt(lambda: self._saver.finish(wait=True))
            self._best.is_improved_by(step, metrics)
            contents = self._contents(step, metrics, state(), unfinished_step=False)
            waited = self._attempt(lambda: self._saver.save(contents))
            self._last_saved = time.monotonic()
        return {"timing_s/save_checkpoint": time.monotonic() - began} if waited else {}

    def save_at_end(
        self,
        step: int,
        metrics: Mapping[str, float],
        state: Mapping[str, Any],
        unfinished_step: bool = False,
    ) -> None:
        """Save before the run ends early, unless the newest checkpoint has the same state.

        It returns when the checkpoint is complete; CheckpointError if it could not be written.
        """
        self.finish()
        if not unfinished_step and self._newest == checkpoint_name(step, False):
            return
        contents = self._contents(step, metrics, state, unfinished_step)
        self._saver.save(replace(contents, exports=self._further))  # there may be little time
        self._saver.finish(wait=True)
        self._delete_old()

    def end_run(
        self,
        model: ExportedModel,
        metrics: Mapping[str, float],
        state: Callable[[], Mapping[str, Any]],
        achievements: Callable[[], Mapping[str, Any]],
        beside: Mapping[str, ExportedModel] = MappingProxyType({}),
    ) -> None:
        """Export the trained model, and report; `achievements` begin the summary.

        `beside` are more models, by the names of their directories. If an export fails, a
        checkpoint of the last step is saved with `metrics` and `state`.
        """
        directory = self._run.output_dir / next(iter(self._models))
        last = self._last_step
        with self._run.phases.enter("export"):
            for name, exported in {directory.name: model, **beside}.items():
                place = directory.with_name(name)
                export_result(
                    exported, place, last, lambda: self.save_at_end(last, metrics, state())
                )
        if self._run.is_main_rank:
            self._run.require_directory(directory)
            summary = {
                **achievements(),
                "steps": last,
                **self._best_export.summary(),
                "seconds": round(time.monotonic() - self._began, 1),
                "checkpoint": str(directory),
            }
            closing_report(self._run.output_dir, summary)

    def finish(self) -> None:
        """Wait until the last checkpoint is complete, or could not be written."""
        self._attempt(lambda: self._saver.finish(wait=True))

    def _contents(
        self,
        step: int,
        metrics: Mapping[str, float],
        state: Mapping[str, Any],
        unfinished_step: bool,
    ) -> Contents:
        whole = {
            "trainer": state,
            "models": {role: engine.state_dict() for role, engine in self._models.items()},
            "best": self._best.state_dict(),
            "best_export": self._best_export.state_dict(),
            "seconds": time.monotonic() - self._began,
        }
        return Contents(step, unfinished_step, self._models, whole, metrics, self._exports)

    def _is_due(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether to save after step `step`; rank 0 decides, by its clock and its metrics."""
        elapsed = time.monotonic() - self._last_saved
        improved = copy.copy(self._best).is_improved_by(step, metrics)
        due = is_due(self._section, step, self._last_step, elapsed, improved)
        if self._section.save_every_minutes is None and self._section.keep_best is None:
            return due
        return from_first(due, _world())

    def _attempt(self, save: Callable[[], Path | None]) -> bool:
        """Save or go on saving; returns whether there was anything to do."""
        try:
            saved = save()
        except CheckpointError as error:
            if self._run.is_main_rank:
                logger.error("%s; training goes on", error)
            self._best = copy.copy(self._saved_best)
            return True
        if saved is not None:
            self._newest = saved.name
            self._run.deadline.saved(self._saver.longest_s)
            self._saved_best = copy.copy(self._best)
            self._delete_old()
        return saved is not None or self._saver.is_saving

    def _delete_old(self) -> None:
        if self._run.is_main_rank:
            delete_old(self._saver.directory, self._section.max_to_keep, self._best.step)


def find_checkpoint(run: Run) -> Checkpoint | None:
    """The checked checkpoint to go on from; None without, CheckpointError if none is whole."""
    source = run.resume_from
    if source is None:
        return None
    if (source / MANIFEST).is_file():
        return open_checkpoint(source, _world())

    is_own = source.resolve() == (run.output_dir / CHECKPOINTS).resolve()
    damaged: list[Path] = []
    checkpoint = newest_checkpoint(source, _world(), damaged)
    if is_own and run.is_main_rank:
        run.changes.extend(partial(set_aside, path) for path in damaged)
    if checkpoint is None:
        raise CheckpointError(
            f"no checkpoint in {source} is whole; restore one, or set trainer.overwrite=true to "
            "delete the run and begin anew"
        )
    return checkpoint


def warm_start(engine: ModelEngine, path: Path) -> None:
    """Give a critic weights, moments and schedule of the run that wrote `path`; on every rank."""
    directory, role = critic_beside(path)
    checkpoint = open_checkpoint(directory, _world())
    load_slices(engine, directory, checkpoint.manifest, role)
    engine.load_state_dict(checkpoint.state["models"][role])


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
