"""The loop that supervised fine-tuning and reward-model training share: draw a batch, one optimizer
step, validate.

It does not know the loss.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch.distributed as dist

from mrlhf.config.roots import SupervisedConfig
from mrlhf.config.sections import TrainerSection
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


class SupervisedTrainer(ABC):
    """One trained model, the rows it learns from, and the loop over them.

    Attributes:
        columns: label and metric of each number that the progress display shows.
        engine: the model.
    """

    columns: tuple[tuple[str, str], ...]

    def __init__(
        self,
        config: SupervisedConfig,
        run: Run,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        rows: int,
        batch_size: int,
    ) -> None:
        check_vocabulary("model", spec, tokenizer)
        self.run = run
        self.tokenizer = tokenizer
        self._trainer: TrainerSection = config.trainer
        self._sampler = StatefulSampler(
            rows, batch_size, seed=config.seed, shuffle=config.data.shuffle
        )
        self._steps = config.trainer.steps(rows, batch_size)

        groups = run.groups("model", config.model)
        self.engine = ModelEngine(config.model, spec, groups, run.device)
        if config.model.init == "random":
            self.engine.initialise(config.seed)
        else:
            self.engine.load(config.model.path, config.seed)
        self.engine.attach_optimizer(config.optim, self._steps)

    @abstractmethod
    def step(self, rows: Sequence[int]) -> dict[str, float]:
        """One optimizer step on these rows; returns its metrics."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Metrics on the held-out rows; none where there are no such rows."""

    @abstractmethod
    def summary(self, metrics: dict[str, float]) -> dict[str, float]:
        """The few numbers that the run is judged by, from the last step's metrics."""

    def fit(self) -> None:
        """Train, export the model to `output_dir/model`, write the summary; every rank calls it."""
        began = time.monotonic()
        metrics: dict[str, float] = {}
        reporter = Reporter(
            self.run.is_main_rank,
            self.run.output_dir,
            self._trainer.tensorboard,
            self._steps,
            self.columns,
        )
        with reporter:
            for step in range(1, self._steps + 1):
                metrics = self._run_step(step)
                reporter.report(step, metrics)
        self._finish(metrics, began)

    def _run_step(self, number: int) -> dict[str, float]:
        """One training step with its validation, if one is due; returns the metrics of both."""
        timer = PhaseTimer(self.run.device.synchronize)
        rows = next(self._sampler)
        with timer("step"):
            try:
                metrics = self.step(rows)
            except TrainingError as error:
                raise self._with_saved_rows(error, number, rows) from error

        test_freq = self._trainer.test_freq
        if number == self._steps or (test_freq and number % test_freq == 0):
            with timer("testing"):
                metrics |= self.validate()

        metrics |= timer.metrics()
        metrics["perf/throughput"] = metrics["perf/total_num_tokens"] / timer.seconds["step"]
        return metrics

    def _with_saved_rows(
        self, error: TrainingError, step: int, rows: Sequence[int]
    ) -> TrainingError:
        """The error, naming the file in which the numbers of the batch's rows were saved."""
        path = self.run.output_dir / f"failed_step_{step:06d}.json"
        if self.run.is_main_rank:
            path.write_text(json.dumps({"step": step, "rows": list(rows)}) + "\n", encoding="utf-8")
        dist.barrier()  # a rank that ends earlier would end the others before the file is whole
        return TrainingError(
            f"training step {step}: {error}; the numbers of the batch's rows are in {path}"
        )

    def _finish(self, metrics: dict[str, float], began: float) -> None:
        checkpoint = self.run.output_dir / "model"
        export_checkpoint(self.engine, self.tokenizer, checkpoint, self._trainer.max_shard_size_mb)
        if self.run.is_main_rank:
            totals = {
                "steps": self._steps,
                "seconds": round(time.monotonic() - began, 1),
                "checkpoint": str(checkpoint),
            }
            write_summary(self.run.output_dir, self.summary(metrics) | totals)
