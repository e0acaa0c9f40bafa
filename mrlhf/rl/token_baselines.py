"""The optimal token baseline: a baseline for each token that lowers the variance of its gradient
most.

https://arxiv.org/abs/2602.07078. Tokens of the responses to one prompt that stand at the same place
share a baseline: the mean of their returns, weighted by how much the path up to them varies. This
file does not know how the rewards were made, nor the models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.rl.group_advantages import AdvantagesAndReturns
from mrlhf.rl.masking import working_dtype
from mrlhf.rl.prompt_groups import PromptGroups

ENERGY_EPS = 1e-8


@dataclass(frozen=True)
class TokenProbabilities:
    """Probabilities under the policy before the update; each field [units, response_len]."""

    logprobs: Tensor  # the log-probability of the drawn token
    sum_of_squares: Tensor  # the sum of the squared probabilities of the whole vocabulary
    # the importance weights that the policy loss is multiplied by, or None
    weights: Tensor | None = None

    def energy(self) -> Tensor:
        """1 - 2 p + sum of p^2, times the squared weight; float64 [units, response_len]."""
        # The squared length of the gradient of the token's log-probability, by the logits.
        energy = 1 - 2 * self.logprobs.double().exp() + self.sum_of_squares.double()
        energy = energy.clamp(min=0)  # the inputs are rounded, and near certainty it is 0
        return energy if self.weights is None else energy * self.weights.double().square()


def optimal_token_baseline(
    rewards: Tensor, mask: Tensor, prompt_groups: Tensor, probabilities: TokenProbabilities
) -> AdvantagesAndReturns:
    """The return from each token on, less the baseline of its place in the response.

    The baseline at place t is sum(G_t W_t) / (sum(W_t) + 1e-8) over the responses to the prompt
    that have a token there. G_t is the sum of the rewards from t on, W_t that of the energies up to
    t. The baseline is 0 where there is nothing to compare with: for a response alone in its prompt
    group, and at the places of the longest response that no other one reaches. As in verl, a place
    is a column, and a response reaches as many of them as it has tokens;
    `tir_optimal_token_baseline` is the one for masks with gaps.

    Rewards and the bool mask are [units, response_len], `prompt_groups` int64 [units].

    Returns:
        Advantages and returns, both [units, response_len], 0 outside the mask.
    """
    assert rewards.shape == mask.shape == probabilities.logprobs.shape, (
        f"{tuple(rewards.shape)}, {tuple(mask.shape)}, {tuple(probabilities.logprobs.shape)}"
    )
    assert mask.dtype == torch.bool, f"masks are bool, this one is {mask.dtype}"

    kept = rewards.double().masked_fill(~mask, 0)
    returns = kept.flip(1).cumsum(1).flip(1).masked_fill(~mask, 0)
    energy = probabilities.energy().masked_fill(~mask, 0).cumsum(1).masked_fill(~mask, 0)

    by_prompt = PromptGroups(prompt_groups)
    baseline = by_prompt.total(returns * energy) / (by_prompt.total(energy) + ENERGY_EPS)
    baseline = baseline.masked_fill(_without_company(mask, by_prompt), 0)

    dtype = working_dtype(rewards)
    advantages = (returns - baseline).masked_fill(~mask, 0)
    return advantages.to(dtype), returns.to(dtype)


def tir_optimal_token_baseline(
    rewards: Tensor, mask: Tensor, prompt_groups: Tensor, probabilities: TokenProbabilities
) -> AdvantagesAndReturns:
    """The optimal token baseline for responses that hold the answers of tools.

    The place of a token is its number among the tokens of its response that train, so that a tool's
    long answer does not move what follows it to another place. Without gaps in the mask it is
    `optimal_token_baseline`. Arguments and result as there.
    """
    order = (~mask).byte().argsort(dim=1, stable=True)

    def compact(table: Tensor) -> Tensor:
        return table.gather(1, order)

    weights = probabilities.weights
    compacted = TokenProbabilities(
        compact(probabilities.logprobs),
        compact(probabilities.sum_of_squares),
        None if weights is None else compact(weights),
    )
    advantages, returns = optimal_token_baseline(
        compact(rewards), compact(mask), prompt_groups, compacted
    )

    empty = torch.zeros_like(advantages)
    return empty.scatter(1, order, advantages), empty.scatter(1, order, returns)


def _without_company(mask: Tensor, by_prompt: PromptGroups) -> Tensor:
    """The places of a response that no other response to the prompt reaches; bool, as `mask`."""
    lengths = mask.sum(dim=1)
    is_longest = lengths == by_prompt.highest(lengths)
    longest_alone = is_longest & (by_prompt.total(is_longest.long()) == 1)

    second = by_prompt.highest(lengths.masked_fill(is_longest, 0))
    places = torch.arange(mask.shape[1], dtype=torch.int64, device=mask.device)
    return longest_alone[:, None] & (places >= second[:, None])
