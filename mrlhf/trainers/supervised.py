"""The loop of every training on rows of a file: fine-tuning and training on preference pairs.

Each step draws a batch, takes one optimizer step and, from time to time, validates. The loop does
not know the loss; its task does.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Sized
from contextlib import closing
from functools import partial
from typing import Any, Generic, TypeVar

from mrlhf.batch import Sequences
from mrlhf.checkpoint.restorer import Checkpoint
from mrlhf.config.roots import AnySupervised
from mrlhf.data.sampler import StatefulSampler
from mrlhf.errors import Interrupted, TrainingError
from mrlhf.inputs import RowInputs
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.collectives import wait_for_all
from mrlhf.parallel.device_memory import memory_metrics
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.parallel.phases import seconds_by_phase, timing_metrics
from mrlhf.run.export import ExportedModel, export_checkpoint
from mrlhf.run.reporter import Reporter, ResumePoint
from mrlhf.run.startup import Run, start
from mrlhf.trainers.checkpoints import Checkpoints, find_checkpoint
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import Loss

RowsT = TypeVar("RowsT", bound=Sized)


class SupervisedTask(ABC, Generic[RowsT]):
    """The rows to learn from and the loss on them."""

    name: str  # of the task's metrics: <name>/loss

    def __init__(self, train: RowsT, held_out: RowsT | None) -> None:
        """Take the training rows and the validation rows, which may be empty or missing."""
        self._train = train
        self._held_out = held_out or None

    @property
    def has_held_out(self) -> bool:
        """Whether there are held-out rows to validate on."""
        return self._held_out is not None

    def __len__(self) -> int:
        return len(self._train)

    def step(self, engine: ModelEngine, rows: Sequence[int]) -> dict[str, float]:
        """One optimizer step of the model on these rows; returns its metrics."""
        sequences, cut, loss = self._loss_on(engine, rows)
        result = engine.train_mini_batch(cut.packs, loss, self.name)
        metrics = engine.end_update(self.name, engine.metrics_of([result]))
        metrics |= cut.balance.metrics(self.name, engine.groups.layout)
        return metrics | {"perf/total_num_tokens": int(sequences.lengths.sum())}

    @abstractmethod
    def _loss_on(
        self, engine: ModelEngine, rows: Sequence[int]
    ) -> tuple[Sequences, BatchCut, Loss]:
        """These rows, their packs, and the loss on the model's output for one of the packs."""

    @abstractmethod
    def validate(self, engine: ModelEngine) -> dict[str, float]:
        """Metrics on the held-out rows; empty if there are no such rows."""

    @abstractmethod
    def summary(self, metrics: Mapping[str, float]) -> Mapping[str, Any]:
        """The few numbers by which the run is judged, from the last step's metrics."""


def train_supervised(config: AnySupervised, inputs: RowInputs, task: SupervisedTask[Any]) -> None:
    """Train a task; every rank calls it, after bad input was refused."""
    with start(config) as run:
        spec = spec_of_role(config.model, config.head_of("model"))
        trainer = SupervisedTrainer(config, inputs, run, spec, task)
        run.begin()
        trainer.fit()


class SupervisedTrainer:
    """The loop over training steps, and the state that it keeps between them."""

    def __init__(
        self,
        config: AnySupervised,
        inputs: RowInputs,
        run: Run,
        spec: ModelSpec,
        task: SupervisedTask[Any],
    ) -> None:
        """Build the model with its optimizer, and go on from a checkpoint if there is one.

        Every rank calls it. CheckpointError and DataError say why the checkpoint cannot be used.
        """
        self._run = run
        self._task = task
        self._config = config
        self._section = config.trainer
        self._steps = inputs.steps
        self._sampler = StatefulSampler(
            len(task), config.data.batch_size, seed=config.seed, shuffle=config.data.shuffle
        )

        checkpoint = find_checkpoint(run)
        groups = run.groups("model", config.model)
        self._engine = ModelEngine(config.model, spec, groups, run.device, run.phases)
        if checkpoint is None and config.model.init == "random":
            self._engine.initialise(config.seed)
        elif checkpoint is None or spec.keeps_weights:  # which no checkpoint holds
            self._engine.load(config.model.path, config.seed)
        self._engine.attach_optimizer(config.optim, self._steps)
        self._exported = ExportedModel(
            self._engine,
            inputs.tokenizer,
            config.trainer.max_shard_size_mb,
            inputs.generation_config,
            config.trainer.export_merged,
        )

        self._completed = 0
        self._metrics: Mapping[str, float] = {}
        self._trained: dict[str, float] | None = None
        self._resumed: ResumePoint | None = None
        self._checkpoints = Checkpoints(
            run,
            config,
            {"model": self._engine},
            self._steps,
            partial(export_checkpoint, self._exported),
            task.has_held_out,
        )
        if checkpoint is not None:
            self._restore(checkpoint)

    def fit(self) -> None:
        """Train, export, and write the summary; every rank calls it. May end as Interrupted."""
        with closing(Reporter.of(self._run, self._config, self._steps, self._resumed)) as reporter:
            while self._completed < self._steps:
                self._one_step(self._completed + 1, reporter)
            self._checkpoints.finish()

        metrics = dict(self._metrics)
        if self._task.has_held_out and not any(name.startswith("val/") for name in metrics):
            # An earlier start had reached the last step, and that step had no validation.
            metrics |= self._task.validate(self._engine)
        self._checkpoints.end_run(
            self._exported, self._metrics, self._state, lambda: self._task.summary(metrics)
        )

    def _one_step(self, number: int, reporter: Reporter) -> None:
        """Do training step `number`, or the rest of it: train, validate, save, report."""
        before = self._state()
        try:
            with self._run.phases.interruptible():
                pass  # between two steps
            metrics = self._train(number)
        except Interrupted:
            # Before the optimizer's step only the sampler has changed.
            trained = self._trained
            state = before if trained is None else {**self._state(), "trained": trained}
            self._checkpoints.save_at_end(
                self._completed, self._metrics, state, unfinished_step=trained is not None
            )
            raise

        self._completed = number
        self._metrics = metrics
        self._trained = None
        saved = self._checkpoints.after_step(number, metrics, self._state)
        reporter.report(number, metrics | saved)

    def _train(self, number: int) -> dict[str, float]:
        """Do training step `number` and the validation that is due; return both metrics."""
        phases = self._run.phases
        if self._trained is None:
            rows = next(self._sampler)
            with self._run.profiles.of_step(number), phases.enter("step"):
                try:
                    metrics = self._task.step(self._engine, rows)
                except TrainingError as error:
                    raise self._with_saved_rows(error, number, rows) from error
            tokens = metrics["perf/total_num_tokens"]
            metrics["perf/throughput"] = tokens / seconds_by_phase(phases.spans)["step"]
            self._trained = metrics

        metrics = dict(self._trained)
        if self._section.test_is_due(number, self._steps):
            with phases.enter("testing"):
                metrics |= self._task.validate(self._engine)
        memory = memory_metrics(phases.memory.take_peaks())
        return metrics | memory | timing_metrics(self._run.end_step(number))

    def _state(self) -> dict[str, Any]:
        """The state of the loop for a checkpoint; the model's is saved separately."""
        return {"sampler": self._sampler.state_dict()}

    def _restore(self, checkpoint: Checkpoint) -> None:
        state = self._checkpoints.restore(checkpoint)
        self._sampler.load_state_dict(state["sampler"])
        self._trained = state.get("trained")
        self._completed = checkpoint.manifest.step
        self._metrics = checkpoint.manifest.metrics
        self._resumed = ResumePoint(self._completed, self._metrics)

    def _with_saved_rows(
        self, error: TrainingError, step: int, rows: Sequence[int]
    ) -> TrainingError:
        """The error, naming the file in which the numbers of the batch's rows were saved."""
        path = self._run.output_dir / f"failed_step_{step:06d}.json"
        if self._run.is_main_rank:
            path.write_text(json.dumps({"step": step, "rows": list(rows)}) + "\n", encoding="utf-8")
        wait_for_all(None)  # a rank that ends earlier would end the others before the file is whole
        return TrainingError(
            f"training step {step}: {error}; the numbers of the batch's rows are in {path}"
        )
