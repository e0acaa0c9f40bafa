"""The loss of one mini-batch of the policy, as the pipeline calls it for each micro-batch.

It is given numbers a token and the current policy's log-probabilities; how those come out of
sharded logits, and where the numbers come from, it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrlhf.batch import Experience
from mrlhf.config.sections import ActorSection
from mrlhf.methods import find_method
from mrlhf.metrics import Tally
from mrlhf.rl.correction import Correction, correct, geometric_mean_weights
from mrlhf.rl.kl import kl_penalty
from mrlhf.rl.losses import aggregate, aggregation_count
from mrlhf.rl.masking import masked_sum
from mrlhf.rl.policy_losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossFunction,
    PolicyLossInputs,
    PolicyLossOptions,
    clip_cov,
    clip_cov_excluded,
    geo_mean,
    kl_cov,
    policy_loss,
    select_by_covariance,
)

UPDATE_METRICS = (
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/kl_loss",
    "actor/positive_lm_loss",
)


@dataclass(frozen=True)
class PolicyBatch:
    """What the loss of one mini-batch is made of; [sequences, response_len] unless said, on the
    host.

    Attributes:
        response_mask: bool, all response tokens.
        mask: bool, those of them that train.
        old_logprobs: log-probabilities that the ratio starts from.
        advantages: of each token.
        ref_logprobs: under the reference, or None.
        weights: factors of the policy loss, or None.
        positive: bool [sequences], the right responses, or None.
        selected: bool, the tokens chosen by their covariance, or None where the loss chooses none.
    """

    response_mask: Tensor
    mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    ref_logprobs: Tensor | None
    weights: Tensor | None
    positive: Tensor | None
    selected: Tensor | None = None

    @staticmethod
    def of(experience: Experience, rows: list[int]) -> PolicyBatch:
        """The mini-batch of these rows."""

        def cut(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[rows]

        return PolicyBatch(
            response_mask=experience.rollout.response_mask[rows],
            mask=experience.loss_mask[rows],
            old_logprobs=experience.old_logprobs[rows],
            advantages=experience.advantages[rows],
            ref_logprobs=cut(experience.ref_logprobs),
            weights=cut(experience.weights),
            positive=cut(experience.positive),
        )

    def micro_batch(self, rows: list[int], device: torch.device) -> PolicyBatch:
        """These rows of the mini-batch, on `device`."""
        fields: dict[str, Any] = {
            name: None if table is None else table[rows].to(device)
            for name, table in vars(self).items()
        }
        return PolicyBatch(**fields)


@dataclass(frozen=True)
class PolicyLossSettings:
    """Which loss, and the numbers it takes.

    Attributes:
        function: the per-token loss.
        section: its numbers, aggregation, and the terms beside it.
        bypass: correction of the current policy against the engine's, made anew on every
            mini-batch; None where the experience holds what correction there is.
    """

    function: PolicyLossFunction
    section: ActorSection
    bypass: Correction | None

    @property
    def looks_ahead(self) -> bool:
        """Whether the loss of one token depends on the current policy at every token of the
        mini-batch.
        """
        bypass = self.bypass is not None and bool(self.bypass.criteria or self.bypass.normalise)
        return bypass or self.function in (clip_cov, kl_cov)

    @property
    def options(self) -> PolicyLossOptions:
        """The numbers of the per-token loss."""
        section = self.section
        return PolicyLossOptions(
            clip_low=section.clip_low,
            clip_high=section.clip_high,
            clip_c=section.clip_ratio_c,
            tau_pos=section.tau_pos,
            tau_neg=section.tau_neg,
            ppo_kl_coef=section.policy_loss.ppo_kl_coef,
        )

    def corrected(self, batch: PolicyBatch, logprobs: Tensor) -> PolicyBatch:
        """The batch with weights and mask as the current policy's `logprobs` have them, in bypass
        mode.
        """
        if self.bypass is None:
            return batch
        found = correct(logprobs.detach() - batch.old_logprobs, batch.mask, self.bypass)
        return replace(batch, mask=found.kept, weights=found.weights)

    def looked_ahead(self, batch: PolicyBatch, logprobs: Tensor) -> PolicyBatch:
        """The batch with all that depends on the current policy's `logprobs` at every token of the
        mini-batch.
        """
        batch = self.corrected(batch, logprobs)
        if self.function not in (clip_cov, kl_cov):
            return batch
        cov, excluded, bounds = self.section.policy_loss, None, None
        fraction = cov.kl_cov_ratio
        if self.function is clip_cov:
            inputs = PolicyLossInputs(logprobs, batch.old_logprobs, batch.advantages, batch.mask)
            excluded = clip_cov_excluded(inputs, self.options)
            fraction, bounds = cov.clip_cov_ratio, (cov.clip_cov_lb, cov.clip_cov_ub)
        selected = select_by_covariance(
            logprobs, batch.advantages, batch.mask, fraction, bounds, excluded
        )
        return replace(batch, selected=selected)

    def loss(self, batch: PolicyBatch, logprobs: Tensor) -> tuple[PolicyLoss, Tensor]:
        """The loss and what is told of it, and the loss of each token times its correction weight."""
        inputs = PolicyLossInputs(
            logprobs, batch.old_logprobs, batch.advantages, batch.mask, batch.selected
        )
        policy, weights = policy_loss(self.function, inputs, self.options), batch.weights
        if weights is None:
            return policy, policy.per_token
        if self.function is geo_mean:
            weights = geometric_mean_weights(weights, batch.mask)
        return policy, policy.per_token * weights


def configured_loss(section: ActorSection) -> PolicyLossFunction:
    """The function that `policy_loss.loss_mode` names.

    Raises:
        ConfigError: a user's function cannot be loaded.
    """
    return find_method("actor.policy_loss.loss_mode", section.policy_loss.loss_mode, POLICY_LOSSES)


class PolicyObjective:
    """The loss of one mini-batch: policy loss, entropy bonus, KL to the reference, likelihood of
    right responses.
    """

    def __init__(self, settings: PolicyLossSettings, batch: PolicyBatch) -> None:
        self._settings, self._section, self._batch = settings, settings.section, batch
        self._sequences = len(batch.mask)
        self._count = aggregation_count(
            int(batch.mask.sum()), self._sequences, self._section.agg_mode
        )
        self._positives = (
            0 if batch.positive is None else int(batch.response_mask[batch.positive].sum())
        )

    def __call__(
        self, rows: list[int], logprobs: Tensor, entropy: Tensor, full_kl: Tensor | None
    ) -> tuple[Tensor, Tally]:
        """A micro-batch's part of the loss, and its tally.

        Args:
            rows: of the mini-batch.
            logprobs: [rows, response_len], under the current policy, 0 after the end.
            entropy: the same of the entropies; zeros without gradient where nothing asks for them.
            full_kl: the same of the KL over the vocabulary, where the loss asks for that.
        """
        section, batch = self._section, self._batch.micro_batch(rows, logprobs.device)
        if not self._settings.looks_ahead:
            batch = self._settings.corrected(batch, logprobs)
        policy, per_token = self._settings.loss(batch, logprobs)
        mask, tokens = batch.mask, batch.mask.sum()
        loss = policy_term = self._aggregate(per_token, mask)
        share = len(rows) / self._sequences
        tally = Tally()
        tally.add("actor/pg_loss", policy_term, share)
        tally.add("actor/pg_clipfrac", masked_sum(policy.clipped.float(), mask), tokens)
        tally.add("actor/pg_clipfrac_lower", masked_sum(policy.clipped_lower.float(), mask), tokens)
        tally.add("actor/ppo_kl", masked_sum(policy.approx_kl, mask), tokens)
        tally.add(
            "actor/entropy", masked_sum(entropy, batch.response_mask), batch.response_mask.sum()
        )
        if section.entropy_coeff:
            loss = loss - section.entropy_coeff * self._aggregate(entropy, mask)
        if section.use_kl_loss:
            kl_loss = self._aggregate(self._kl(batch, logprobs, full_kl), mask)
            loss = loss + section.kl_loss_coef * kl_loss
            tally.add("actor/kl_loss", kl_loss, share)
        if section.positive_lm_coef:
            likelihood = self._positive_lm(batch, logprobs)
            loss = loss + section.positive_lm_coef * likelihood
            tally.add("actor/positive_lm_loss", likelihood, share)
        return loss, tally

    def _kl(self, batch: PolicyBatch, logprobs: Tensor, full_kl: Tensor | None) -> Tensor:
        if self._section.kl_loss_type == "full":
            assert full_kl is not None
            return full_kl
        assert batch.ref_logprobs is not None
        return kl_penalty(logprobs, batch.ref_logprobs, self._section.kl_loss_type)

    def _positive_lm(self, batch: PolicyBatch, logprobs: Tensor) -> Tensor:
        """Mean negative log-likelihood of the tokens of right responses, VAPO,
        https://arxiv.org/abs/2504.05118.
        """
        assert batch.positive is not None
        right = batch.response_mask & batch.positive[:, None]
        return -masked_sum(logprobs, right) / max(self._positives, 1)

    def _aggregate(self, per_token: Tensor, mask: Tensor) -> Tensor:
        section = self._section
        assert section.loss_scale_factor is not None
        return aggregate(per_token, mask, section.agg_mode, section.loss_scale_factor) / self._count
