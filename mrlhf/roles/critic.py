"""The critic: a value for the state before each response token, and the clipped regression to the
returns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.config.sections import CriticSection
from mrlhf.metrics import Tally
from mrlhf.parallel.microbatch import MiniBatch, Pack
from mrlhf.rl.losses import aggregate, aggregation_count, value_loss
from mrlhf.rl.masking import masked_sum
from mrlhf.roles.base import TrainedRole, spread

UPDATE_METRICS = ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")


class Critic(TrainedRole):
    """The value model that is trained."""

    section: CriticSection

    def values(self, rollout: Rollout, plan: Sequence[MiniBatch]) -> Tensor:
        """Predicted return before each response token, float32 [batch, response_len] on every
        rank's host.
        """
        packs = self.packs(plan, rollout.sequences(), rollout.prompt_lengths, "response")
        return self.per_token(packs, rollout.response_mask, lambda output, _: output[:, 0][None])[0]

    def update(self, experience: Experience, plan: Sequence[MiniBatch]) -> dict[str, float]:
        """`ppo_epochs` passes over the batch, one optimizer step a mini-batch; returns the
        `critic/` metrics.
        """
        rollout = experience.rollout
        sequences, prompts = rollout.sequences(), rollout.prompt_lengths
        total, mini_batches = Tally(), self.section.ppo_epochs * list(plan)
        for mini_batch in mini_batches:
            packs = self.packs([mini_batch], sequences, prompts, "response")
            loss = _ValueObjective(self.section, experience, mini_batch, packs)
            total.merge(self.train_mini_batch(packs, loss, UPDATE_METRICS)[0])
        return self.end_update("critic", total, len(mini_batches))


class _ValueObjective:
    """The loss of one mini-batch, as the pipeline calls it for each of this rank's packs."""

    def __init__(
        self,
        section: CriticSection,
        experience: Experience,
        mini_batch: MiniBatch,
        packs: Sequence[Pack],
    ) -> None:
        self._section, self._experience, self._packs = section, experience, packs
        self._sequences = len(mini_batch.rows)
        tokens = int(experience.loss_mask[mini_batch.rows].sum())
        self._count = aggregation_count(tokens, self._sequences, section.loss_agg_mode)

    def __call__(self, output: Tensor, number: int) -> tuple[Tensor, Tally]:
        """The pack's part of the loss, and its tally."""
        section, pack = self._section, self._packs[number]
        experience = self._experience
        assert experience.values is not None, "a critic is trained, so there are its values"
        tables = (
            experience.rollout.response_mask,
            experience.loss_mask,
            experience.values,
            experience.returns,
        )
        response_mask, mask, old_values, returns = (
            table[pack.rows].to(output.device) for table in tables
        )
        values = spread(output[:, 0].float()[None], response_mask)[0]
        squared = value_loss(values, old_values, returns, section.cliprange_value)
        assert section.loss_scale_factor is not None
        summed = aggregate(
            squared.per_token, mask, section.loss_agg_mode, section.loss_scale_factor
        )
        loss = summed / self._count
        tally = Tally()
        tally.add("critic/vf_loss", loss, len(pack.rows) / self._sequences)
        tally.add("critic/vf_clipfrac", masked_sum(squared.clipped.float(), mask), mask.sum())
        tally.add("critic/vpred_mean", masked_sum(values, mask), mask.sum())
        return loss, tally
