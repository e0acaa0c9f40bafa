"""The batches that flow through one PPO step, one type a stage: Prompts -> Rollout -> Experience.

All tensors live on the host, padded to [batch, response_len]; what moves to a device is the packed micro-batch made of
them. Every rank holds the same batch, so an index into it means the same sample everywhere. This file knows neither
models nor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompts:
    """Tokenised prompts; every list has one entry a prompt.

    Attributes:
        token_ids: the prompt's tokens, chat template applied, of any length >= 1.
        uid: stable number of the prompt in its data set; sampling depends on it and not on the batch order.
        text: the prompt as text.
        data_source: name of the data set; chooses rules and groups validation metrics.
        ground_truth: the reference answer as text.
        extra_info: whatever else the row carries, for user reward functions.
    """

    token_ids: list[list[int]]
    uid: list[int]
    text: list[str]
    data_source: list[str]
    ground_truth: list[str]
    extra_info: list[dict[str, Any]]

    def __post_init__(self) -> None:
        sizes = {len(column) for column in self._columns()}
        assert len(sizes) == 1, f"prompt columns of different lengths: {sorted(sizes)}"

    def __len__(self) -> int:
        return len(self.token_ids)

    def _columns(self) -> tuple[list[Any], ...]:
        return (self.token_ids, self.uid, self.text, self.data_source, self.ground_truth, self.extra_info)

    def select(self, indices: Sequence[int]) -> Prompts:
        """The prompts at `indices`, in that order."""
        return Prompts(*([column[i] for i in indices] for column in self._columns()))

    def repeat(self, n: int) -> Prompts:
        """Each prompt `n` times in a row (interleaved): p0 p0 p1 p1 for n = 2."""
        return self.select([i for i in range(len(self)) for _ in range(n)])


@dataclass(frozen=True)
class Rollout:
    """Responses to prompts; row i of every tensor answers `prompts` row i (prompts already repeated n times).

    Attributes:
        prompts: one row a sample.
        sample_index: which of the prompt's n samples the row is.
        response_ids: int64 [batch, response_len], zero after the end.
        response_mask: bool [batch, response_len], from lengths; the stop token is part of the response.
        rollout_logprobs: float32 [batch, response_len], log-probabilities at the sampling temperature, from the engine.
        stopped: bool [batch], True where a stop token ended the response, False where the length limit did.
        version: version of the policy weights that generated the batch.
    """

    prompts: Prompts
    sample_index: list[int]
    response_ids: Tensor
    response_mask: Tensor
    rollout_logprobs: Tensor
    stopped: Tensor
    version: int

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each row's prompt."""
        return [len(tokens) for tokens in self.prompts.token_ids]

    @property
    def response_lengths(self) -> list[int]:
        """Tokens of each row's response, stop token included."""
        return [int(n) for n in self.response_mask.sum(dim=1).tolist()]

    def sequences(self) -> list[list[int]]:
        """Prompt and response tokens of each row, joined, without padding."""
        rows = zip(self.prompts.token_ids, self.response_ids.tolist(), self.response_lengths, strict=True)
        return [prompt + response[:length] for prompt, response, length in rows]


@dataclass(frozen=True)
class Experience:
    """A rollout with all that the updates need; tensors are float32 [batch, response_len] unless said.

    Attributes:
        rollout: the responses.
        scores: [batch], the reward of each whole response before any KL.
        old_logprobs: log-probabilities under the policy before this step's updates; fixed throughout the step.
        ref_logprobs: the same under the frozen reference, or None where no KL is asked for.
        token_rewards: scores placed on tokens, KL taken off.
        values: the critic's predictions before this step's updates.
        advantages: whitened over the whole batch.
        returns: regression targets of the critic.
    """

    rollout: Rollout
    scores: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    token_rewards: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


def pad_responses(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Right-pad ragged rows with zeros.

    Returns:
        The padded tensor [batch, response_len] of `dtype` and its bool mask, response_len the longest row (>= 1).
    """
    width = max([1, *(len(row) for row in rows)])
    padded = torch.zeros(len(rows), width, dtype=dtype)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(list(row), dtype=dtype)
        mask[i, : len(row)] = True
    return padded, mask
