"""The loss of one mini-batch of the policy, as the pipeline calls it for each micro-batch.

`PolicyObjective` is given the current policy's log-probabilities; `LogitsObjective` gets them out
of sharded logits. Neither knows where advantages and weights come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrlhf.metrics import Tally
from mrlhf.parallel.packs import Pack
from mrlhf.rl.kl import kl_penalty
from mrlhf.rl.losses import aggregate, aggregation_count
from mrlhf.rl.masking import masked_sum
from mrlhf.roles.policy_loss import PolicyBatch, PolicyLossSettings
from mrlhf.roles.token_logprobs import TokenLogprobs
from mrlhf.training.engine import PackResult

UPDATE_METRICS = (
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/kl_loss",
    "actor/positive_lm_loss",
)


class PolicyObjective:
    """Policy loss, entropy bonus, KL to the reference, and likelihood of right responses.

    Attributes:
        settings: which loss it is.
        batch: the mini-batch.
    """

    def __init__(self, settings: PolicyLossSettings, batch: PolicyBatch) -> None:
        self.settings = settings
        self.batch = batch
        self._section = settings.section
        self._sequences = len(batch.mask)
        self._count = aggregation_count(
            int(batch.mask.sum()), self._sequences, self._section.agg_mode
        )
        self._positive_tokens = 0
        if batch.positive is not None:
            self._positive_tokens = int(batch.drawn[batch.positive].sum())

    def __call__(
        self, rows: list[int], logprobs: Tensor, entropy: Tensor, full_kl: Tensor | None
    ) -> tuple[Tensor, Tally]:
        """A micro-batch's part of the loss, and its tally.

        Args:
            rows: the rows of the mini-batch that stand in the micro-batch.
            logprobs: [rows, response_len], under the current policy, 0 after the end.
            entropy: [rows, response_len]; zeros without a gradient where nothing asks for it.
            full_kl: [rows, response_len], the KL over the whole vocabulary, or None where the loss
                does not ask for it.
        """
        section = self._section
        batch = self.batch.micro_batch(rows, logprobs.device)
        if not self.settings.needs_mini_batch_pass:
            batch = self.settings.corrected(batch, logprobs)
        mask = batch.mask
        tokens = mask.sum()
        share = len(rows) / self._sequences

        policy, per_token = self.settings.loss(batch, logprobs)
        policy_term = self._aggregate(per_token, mask)
        loss = policy_term
        tally = Tally()
        tally.add("actor/pg_loss", policy_term, share)
        tally.add("actor/pg_clipfrac", masked_sum(policy.clipped.float(), mask), tokens)
        tally.add("actor/pg_clipfrac_lower", masked_sum(policy.clipped_lower.float(), mask), tokens)
        tally.add("actor/ppo_kl", masked_sum(policy.approx_kl, mask), tokens)

        tally.add("actor/entropy", masked_sum(entropy, batch.drawn), batch.drawn.sum())
        if section.entropy_coeff:
            loss = loss - section.entropy_coeff * self._aggregate(entropy, mask)

        if section.use_kl_loss:
            kl_loss = self._aggregate(self._kl(batch, logprobs, full_kl), mask)
            loss = loss + section.kl_loss_coef * kl_loss
            tally.add("actor/kl_loss", kl_loss, share)

        if section.positive_lm_coef:
            positive_lm_loss = self._positive_lm_loss(batch, logprobs)
            loss = loss + section.positive_lm_coef * positive_lm_loss
            tally.add("actor/positive_lm_loss", positive_lm_loss, share)
        return loss, tally

    def _kl(self, batch: PolicyBatch, logprobs: Tensor, full_kl: Tensor | None) -> Tensor:
        if self.settings.wants_full_kl:
            assert full_kl is not None
            return full_kl
        assert batch.ref_logprobs is not None
        return kl_penalty(logprobs, batch.ref_logprobs, self._section.kl_loss_type)

    def _positive_lm_loss(self, batch: PolicyBatch, logprobs: Tensor) -> Tensor:
        """Mean negative log-likelihood of the tokens that the policy drew in right responses.

        Follows VAPO, https://arxiv.org/abs/2504.05118.
        """
        assert batch.positive is not None
        right = batch.drawn & batch.positive[:, None]
        return -masked_sum(logprobs, right) / max(self._positive_tokens, 1)

    def _aggregate(self, per_token: Tensor, mask: Tensor) -> Tensor:
        section = self._section
        assert section.loss_scale_factor is not None
        summed = aggregate(per_token, mask, section.agg_mode, section.loss_scale_factor)
        return summed / self._count


class LogitsObjective:
    """The policy objective as a function of the logits of each of this rank's packs."""

    def __init__(
        self,
        objective: PolicyObjective,
        token_logprobs: TokenLogprobs,
        packs: Sequence[Pack],
        ref_logits: Sequence[Tensor] | None,
    ) -> None:
        """Prepare the loss of one mini-batch.

        Args:
            objective: the loss of this mini-batch.
            token_logprobs: turns logits into log-probabilities.
            packs: this rank's packs, their rows counted from the mini-batch's first row.
            ref_logits: the reference's logits of these packs, or None where the loss holds no KL
                over the whole vocabulary.
        """
        self._objective = objective
        self._token_logprobs = token_logprobs
        self._packs = packs
        self._ref_logits = ref_logits

    def __call__(self, logits: Tensor, number: int) -> tuple[Tensor, PackResult]:
        """The part of the loss of pack `number`, and its tally.

        In bypass mode the result keeps the log-probabilities, [rows, response_len].
        """
        settings = self._objective.settings
        pack = self._packs[number]

        if settings.wants_entropy:
            flat, flat_entropy = self._token_logprobs.with_entropy(logits, pack)
        else:
            flat = self._token_logprobs(logits, pack)
            flat_entropy = torch.zeros_like(flat)
        if not settings.section.entropy_coeff:
            flat_entropy = flat_entropy.detach()
        logprobs, entropy = pack.spread(torch.stack([flat, flat_entropy]))

        full_kl = None
        if settings.wants_full_kl:
            assert self._ref_logits is not None
            flat_kl = self._token_logprobs.full_kl(logits, self._ref_logits[number])
            full_kl = pack.spread(flat_kl[None])[0]

        loss, tally = self._objective(pack.rows, logprobs, entropy, full_kl)
        kept = None if settings.bypass is None else logprobs.detach()
        return loss, PackResult(tally, kept)
