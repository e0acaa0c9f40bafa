"""From the scores of a batch to the scores that train: normalised, clipped, with penalties for
length.

The order is fixed: normalise, clip, add penalties, so that a penalty is in the unit that the
configuration names. It does not know who gave the scores, nor the KL.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.config.algorithm import AlgorithmSection
from mrlhf.rl.masking import Moments, local_moments, merge_moments
from mrlhf.rl.shaping import (
    missing_eos_penalty,
    normalise_by_prompt,
    normalise_scores,
    overlong_penalty,
)


@dataclass
class RewardShaper:
    """Shapes scores as configured, and remembers what running normalisation has seen.

    Attributes:
        algorithm: what to do.
        max_response_length: tokens at which a response is cut.
        seen: moments of all scores so far.
    """

    algorithm: AlgorithmSection
    max_response_length: int
    seen: Moments = field(default_factory=lambda: Moments(0, 0.0, 0.0))

    def shape(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """Shaped scores [batch] of the step's whole batch; running moments take it in first."""
        kind = self.algorithm.reward_norm
        if kind == "running":
            self.seen = merge_moments([self.seen, _moments(scores)])
            scores = normalise_scores(scores, self.seen)
        elif kind == "batch":
            scores = normalise_scores(scores, _moments(scores))
        elif kind == "group":
            scores = normalise_by_prompt(scores, rollout.groups)
        return self._penalised(self._clipped(scores), rollout)

    def shape_alone(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """What can be done to scores [batch] before the whole batch is there: clip, unless that
        comes after a normalisation, and penalties.
        """
        if self.algorithm.reward_norm is None:
            scores = self._clipped(scores)
        return self._penalised(scores, rollout)

    def _clipped(self, scores: Tensor) -> Tensor:
        limit = self.algorithm.reward_clip
        return scores if limit is None else scores.clamp(-limit, limit)

    def _penalised(self, scores: Tensor, rollout: Rollout) -> Tensor:
        algorithm, buffer = self.algorithm, self.algorithm.overlong_buffer
        if buffer.enable:
            assert buffer.len is not None
            lengths = rollout.response_mask.sum(dim=1)
            scores = scores + overlong_penalty(
                lengths, self.max_response_length, buffer.len, buffer.penalty_factor
            )
        if algorithm.missing_eos_penalty:
            scores = scores + missing_eos_penalty(rollout.stopped, algorithm.missing_eos_penalty)
        return scores

    def state_dict(self) -> dict[str, Tensor]:
        """What running normalisation has seen."""
        return {"seen": self.seen.to_tensor()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state that `state_dict` gave."""
        self.seen = Moments.from_tensor(state["seen"])


def _moments(scores: Tensor) -> Moments:
    return local_moments(scores, torch.ones_like(scores, dtype=torch.bool))
