"""Reward-model training on preference pairs: the loss is -log sigmoid(chosen - rejected), with
what section `rm` adds to it.

The formula is that of `score_loss`. This file knows the metrics and the pair accuracy; the loop is
in `supervised`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.pair_losses import RewardLossSection
from mrlhf.config.roots import RewardModelConfig
from mrlhf.data.preferences import PreferencePairs
from mrlhf.device import send
from mrlhf.inputs import read_preference_inputs
from mrlhf.metrics.tally import Tally, standard_errors
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.parallel.packs import gather_rows
from mrlhf.rl.preference import ScoreLossOptions, score_loss
from mrlhf.roles.reward_model import score_sequences, up_to_scored, with_pad_token
from mrlhf.run.startup import start
from mrlhf.trainers.supervised import SupervisedTask, SupervisedTrainer
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import Loss, PackResult


def train_reward_model(config: RewardModelConfig) -> None:
    """Train a reward model as configured; every rank calls it."""
    # Bad input is refused before the output directory is touched.
    inputs = read_preference_inputs(config)
    with start(config) as run:
        task = PreferenceLearning(config.rm, inputs.pairs, inputs.held_out)
        tokenizer = inputs.tokenizer
        stored = spec_of_role(config.model, "scalar")
        spec = with_pad_token(stored, tokenizer.pad_id, tokenizer.ids)
        trainer = SupervisedTrainer(config, inputs, run, spec, task)
        run.begin()
        trainer.fit()


class PreferenceLearning(SupervisedTask[PreferencePairs]):
    """Learns to score the chosen response of each pair above the rejected one."""

    name = "rm"

    def __init__(
        self,
        section: RewardLossSection,
        train: PreferencePairs,
        held_out: PreferencePairs | None,
    ) -> None:
        """Take the loss, the training pairs, and the validation pairs, if there are any."""
        super().__init__(train, held_out)
        self._options = ScoreLossOptions(section.centring, section.label_smoothing)

    def _loss_on(
        self, engine: ModelEngine, rows: Sequence[int]
    ) -> tuple[Sequences, BatchCut, Loss]:
        """Loss (nats), accuracy and margin are means over the pairs."""
        sequences = up_to_scored(self._train.sequences(rows), engine.spec)
        cut = engine.cut(sequences, "last", together=2)

        def loss(output: Tensor, number: int) -> tuple[Tensor, PackResult]:
            pack = cut.packs[number]
            # The last tokens of a pair may lie on two ranks.
            [numbers] = gather_rows(output.float().T, pack, engine.groups.cp)
            scores = numbers.view(-1, 2)
            pairs = [rows[row // 2] for row in pack.rows[::2]]
            total = self._losses(self._train, pairs, scores).sum()
            margin = scores[:, 0] - scores[:, 1]

            tally = Tally()
            if pack.segments.rank == 0:  # the other ranks that share the pairs have the same loss
                tally.add("rm/loss", total, len(margin))
                tally.add("rm/accuracy", (margin > 0).sum(), len(margin))
                tally.add("rm/margin", margin.sum(), len(margin))
                if self._options.centring:
                    tally.add("rm/centring", scores.sum(dim=1).square().sum(), len(margin))
            return total / len(rows), PackResult(tally)

        return sequences, cut, loss

    def validate(self, engine: ModelEngine) -> dict[str, float]:
        """Loss on the held-out pairs, and the share whose chosen response scores higher."""
        if self._held_out is None:
            return {}
        sequences = self._held_out.sequences(range(len(self._held_out)))
        scores = score_sequences(engine, sequences, together=2).view(-1, 2)
        losses = self._losses(self._held_out, range(len(scores)), scores)
        margin = scores[:, 0] - scores[:, 1]
        return {
            "val/accuracy": float((margin > 0).float().mean()),
            "val/loss": float(losses.mean()),
            **standard_errors({"val/accuracy": margin > 0}),
        }

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """`rm_pair_accuracy` on the held-out pairs; without them, that of the last step."""
        kind = "val" if self.has_held_out else "rm"
        return {"rm_pair_accuracy": metrics[f"{kind}/accuracy"]}

    def _losses(self, pairs: PreferencePairs, rows: Sequence[int], scores: Tensor) -> Tensor:
        """The losses of these rows of `pairs`, by their scores, float32 [rows, 2]."""
        margins = None
        if pairs.margins is not None:
            of_rows = torch.tensor([pairs.margins[row] for row in rows], dtype=torch.float32)
            margins = send(of_rows, scores.device)
        return score_loss(scores, margins, self._options)
