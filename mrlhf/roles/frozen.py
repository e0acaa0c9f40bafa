"""The two roles that never change: the reference policy and the reward model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.config.sections import ReferenceSection
from mrlhf.device import Device
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.microbatch import MiniBatch
from mrlhf.parallel.vocab import vocab_parallel_logprobs
from mrlhf.roles.base import Role


class Reference(Role):
    """The policy that the KL is measured from."""

    def __init__(
        self,
        section: ReferenceSection,
        spec: ModelSpec,
        groups: RoleGroups,
        device: Device,
        temperature: float,
    ) -> None:
        super().__init__(section, spec, groups, device)
        self.temperature = temperature

    def logprobs(self, rollout: Rollout) -> Tensor:
        """Log-probabilities of the response tokens, float32 [batch, response_len] on every rank's
        host.
        """
        sequences = rollout.sequences()
        plan = self.plan([len(tokens) for tokens in sequences], len(sequences))
        packs = self.packs(plan, sequences, rollout.prompt_lengths, "response")

        def per_position(logits: Tensor, number: int) -> Tensor:
            targets = packs[number].targets.to(logits.device)
            vocab, group = self.spec.vocab_size, self.groups.tp
            return vocab_parallel_logprobs(
                logits, targets, group, self.temperature, vocab, with_entropy=False
            )[0][None]

        return self.per_token(packs, rollout.response_mask, per_position)[0]

    def logits(self, rollout: Rollout, plan: Sequence[MiniBatch]) -> list[Tensor]:
        """This rank's shard of the logits before each response token, for the KL over the whole
        vocabulary.

        The layout must be the actor's, and `plan` the actor's plan. Takes as many bytes of host
        memory as the batch has response tokens times vocab_shard times the size of the dtype.

        Returns:
            [selected, vocab_shard] for each of this rank's micro-batches, on the host; nothing
            before the last stage.
        """
        packs = self.packs(plan, rollout.sequences(), rollout.prompt_lengths, "response")
        return self.pipeline.forward(packs, lambda logits, _: logits.cpu())


class RewardModel(Role):
    """A model with a scalar head whose output at the last token is the score of a response."""

    def score(self, rollout: Rollout) -> Tensor:
        """One score a response, float32 [batch] on every rank's host."""
        return self.score_sequences(rollout.sequences())

    def score_sequences(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """The output at the last token of each sequence of token ids, float32 [batch] on every
        rank's host.
        """
        plan = self.plan([len(tokens) for tokens in sequences], len(sequences))
        packs = self.packs(plan, sequences, [1] * len(sequences), "last")
        mask = torch.ones(len(sequences), 1, dtype=torch.bool)
        return self.per_token(packs, mask, lambda output, _: output[:, 0][None])[0, :, 0]
