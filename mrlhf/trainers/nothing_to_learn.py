"""Warns, once a run for each reason, of a step from which the policy can learn nothing.

Such a step is not an error: a policy that has mastered its task gets equal scores. It does not know
where scores and metrics come from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from mrlhf.rl.names import estimator_traits
from mrlhf.rl.prompt_groups import PromptGroups

logger = logging.getLogger(__name__)

_CORRECTION = "algorithm.rollout_correction"


class NothingToLearn:
    """Looks at each step, and remembers of what it has warned."""

    def __init__(self, estimator: str, is_main_rank: bool) -> None:
        """Warn of nothing yet.

        Args:
            estimator: the name of the advantage estimator.
            is_main_rank: whether this process speaks for all.
        """
        self._estimator = estimator
        self._is_main_rank = is_main_rank
        self._told: set[str] = set()

    def from_scores(self, scores: Tensor, prompt_groups: Tensor) -> None:
        """Warn if no response of the batch is better than another that it is compared with.

        Args:
            scores: [batch], after shaping, or [terms, batch] where terms are compared one by one.
            prompt_groups: int64 [batch].
        """
        columns = scores if scores.dim() == 2 else scores[None]
        batch = len(prompt_groups)
        if batch < 2:
            return

        if all(bool((column == column[0]).all()) for column in columns):
            numbers = ", ".join(f"{float(column[0]):g}" for column in columns)
            self._warn(
                "equal scores",
                f"all {batch} responses of a step have the score {numbers}: there is nothing to "
                "learn from scores that are equal; see whether reward.terms can tell good "
                "responses from bad ones, and whether the policy gives different ones",
            )
            return

        by_prompt = PromptGroups(prompt_groups)
        compares = estimator_traits(self._estimator).compares_within_prompt
        if not compares or bool(by_prompt.single.any()):
            return
        if all(bool((by_prompt.highest(x) == by_prompt.lowest(x)).all()) for x in columns):
            self._warn(
                "equal scores of each prompt",
                f"the responses of a step to each prompt have equal scores: {self._estimator} "
                "compares them, so there is nothing to learn; take prompts that are neither too "
                "easy nor too hard, a larger rollout.n, or algorithm.filter_groups.enable",
            )

    def from_correction(self, metrics: Mapping[str, float]) -> None:
        """Warn if the rollout correction left nothing of a step.

        Args:
            metrics: of the step.
        """
        if metrics.get("rollout_corr/rollout_rs_masked_fraction") == 1.0:
            self._warn(
                "rejection",
                f"{_CORRECTION}.rollout_rs has rejected every token of a step, so the policy "
                "learns nothing from it; widen rollout_rs_threshold, and see rollout_corr/kl for "
                "how far the engine is from the trainer",
            )
        if metrics.get("rollout_corr/rollout_is_mean") == 0.0:
            self._warn(
                "weights",
                f"{_CORRECTION}.rollout_is gives every token of a step the weight 0, so the policy "
                "learns nothing from it; widen rollout_is_threshold, and see rollout_corr/kl for "
                "how far the engine is from the trainer",
            )

    def _warn(self, reason: str, line: str) -> None:
        if self._is_main_rank and reason not in self._told:
            logger.warning("%s (this is said once)", line)
        self._told.add(reason)
