"""The critic: a value before each response token, and the clipped regression to the returns."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.config.sections import CriticSection
from mrlhf.errors import Interrupted
from mrlhf.metrics import Tally
from mrlhf.parallel.microbatch import BatchCut, PackedMiniBatch
from mrlhf.parallel.packs import Pack
from mrlhf.rl.losses import aggregate, aggregation_count, value_loss
from mrlhf.rl.masking import masked_sum
from mrlhf.roles.update_progress import UpdateProgress
from mrlhf.training.engine import ModelEngine, PackResult

UPDATE_METRICS = ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")


class Critic:
    """Asks a model with a scalar head for values, and trains it."""

    def __init__(self, engine: ModelEngine, section: CriticSection) -> None:
        self.engine = engine
        self._section = section

    def values(self, rollout: Rollout, cut: BatchCut) -> Tensor:
        """Predicted return before each response token, float32 [batch, response_len] on every host.

        Args:
            rollout: the global batch.
            cut: its cut for this model.
        """

        def evaluate(output: Tensor, number: int) -> Tensor:
            return output[:, 0][None]

        return self.engine.per_token(cut.packs, rollout.shape, evaluate)[0]

    def update(
        self, experience: Experience, cut: BatchCut, progress: UpdateProgress | None = None
    ) -> dict[str, float]:
        """`ppo_epochs` passes over the batch with one optimizer step for each mini-batch.

        Args:
            experience: the global batch.
            cut: its cut for this model.
            progress: how far the update has come; the mini-batches that are done are left out.

        Returns:
            The `critic/` metrics.

        Raises:
            TrainingError: too many gradients in a row were not usable.
            Interrupted: the run stops here; `progress` says where.
        """
        progress = progress or UpdateProgress()
        steps = self._section.ppo_epochs * cut.mini_batches

        try:
            for mini_batch in steps[progress.mini_batches :]:
                loss = _ValueObjective(self._section, experience, mini_batch)
                progress.add(self.engine.train_mini_batch(mini_batch.packs, loss, UPDATE_METRICS))
        except Interrupted:
            progress.complete(self.engine)
            raise

        progress.complete(self.engine)
        return self.engine.end_update("critic", progress.total, len(steps))


class _ValueObjective:
    """The loss of one mini-batch, as a function of the outputs of each of this rank's packs."""

    def __init__(
        self, section: CriticSection, experience: Experience, mini_batch: PackedMiniBatch
    ) -> None:
        self._section = section
        self._experience = experience
        self._packs: Sequence[Pack] = mini_batch.packs
        self._sequences = len(mini_batch.rows)
        tokens = int(experience.loss_mask[mini_batch.rows].sum())
        self._count = aggregation_count(tokens, self._sequences, section.loss_agg_mode)

    def __call__(self, output: Tensor, number: int) -> tuple[Tensor, PackResult]:
        """The pack's part of the loss, and its tally."""
        section = self._section
        experience = self._experience
        assert experience.values is not None, "a critic is trained, so there are its values"
        assert section.loss_scale_factor is not None
        pack = self._packs[number]
        rows = pack.rows

        def rows_of(table: Tensor) -> Tensor:
            return table[rows].to(output.device)

        mask = rows_of(experience.loss_mask)
        values = pack.spread(output[:, 0].float()[None])[0]
        squared = value_loss(
            values,
            rows_of(experience.values),
            rows_of(experience.returns),
            section.cliprange_value,
        )
        summed = aggregate(
            squared.per_token, mask, section.loss_agg_mode, section.loss_scale_factor
        )
        loss = summed / self._count

        tally = Tally()
        tally.add("critic/vf_loss", loss, len(rows) / self._sequences)
        tally.add("critic/vf_clipfrac", masked_sum(squared.clipped.float(), mask), mask.sum())
        tally.add("critic/vpred_mean", masked_sum(values, mask), mask.sum())
        return loss, PackResult(tally)
