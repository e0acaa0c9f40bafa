"""The reward model: a frozen model with a scalar head that scores whole responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.training.engine import ModelEngine


class RewardModel:
    """Takes the output at the last token of a sequence as its score."""

    def __init__(self, engine: ModelEngine) -> None:
        self.engine = engine

    def score(self, rollout: Rollout) -> Tensor:
        """One score for each response, float32 [batch] on every rank's host."""
        return score_sequences(self.engine, rollout.sequences())


def score_sequences(
    engine: ModelEngine, sequences: Sequence[Sequence[int]], together: int = 1
) -> Tensor:
    """The scalar output at the last token of each sequence, float32 [batch] on every rank's host.

    Args:
        engine: a model with a scalar head.
        sequences: token ids.
        together: number of consecutive sequences that must stay in one micro-batch.
    """
    cut = engine.cut(sequences, [1] * len(sequences), "last", together=together)
    mask = torch.ones(len(sequences), 1, dtype=torch.bool)
    return engine.per_token(cut.packs, mask, _scalar_output)[0, :, 0]


def _scalar_output(output: Tensor, number: int) -> Tensor:
    return output[:, 0][None]
