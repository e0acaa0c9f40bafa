"""The loop that supervised fine-tuning and reward-model training share.

Each step draws a batch, takes one optimizer step and, from time to time, validates. The loop does
not know the loss; its task does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist

from mrlhf.config.roots import SupervisedConfig
from mrlhf.data.sampler import StatefulSampler
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import TrainingError
from mrlhf.metrics import PhaseTimer
from mrlhf.models.spec import ModelSpec
from mrlhf.preflight import check_vocabulary
from mrlhf.run.export import export_checkpoint
from mrlhf.run.reporter import Reporter
from mrlhf.run.startup import Run
from mrlhf.run.summary import write_summary
from mrlhf.training.engine import ModelEngine


class SupervisedTask(Protocol):
    """The rows to learn from and the loss on them."""

    @property
    def columns(self) -> Sequence[tuple[str, str]]:
        """Label and metric of each number that the progress display shows."""

    def __len__(self) -> int:
        """Number of training rows."""

    def step(self, engine: ModelEngine, rows: Sequence[int]) -> dict[str, float]:
        """One optimizer step of the model on these rows; returns its metrics."""

    def validate(self, engine: ModelEngine) -> dict[str, float]:
        """Metrics on the held-out rows; empty if there are no such rows."""

    def summary(self, metrics: dict[str, float]) -> dict[str, float]:
        """The few numbers that the run is judged by, from the last step's metrics."""


class SupervisedTrainer:
    """The loop over training steps, and what lasts from one step to the next."""

    def __init__(
        self,
        config: SupervisedConfig,
        run: Run,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        task: SupervisedTask,
        batch_size: int,
    ) -> None:
        """Build the model with its optimizer; every rank calls it."""
        check_vocabulary("model", spec, tokenizer)
        self._run = run
        self._tokenizer = tokenizer
        self._task = task
        self._section = config.trainer
        self._steps = config.trainer.steps(len(task), batch_size)
        self._sampler = StatefulSampler(
            len(task), batch_size, seed=config.seed, shuffle=config.data.shuffle
        )

        groups = run.groups("model", config.model)
        self._engine = ModelEngine(config.model, spec, groups, run.device, run.stops)
        if config.model.init == "random":
            self._engine.initialise(config.seed)
        else:
            self._engine.load(config.model.path, config.seed)
        self._engine.attach_optimizer(config.optim, self._steps)

    def fit(self) -> None:
        """Train, export the model to `output_dir/model`, write the summary; every rank calls it."""
        began = time.monotonic()
        metrics: dict[str, float] = {}
        reporter = Reporter(
            self._run.is_main_rank,
            self._run.output_dir,
            self._section.tensorboard,
            self._steps,
            self._task.columns,
        )
        with reporter:
            for step in range(1, self._steps + 1):
                metrics = self._train(step)
                reporter.report(step, metrics)
        self._finish(metrics, began)

    def _train(self, number: int) -> dict[str, float]:
        """Training step `number`, and the validation that is due; returns the metrics of both."""
        timer = PhaseTimer(self._run.device.synchronize)
        rows = next(self._sampler)
        with timer("step"):
            try:
                metrics = self._task.step(self._engine, rows)
            except TrainingError as error:
                raise self._with_saved_rows(error, number, rows) from error

        if self._section.test_is_due(number, self._steps):
            with timer("testing"):
                metrics |= self._task.validate(self._engine)

        metrics |= timer.metrics()
        metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / timer.seconds["step"]
        return metrics

    def _with_saved_rows(
        self, error: TrainingError, step: int, rows: Sequence[int]
    ) -> TrainingError:
        """The error, naming the file in which the numbers of the batch's rows were saved."""
        path = self._run.output_dir / f"failed_step_{step:06d}.json"
        if self._run.is_main_rank:
            path.write_text(json.dumps({"step": step, "rows": list(rows)}) + "\n", encoding="utf-8")
        dist.barrier()  # a rank that ends earlier would end the others before the file is whole
        return TrainingError(
            f"training step {step}: {error}; the numbers of the batch's rows are in {path}"
        )

    def _finish(self, metrics: dict[str, float], began: float) -> None:
        checkpoint = self._run.output_dir / "model"
        max_shard_mb = self._section.max_shard_size_mb
        export_checkpoint(self._engine, self._tokenizer, checkpoint, max_shard_mb)
        if self._run.is_main_rank:
            totals = {
                "steps": self._steps,
                "seconds": round(time.monotonic() - began, 1),
                "checkpoint": str(checkpoint),
            }
            write_summary(self._run.output_dir, self._task.summary(metrics) | totals)
