"""Reward units: what has a reward of its own, a whole response or each context of an episode.

Tables with a row for each response are spread over these units, and folded together again. It knows
neither rewards nor estimators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.rl.prompt_groups import PromptGroups


@dataclass(frozen=True)
class RewardUnits:
    """The units of a rollout; where all are responses, nothing is copied."""

    mask: Tensor  # bool [units, response_len], the tokens that the policy drew
    groups: Tensor  # int64 [units], units with the same number are compared
    rows: Tensor | None  # int64 [units], the response of each; None: unit and response are one

    @staticmethod
    def of(rollout: Rollout) -> RewardUnits:
        """The units; contexts that share the rewards of their episode are one."""
        groups = rollout.prompt_groups
        episodes = rollout.episodes or []
        if not any(episode.context_roles for episode in episodes):
            return RewardUnits(rollout.loss_mask, groups, None)

        rows, begins, ends, names = [], [], [], []
        width = rollout.shape[1]
        for row, episode in enumerate(episodes):
            starts = [0, *episode.context_begins] if episode.context_roles else [0]
            rows += [row] * len(starts)
            begins += starts
            ends += [*starts[1:], width]
            group = int(groups[row])
            names += [(group, role) for role in episode.context_roles or [""]]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        columns = torch.arange(width)
        own = (columns >= torch.tensor(begins)[:, None]) & (columns < torch.tensor(ends)[:, None])
        index = torch.tensor(rows)
        return RewardUnits(
            rollout.loss_mask[index] & own,
            torch.tensor([numbers[name] for name in names]),
            index,
        )

    def spread(self, table: Tensor) -> Tensor:
        """The rows of a table of responses, repeated for each unit."""
        return table if self.rows is None else table[self.rows]

    def fold(self, table: Tensor, responses: int) -> Tensor:
        """The numbers [units, response_len] of drawn tokens as [responses, response_len]."""
        if self.rows is None:
            return table
        folded = table.new_zeros(responses, table.shape[1])
        return folded.index_add_(0, self.rows, table.masked_fill(~self.mask, 0))

    def scores(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """Scores [batch] plus the rewards of turns, [units]."""
        turn_rewards = rollout.turn_rewards()
        if turn_rewards is None:
            return self.spread(scores)
        return self.spread(scores) + (self.spread(turn_rewards) * self.mask).sum(dim=1)

    def differ(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """Whether a unit of a response has another score than one it is compared with.

        `scores` [batch] are without those of turns; the result is bool [batch].
        """
        compared = self.scores(scores, rollout)
        groups = PromptGroups(self.groups)
        differs = groups.highest(compared) > groups.lowest(compared)
        if self.rows is None:
            return differs
        return torch.zeros(len(rollout), dtype=torch.bool).index_put(
            (self.rows,), differs, accumulate=True
        )
