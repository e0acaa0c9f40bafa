"""The choice of the policy loss, and the numbers of a mini-batch that it needs.

The formulas are in `rl`, and per-token losses become one number in `policy_objective`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mrlhf.batch import Experience
from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.config.methods import find_method
from mrlhf.config.sections import ActorSection
from mrlhf.config.teacher import DistillationSection
from mrlhf.parallel.packs import Pack, lay_flat
from mrlhf.parallel.vocab_sums import NumbersToCompute
from mrlhf.rl.correction import (
    Centring,
    Correction,
    Criterion,
    centre_scores,
    correct,
    geometric_mean_weights,
)
from mrlhf.rl.losses import token_weights
from mrlhf.rl.names import policy_loss_traits
from mrlhf.rl.policy_losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossFunction,
    PolicyLossInputs,
    PolicyLossOptions,
    clip_cov_excluded,
    policy_loss,
    select_by_covariance,
)


@dataclass(frozen=True)
class PolicyBatch:
    """The numbers of some tokens.

    They are tables of a mini-batch on the host, [sequences, response_len]; or of a pack, where the
    model is: its tokens, [selected], or a table of some of its sequences.
    """

    drawn: Tensor  # bool, the response tokens that the policy drew
    mask: Tensor  # bool, the drawn tokens that correction has not rejected
    # log-probabilities that the ratio starts from; None: those of the same pass
    old_logprobs: Tensor | None
    advantages: Tensor  # the advantage of each token
    ref_logprobs: Tensor | None  # log-probabilities under the reference, or None
    weights: Tensor | None  # factors of the policy loss, or None
    right: Tensor | None  # bool, the drawn tokens of right responses, or None
    token_weights: Tensor  # the weight of each token in the sum of a loss
    # bool, the tokens chosen by their covariance, or None where the loss chooses none
    selected: Tensor | None = None
    # int32, each token's teacher among the names in the settings, or None without names
    teachers: Tensor | None = None
    # bool, the tokens of responses that were not drawn, on which the teacher alone teaches, or None
    given: Tensor | None = None
    # the engine's log-probabilities of each head, of the shape of `mask` and one more dimension;
    # only of the tokens of a part, and only where scores are centred
    engine_heads: Tensor | None = None

    @property
    def taught(self) -> Tensor:
        """The tokens on which a teacher teaches, of the shape of `mask`."""
        return self.mask if self.given is None else self.mask | self.given

    def map(self, change: Callable[[Tensor], Tensor]) -> PolicyBatch:
        """Apply `change` to every field."""
        fields: dict[str, Any] = {
            name: None if table is None else change(table) for name, table in vars(self).items()
        }
        return PolicyBatch(**fields)

    def of_packs(self, packs: Sequence[Pack], whole_rows: bool) -> list[PolicyBatch]:
        """The tokens of each pack, [selected], where the model is; see `lay_flat`."""
        return [PolicyBatch(**tables) for tables in lay_flat(vars(self), packs, whole_rows)]


@dataclass(frozen=True)
class PolicyLossSettings:
    """The loss that is trained, and the numbers it takes."""

    name: str  # the per-token loss, by its name or as "path/to/file.py:function"
    function: PolicyLossFunction  # the per-token loss
    section: ActorSection  # its numbers, the aggregation, and the terms beside it
    # the correction of the current policy against the engine's, made anew on every mini-batch; None
    # where the experience already holds all correction
    bypass: Correction | None
    needs_mini_batch_pass: bool  # see the function of this name
    # the divergence from a teacher that is part of the loss; None: none is
    distillation: DistillationSection | None = None
    sharpness: float = 1.0  # of that divergence; see `NumbersToCompute`
    centres: bool = False  # whether the engine's mean of the scores is subtracted
    # the name of each data source's teacher; empty if there is one for all
    teacher_of: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(actor: ActorSection, correction: RolloutCorrectionSection) -> PolicyLossSettings:
        """The settings that these sections ask for."""
        name = correction.trained_loss(actor.policy_loss.loss_mode)
        bypass = make_correction(correction) if correction.bypass_mode else None
        named = PolicyLossSettings.named(name, actor, bypass)
        return replace(named, centres=correction.score_centering)

    def distilling(
        self, distillation: DistillationSection, temperature: float
    ) -> PolicyLossSettings:
        """The same with a divergence from a teacher; `temperature` divides the policy's logits."""
        sharpness = distillation.sharpness(temperature)
        return replace(self, distillation=distillation, sharpness=sharpness)

    @staticmethod
    def named(name: str, section: ActorSection, bypass: Correction | None) -> PolicyLossSettings:
        """The loss called `name`; ConfigError if it is a user's and cannot be loaded."""
        function = find_method("actor.policy_loss.loss_mode", name, POLICY_LOSSES)
        return PolicyLossSettings(
            name, function, section, bypass, needs_mini_batch_pass(name, bypass)
        )

    @property
    def by_token(self) -> bool:
        """Whether the loss of a token depends on no other token, once the batch is prepared."""
        corrects_packs = self.bypass is not None and self.bypass.level == "sequence"
        corrects_packs = corrects_packs and not self.needs_mini_batch_pass
        return not policy_loss_traits(self.name).needs_sequences and not corrects_packs

    def numbers(self, entropy: bool) -> NumbersToCompute:
        """The numbers of each token that the loss needs; at most one is over two vocabularies."""
        if self.distillation is not None:
            section = self.distillation
            return NumbersToCompute(
                entropy,
                kl=True,
                beta=section.divergence_beta,
                top_k=section.top_k,
                sharpness=self.sharpness,
            )
        full_kl = self.section.use_kl_loss and self.section.kl_loss_type == "full"
        return NumbersToCompute(entropy, kl=full_kl)

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

    def batch(self, experience: Experience, rows: list[int]) -> PolicyBatch:
        """The numbers of these rows, which ascend without gaps; most are not copied."""
        span = slice(rows[0], rows[-1] + 1)

        def rows_of(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[span]

        drawn = experience.rollout.loss_mask[span]
        mask = experience.loss_mask[span]
        positive = rows_of(experience.positive)
        given = None
        if self.distillation is not None and self.distillation.given_share:
            given = experience.rollout.response_mask[span] & experience.rollout.given[span, None]
        teachers = None
        if self.teacher_of:
            sources = experience.rollout.prompts.data_source[span]
            numbers = [self._teachers.index(self.teacher_of[source]) for source in sources]
            teachers = torch.tensor(numbers, dtype=torch.int32)[:, None].expand_as(mask)
        return PolicyBatch(
            drawn=drawn,
            mask=mask,
            old_logprobs=rows_of(experience.old_logprobs),
            advantages=experience.advantages[span],
            ref_logprobs=rows_of(experience.ref_logprobs),
            weights=rows_of(experience.weights),
            right=None if positive is None else drawn & positive[:, None],
            # Those of a row depend on no other row, and no row of `given` has a token of `mask`.
            token_weights=self.token_weights(mask if given is None else mask | given),
            teachers=teachers,
            given=given,
        )

    @property
    def teacher_metrics(self) -> list[str]:
        """The names of the teachers' own divergences, if there are several."""
        return [f"actor/distillation_kl/{name}" for name in self._teachers]

    @property
    def _teachers(self) -> list[str]:
        """The names of several teachers, in the order of their numbers."""
        return list(dict.fromkeys(self.teacher_of.values()))

    def token_weights(self, mask: Tensor) -> Tensor:
        """The weight of each token in the sum of a loss, for a table of whole sequences."""
        section = self.section
        assert section.loss_scale_factor is not None
        return token_weights(mask, section.agg_mode, section.loss_scale_factor)

    def corrected(self, batch: PolicyBatch, logprobs: Tensor) -> PolicyBatch:
        """The batch with what the current `logprobs` give it.

        In bypass mode these are weights and mask, else old log-probabilities that it lacks.
        """
        if batch.old_logprobs is None:
            return replace(batch, old_logprobs=logprobs.detach())
        if self.bypass is None:
            return batch
        correction = correct(logprobs.detach() - batch.old_logprobs, batch.mask, self.bypass)
        batch = replace(batch, weights=correction.weights)
        if not self.bypass.criteria:
            return batch
        batch = replace(batch, mask=correction.kept)
        return replace(batch, token_weights=self.token_weights(batch.taught))

    def prepared(self, batch: PolicyBatch, logprobs: Tensor) -> PolicyBatch:
        """The batch with all that depends on the whole mini-batch under the current policy.

        `logprobs` [sequences, response_len] are those of the whole mini-batch under the current
        policy.
        """
        batch = self.corrected(batch, logprobs)
        if not policy_loss_traits(self.name).selects_tokens:
            return batch

        section = self.section.policy_loss
        assert batch.old_logprobs is not None
        fraction = section.kl_cov_ratio
        bounds = None
        excluded = None
        if self.name == "clip_cov":
            inputs = PolicyLossInputs(logprobs, batch.old_logprobs, batch.advantages, batch.mask)
            fraction = section.clip_cov_ratio
            bounds = (section.clip_cov_lb, section.clip_cov_ub)
            excluded = clip_cov_excluded(inputs, self.options)
        selected = select_by_covariance(
            logprobs, batch.advantages, batch.mask, fraction, bounds, excluded
        )
        return replace(batch, selected=selected)

    def centring(self, batch: PolicyBatch, heads: Tensor) -> Centring:
        """What centres the scores; `heads` are log-probabilities under the current policy."""
        assert self.bypass is not None and batch.engine_heads is not None
        return centre_scores(heads, batch.engine_heads, self.bypass)

    def loss(self, batch: PolicyBatch, logprobs: Tensor) -> tuple[PolicyLoss, Tensor]:
        """The loss with its statistics, and the loss of each token times its correction weight."""
        assert batch.old_logprobs is not None
        inputs = PolicyLossInputs(
            logprobs, batch.old_logprobs, batch.advantages, batch.mask, batch.selected
        )
        policy = policy_loss(self.function, inputs, self.options)
        weights = batch.weights
        if weights is None:
            return policy, policy.per_token
        if self.name == "geo_mean":
            weights = geometric_mean_weights(weights, batch.mask)
        return policy, policy.per_token * weights


def needs_mini_batch_pass(name: str, bypass: Correction | None) -> bool:
    """Whether the loss of one token depends on the current policy at all tokens.

    Then each update needs one more forward pass over its mini-batch.
    """
    if bypass is not None and (bypass.criteria or bypass.normalise):
        return True
    return policy_loss_traits(name).selects_tokens


def make_correction(section: RolloutCorrectionSection) -> Correction:
    """The configured correction as numbers."""
    lower, upper = section.bounds
    return Correction(
        level=section.rollout_is,
        lower=lower,
        upper=upper,
        normalise=section.rollout_is_batch_normalize,
        criteria=tuple(Criterion(*criterion) for criterion in section.criteria),
    )
