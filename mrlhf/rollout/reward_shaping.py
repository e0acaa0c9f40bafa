"""Shapes the scores of a batch for training: normalises and clips them, adds penalties for length.

The order is always normalise, clip, add penalties, so that a penalty is in the unit in which it is
configured. This file does not know where the scores come from, nor the KL.
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
    """Shapes scores as configured, and keeps the moments for running normalisation."""

    algorithm: AlgorithmSection
    max_response_length: int  # tokens at which a response is cut
    # moments of all scores so far, for running normalisation
    seen: Moments = field(default_factory=lambda: Moments(0, 0.0, 0.0))

    def shape(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """Shape the scores [batch] of a step's whole batch; running moments include them."""
        kind = self.algorithm.reward_norm
        if kind == "running":
            self.seen = merge_moments([self.seen, _moments(scores)])
            scores = normalise_scores(scores, self.seen)
        elif kind == "batch":
            scores = normalise_scores(scores, _moments(scores))
        elif kind == "group":
            scores = normalise_by_prompt(scores, rollout.prompt_groups)

        return self._penalise(self._clip(scores), rollout)

    def shape_each(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """Add penalties to scores [batch], clipped unless a normalisation comes before that."""
        if self.algorithm.reward_norm is None:
            scores = self._clip(scores)
        return self._penalise(scores, rollout)

    def _clip(self, scores: Tensor) -> Tensor:
        limit = self.algorithm.reward_clip
        return scores if limit is None else scores.clamp(-limit, limit)

    def _penalise(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """Add the penalties for length; a length counts all tokens of the response."""
        dtype = scores.dtype
        buffer = self.algorithm.overlong_buffer
        if buffer.enable:
            assert buffer.len is not None
            lengths = rollout.response_mask.sum(dim=1)
            scores = scores + overlong_penalty(
                lengths, self.max_response_length, buffer.len, buffer.penalty_factor
            )

        penalty = self.algorithm.missing_eos_penalty
        if penalty:
            scores = scores + missing_eos_penalty(rollout.stopped, penalty)

        return scores.to(dtype)

    def state_dict(self) -> dict[str, Tensor]:
        """The moments for running normalisation."""
        return {"seen": self.seen.to_tensor()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a state that `state_dict` gave."""
        self.seen = Moments.from_tensor(state["seen"])


def _moments(scores: Tensor) -> Moments:
    return local_moments(scores, torch.ones_like(scores, dtype=torch.bool))
