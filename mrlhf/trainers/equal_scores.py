"""Measures how many scores of a step are equal, from which the policy can learn nothing.

Such a step is not an error: a policy that has mastered its task gets equal scores. This file does
not know where scores come from, nor who warns.
"""

from __future__ import annotations

from torch import Tensor

from mrlhf.rl.names import estimator_traits
from mrlhf.rl.prompt_groups import PromptGroups


def equal_score_metrics(scores: Tensor, prompt_groups: Tensor, estimator: str) -> dict[str, float]:
    """How many scores of a batch are equal to those with which they are compared.

    Args:
        scores: [batch], after shaping, or [terms, batch] where terms are compared one by one.
        prompt_groups: int64 [batch].
        estimator: the name of the advantage estimator.

    Returns:
        `training/equal_scores`: 1 if all scores are equal, otherwise 0; it is missing for a batch
        of one response. `training/equal_groups`: the share of the prompts whose responses have
        equal scores; it is missing if the estimator does not compare the responses to a prompt, or
        if a prompt has only one.
    """
    columns = scores if scores.dim() == 2 else scores[None]
    if len(prompt_groups) < 2:
        return {}

    all_equal = all(bool((column == column[0]).all()) for column in columns)
    metrics = {"training/equal_scores": float(all_equal)}

    by_prompt = PromptGroups(prompt_groups)
    compares = estimator_traits(estimator).compares_within_prompt
    if compares and not bool(by_prompt.single.any()):
        equal = by_prompt.size > 0
        for column in columns:
            equal &= by_prompt.highest(column) == by_prompt.lowest(column)
        # Each prompt counts once, whatever the number of its responses.
        weights = 1 / by_prompt.size.double()
        metrics["training/equal_groups"] = float(weights[equal].sum() / weights.sum())
    return metrics
