"""Supervised fine-tuning: the mean negative log-likelihood of response tokens, on any layout.

It knows the loss; the loop is in `supervised`, token ids come from `data`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrlhf.config.roots import SFTConfig
from mrlhf.data.rows import read_rows
from mrlhf.data.sft import SftExample, encode_sft
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.metrics import Tally
from mrlhf.models.families import load_spec
from mrlhf.parallel.microbatch import Pack
from mrlhf.parallel.vocab import vocab_parallel_logprobs
from mrlhf.run.startup import Run, start
from mrlhf.trainers.supervised import SupervisedTrainer


def train_sft(config: SFTConfig) -> None:
    """Run supervised fine-tuning as configured; every rank calls it."""
    run = start(config, config.distributed, config.trainer.output_dir, config.seed)
    SFTTrainer(config, run).fit()


class SFTTrainer(SupervisedTrainer):
    """Learns the responses of prompt-response rows."""

    columns = (("loss", "sft/loss"), ("val loss", "val/loss"), ("tokens/s", "perf/throughput"))

    def __init__(self, config: SFTConfig, run: Run) -> None:
        tokenizer = load_tokenizer(config.data.tokenizer, config.data.chat_template)
        self._examples = _read(config.data.train_files, tokenizer, config)
        self._held_out = (
            _read(config.data.val_files, tokenizer, config) if config.data.val_files else []
        )
        spec = load_spec(config.model.path, "lm")
        super().__init__(config, run, spec, tokenizer, len(self._examples), config.data.batch_size)

    def step(self, rows: Sequence[int]) -> dict[str, float]:
        """One optimizer step on these rows; `sft/loss` is the mean over their response tokens,
        nats.
        """
        sequences, prompts = _split([self._examples[row] for row in rows])
        lengths = [len(tokens) for tokens in sequences]
        (plan,) = self.model.plan(lengths, len(rows))
        packs = self.model.packs([plan], sequences, prompts, "response")
        count = sum(lengths) - sum(prompts)

        def loss(logits: Tensor, number: int) -> tuple[Tensor, Tally]:
            total = -self._logprobs(logits, packs[number]).sum()
            tally = Tally()
            tally.add("sft/loss", total, len(packs[number].targets))
            return total / count, tally

        tally, _ = self.model.train_mini_batch(packs, loss, ("sft/loss",))
        return self.model.end_update("sft", tally, 1) | {"perf/total_num_tokens": sum(lengths)}

    def validate(self) -> dict[str, float]:
        """`val/loss`: the mean over the response tokens of the held-out rows, nats."""
        if not self._held_out:
            return {}
        sequences, prompts = _split(self._held_out)
        lengths = [len(tokens) - prompt for tokens, prompt in zip(sequences, prompts, strict=True)]
        packs = self.model.packs(
            self.model.plan([len(tokens) for tokens in sequences], len(sequences)),
            sequences,
            prompts,
            "response",
        )
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        logprobs = self.model.per_token(
            packs, mask, lambda logits, number: self._logprobs(logits, packs[number])[None]
        )
        return {"val/loss": float(-logprobs.sum(dtype=torch.float64) / mask.sum())}

    def summary(self, metrics: dict[str, float]) -> dict[str, float]:
        """`sft_loss`: on the held-out rows, or of the last step where there are none."""
        return {"sft_loss": metrics["val/loss"] if self._held_out else metrics["sft/loss"]}

    def _logprobs(self, logits: Tensor, pack: Pack) -> Tensor:
        targets, vocab = pack.targets.to(logits.device), self.model.spec.vocab_size
        return vocab_parallel_logprobs(
            logits, targets, self.model.groups.tp, 1.0, vocab, with_entropy=False
        )[0]


def _read(files: Sequence[str], tokenizer: Tokenizer, config: SFTConfig) -> list[SftExample]:
    return encode_sft(
        read_rows(files),
        tokenizer,
        max_length=config.data.max_length,
        overlong=config.data.overlong,
    )


def _split(examples: Sequence[SftExample]) -> tuple[list[list[int]], list[int]]:
    """Token ids of each example, and how many of them are the prompt's."""
    return [example.token_ids for example in examples], [
        example.loss_mask.index(1) for example in examples
    ]
