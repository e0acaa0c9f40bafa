"""Training of a critic on stored rollouts, before there is a policy to train.

VC-PPO (https://arxiv.org/abs/2503.01491) and VAPO (https://arxiv.org/abs/2504.05118) call it value
pretraining. This file knows the targets and the loss; the loop is in `supervised`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mrlhf.batch import Sequences
from mrlhf.config.algorithm import ReturnsSection
from mrlhf.config.roots import CriticConfig
from mrlhf.data.rollouts import ScoredResponse
from mrlhf.inputs import read_row_inputs
from mrlhf.metrics import Tally, value_metrics
from mrlhf.metrics.tally import standard_errors
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.parallel.packs import lay_flat
from mrlhf.rl.advantages import gae
from mrlhf.rl.masking import masked_sum
from mrlhf.trainers.supervised import SupervisedTask, train_supervised
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import Loss, PackResult


def train_critic(config: CriticConfig) -> None:
    """Train a critic as configured; every rank calls it."""
    inputs = read_row_inputs(config)
    task = ValueLearning(config.algorithm, inputs.examples, inputs.held_out)
    train_supervised(config, inputs, task)


_Responses = Sequence[ScoredResponse]


class ValueLearning(SupervisedTask[_Responses]):
    """Learns the return that follows each token of stored responses."""

    name = "values"

    def __init__(
        self, section: ReturnsSection, train: _Responses, held_out: _Responses | None
    ) -> None:
        """Take the targets' numbers, the training rows and the validation rows."""
        super().__init__(train, held_out)
        self._section = section

    def _loss_on(
        self, engine: ModelEngine, rows: Sequence[int]
    ) -> tuple[Sequences, BatchCut, Loss]:
        """`values/vf_loss` is half the mean squared error over the tokens that count."""
        batch = _Batch([self._train[row] for row in rows])
        cut = engine.cut(batch.sequences, "response")
        lam = self._section.lam_critic
        before = batch.values(engine, cut) if lam < 1 else torch.zeros_like(batch.rewards)
        _, returns = gae(batch.rewards, before, batch.mask, self._section.gamma, lam)
        packs = lay_flat({"mask": batch.mask, "returns": returns}, cut.packs)
        count = int(batch.mask.sum())

        def loss(output: Tensor, number: int) -> tuple[Tensor, PackResult]:
            mask = packs[number]["mask"]
            errors = output[:, 0].float() - packs[number]["returns"]
            total = masked_sum(0.5 * errors.square(), mask)
            tally = Tally()
            tally.add("values/vf_loss", total, mask.sum())
            return total / count, PackResult(tally)

        return batch.sequences, cut, loss

    def validate(self, engine: ModelEngine) -> dict[str, float]:
        """Loss, explained variance and bias by position, against Monte-Carlo returns."""
        if not self._held_out:
            return {}
        batch = _Batch(self._held_out)
        mask = batch.mask
        values = batch.values(engine, engine.cut(batch.sequences, "response"))
        _, returns = gae(batch.rewards, torch.zeros_like(values), mask, self._section.gamma, 1.0)
        losses = (0.5 * (values - returns).square()).double() * mask
        count = int(mask.sum())
        loss = float(losses.sum()) / count

        # The mean is over tokens. A row moves it by what it has above the mean for its length.
        above = losses.sum(dim=1) - loss * mask.sum(dim=1)
        return {
            "val/loss": loss,
            **value_metrics("val/", values, returns, mask),
            **standard_errors({"val/loss": above * (len(above) / count)}),
        }

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Loss and `explained_variance` on held-out rows; without them, the last step's loss."""
        if not self.has_held_out:
            return {"value_loss": metrics["values/vf_loss"]}
        explained = metrics["val/explained_var"]
        return {"value_loss": metrics["val/loss"], "explained_variance": explained}


class _Batch:
    """Responses side by side; tables are [batch, response_len]."""

    def __init__(self, responses: _Responses) -> None:
        self.sequences = Sequences.of(
            [each.token_ids for each in responses],
            [len(each.token_ids) - len(each.drew) for each in responses],
        )
        drew = [torch.tensor(each.drew) for each in responses]
        rewards = [torch.tensor(each.rewards, dtype=torch.float32) for each in responses]
        self.mask = pad_sequence(drew, batch_first=True)  # the tokens that count
        self.rewards = pad_sequence(rewards, batch_first=True)

    def values(self, engine: ModelEngine, cut: BatchCut) -> Tensor:
        """The model's values before all tokens, on the host."""
        shape = (len(self.mask), self.sequences.width)
        return engine.per_token(cut.packs, shape, lambda output, _: output[:, 0][None])[0]
