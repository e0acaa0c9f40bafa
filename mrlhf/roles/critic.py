"""The critic: a value before each response token, and the clipped regression to the returns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.config.critic import CriticSection
from mrlhf.errors import Interrupted
from mrlhf.metrics import Tally
from mrlhf.parallel.microbatch import BatchCut, PackedMiniBatch
from mrlhf.parallel.packs import lay_flat
from mrlhf.rl.losses import aggregation_count, token_weights, value_loss
from mrlhf.rl.masking import masked_sum
from mrlhf.roles.update_progress import UpdateProgress
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import PackResult


class Critic:
    """Asks a model with a scalar head for values, and trains it."""

    def __init__(self, engine: ModelEngine, section: CriticSection) -> None:
        self.engine = engine
        self._section = section

    def values(self, rollout: Rollout, cut: BatchCut) -> Tensor:
        """Predicted returns before response tokens; float32 [batch, response_len] on each host."""

        def evaluate(output: Tensor, number: int) -> Tensor:
            return output[:, 0][None]

        return self.engine.per_token(cut.packs, rollout.shape, evaluate)[0]

    def update(
        self, experience: Experience, cut: BatchCut, progress: UpdateProgress | None = None
    ) -> dict[str, float]:
        """`ppo_epochs` passes over the batch with one optimizer step for each mini-batch.

        Mini-batches that `progress` counts as done are left out. Returns the `critic/` metrics.

        Raises:
            TrainingError: too many gradients in a row were not usable.
            Interrupted: the run stops here; `progress` says where.
        """
        progress = progress or UpdateProgress()
        # Each loss lays its numbers out once, for all epochs.
        losses = [_ValueObjective(self._section, experience, part) for part in cut.mini_batches]
        steps = self._section.ppo_epochs * list(zip(cut.mini_batches, losses, strict=True))

        try:
            with self.engine.training():
                for mini_batch, loss in steps[progress.mini_batches :]:
                    self.engine.phases.advance(progress.mini_batches, len(steps), "mini-batches")
                    progress.add(self.engine.train_mini_batch(mini_batch.packs, loss, "critic"))
        except Interrupted:
            progress.complete(self.engine)
            raise

        progress.complete(self.engine)
        return self.engine.end_update("critic", progress.total)


@dataclass(frozen=True)
class _ValueTokens:
    """The numbers of the tokens of one pack, [tokens], where the model is."""

    mask: Tensor  # bool, the tokens that train
    old_values: Tensor  # the critic's predictions before the update
    returns: Tensor  # the targets of the prediction
    weights: Tensor  # the weight of each token in the sum of the loss


class _ValueObjective:
    """The loss of one mini-batch, as a function of the outputs of each of this rank's packs."""

    def __init__(
        self, section: CriticSection, experience: Experience, mini_batch: PackedMiniBatch
    ) -> None:
        self._section = section
        self._experience = experience
        self._mini_batch = mini_batch
        self._sequences = len(mini_batch.rows)
        self._span = slice(mini_batch.rows[0], mini_batch.rows[-1] + 1)
        tokens = int(experience.loss_mask[self._span].sum())
        self._count = aggregation_count(tokens, self._sequences, section.loss_agg_mode)

    def __call__(self, output: Tensor, number: int) -> tuple[Tensor, PackResult]:
        """The pack's part of the loss, and its tally."""
        tokens = self._packs[number]
        pack = self._mini_batch.packs[number]
        values = output[:, 0].float()
        squared = value_loss(
            values, tokens.old_values, tokens.returns, self._section.cliprange_value
        )
        mask = tokens.mask
        loss = masked_sum(squared.per_token * tokens.weights, mask) / self._count

        tally = Tally()
        # Each of the ranks that share the pack's sequences has its part of the loss.
        share = pack.begun_rows / self._sequences / pack.segments.size
        tally.add("critic/vf_loss", loss, share)
        tally.add("critic/vf_clipfrac", masked_sum(squared.clipped.float(), mask), mask.sum())
        tally.add("critic/vpred_mean", masked_sum(values, mask), mask.sum())
        return loss, PackResult(tally)

    @cached_property
    def _packs(self) -> list[_ValueTokens]:
        """The numbers of each of this rank's packs; only the last stage asks for them."""
        section = self._section
        experience = self._experience
        assert experience.values is not None, "a critic is trained, so there are its values"
        assert section.loss_scale_factor is not None

        mask = experience.loss_mask[self._span]
        tables = {
            "mask": mask,
            "old_values": experience.values[self._span],
            "returns": experience.returns[self._span],
            "weights": token_weights(mask, section.loss_agg_mode, section.loss_scale_factor),
        }
        packs = lay_flat(tables, self._mini_batch.local_packs)
        return [_ValueTokens(**numbers) for numbers in packs]
