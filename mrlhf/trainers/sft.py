"""Supervised fine-tuning: the mean negative log-likelihood of response tokens, on any layout.

It knows the loop; batches of token ids come from `data`, sharded models from `roles`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from mrlhf.config.roots import SFTConfig
from mrlhf.data.rows import read_rows
from mrlhf.data.sampler import StatefulSampler
from mrlhf.data.sft import SftExample, encode_sft
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.log import MetricsWriter, Progress
from mrlhf.metrics import PhaseTimer, Tally
from mrlhf.models.families import load_spec
from mrlhf.parallel.vocab import vocab_parallel_logprobs
from mrlhf.roles.base import TrainedRole
from mrlhf.trainers.startup import Run, check_vocabulary, export_checkpoint, start, write_summary

COLUMNS = (("loss", "sft/loss"), ("val loss", "val/loss"), ("tokens/s", "perf/throughput"))


def train_sft(config: SFTConfig) -> None:
    """Run supervised fine-tuning as configured; every rank calls it."""
    began = time.monotonic()
    run = start(config, config.distributed, config.trainer.output_dir, config.seed)
    trainer = SFTTrainer(config, run)
    summary = trainer.fit()
    export_checkpoint(trainer.model, trainer.tokenizer, run.output_dir / "model", config.trainer.max_shard_size_mb)
    if run.speaks:
        summary |= {"seconds": time.monotonic() - began, "checkpoint": str(run.output_dir / "model")}
        write_summary(run.output_dir, summary)


class SFTTrainer:
    """A model, the examples it learns from and those it is measured on."""

    def __init__(self, config: SFTConfig, run: Run) -> None:
        self.config, self.run = config, run
        self.tokenizer = load_tokenizer(config.data.tokenizer, config.data.chat_template)
        self.examples = _read(config.data.train_files, self.tokenizer, config)
        self.held_out = _read(config.data.val_files, self.tokenizer, config) if config.data.val_files else []
        spec = load_spec(config.model.path, "lm")
        check_vocabulary("model", spec, self.tokenizer)
        data = config.data
        self.sampler = StatefulSampler(len(self.examples), data.batch_size, seed=config.seed, shuffle=data.shuffle)
        self.steps = config.trainer.steps(len(self.examples), data.batch_size)
        self.model = TrainedRole(config.model, spec, run.groups("model", config.model), run.device)
        if config.model.init == "random":
            self.model.initialise(config.seed)
        else:
            self.model.load(config.model.path, config.seed)
        self.model.prepare(config.optim, self.steps)

    def fit(self) -> dict[str, float]:
        """Train; returns the summary."""
        test_freq = self.config.trainer.test_freq
        metrics: dict[str, float] = {}
        with Progress(self.steps, COLUMNS) if self.run.speaks else _silent() as progress:
            writer = MetricsWriter(self.run.output_dir, self.config.trainer.tensorboard) if self.run.speaks else None
            for step in range(1, self.steps + 1):
                metrics = self.step([self.examples[i] for i in next(self.sampler)])
                if self.held_out and (step == self.steps or (test_freq and step % test_freq == 0)):
                    metrics["val/loss"] = self.loss(self.held_out)
                if writer is not None and progress is not None:
                    writer.write(step, metrics)
                    progress.update(step, metrics)
            if writer is not None:
                writer.close()
        loss = metrics["val/loss"] if self.held_out else metrics["sft/loss"]
        return {"sft_loss": loss, "steps": self.steps}
