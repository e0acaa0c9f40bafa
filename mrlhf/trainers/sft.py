"""Supervised fine-tuning: the mean negative log-likelihood of response tokens, on any layout.

It knows the loss. The loop is in `supervised`; token ids come from `data`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.roots import SFTConfig
from mrlhf.data.sft import SftExample
from mrlhf.inputs import read_row_inputs
from mrlhf.metrics.tally import Tally, standard_errors
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.parallel.vocab_sums import NumbersToCompute
from mrlhf.roles.token_logprobs import TokenLogprobs
from mrlhf.trainers.supervised import SupervisedTask, train_supervised
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import Loss, PackResult


def train_sft(config: SFTConfig) -> None:
    """Run supervised fine-tuning as configured; every rank calls it."""
    inputs = read_row_inputs(config)
    train_supervised(config, inputs, FineTuning(inputs.examples, inputs.held_out))


class FineTuning(SupervisedTask[Sequence[SftExample]]):
    """Learns the responses of prompt-response rows."""

    name = "sft"

    def _loss_on(
        self, engine: ModelEngine, rows: Sequence[int]
    ) -> tuple[Sequences, BatchCut, Loss]:
        """`sft/loss` is the mean over the response tokens of the rows, nats."""
        token_logprobs = TokenLogprobs(engine, temperature=1.0)
        sequences = _sequences([self._train[row] for row in rows])
        response_tokens = int((sequences.lengths - sequences.prompt_lengths).sum())
        cut = engine.cut(sequences, "response")
        packs = cut.packs

        def loss(hidden: Tensor, number: int) -> tuple[Tensor, PackResult]:
            pack = packs[number]
            parts = token_logprobs.loss_parts(hidden, pack, NumbersToCompute(), by_token=True)
            for part in parts:
                parts.add(part, -part.numbers.logprobs.sum())
            total = parts.total()
            tally = Tally()
            tally.add("sft/loss", total, len(pack.select))
            return total / response_tokens, PackResult(tally)

        return sequences, cut, loss

    def validate(self, engine: ModelEngine) -> dict[str, float]:
        """`val/loss`: the mean over the response tokens of the held-out rows, nats."""
        if not self._held_out:
            return {}
        sequences = _sequences(self._held_out)
        packs = engine.cut(sequences, "response").packs
        response_tokens = int((sequences.lengths - sequences.prompt_lengths).sum())

        shape = (len(sequences), sequences.width)
        logprobs = TokenLogprobs(engine, temperature=1.0).of_batch(packs, shape)
        loss = float(-logprobs.sum(dtype=torch.float64) / response_tokens)

        # The mean is over tokens. A row moves it by what it has above the mean for its length.
        lengths = (sequences.lengths - sequences.prompt_lengths).to(logprobs.device)
        above = -logprobs.sum(dim=1, dtype=torch.float64) - loss * lengths
        errors = standard_errors({"val/loss": above * (len(above) / response_tokens)})
        return {"val/loss": loss, **errors}

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`sft_loss` on the held-out rows; without them, that of the last step."""
        return {"sft_loss": metrics["val/loss"] if self._held_out else metrics["sft/loss"]}


def _sequences(examples: Sequence[SftExample]) -> Sequences:
    """Prompt and response of each example."""
    return Sequences.of(
        [example.token_ids for example in examples],
        [example.loss_mask.index(1) for example in examples],
    )
