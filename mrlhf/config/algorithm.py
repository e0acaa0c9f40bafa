"""The section `algorithm`: from scores to advantages.

It knows the names of the methods, not their formulas, and no other section.
"""

from __future__ import annotations

from typing import get_args

from pydantic import Field, field_validator

from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.config.fields import Count, Fraction, NotNegative, Positive, Section
from mrlhf.rl.names import (
    AdvantageEstimator,
    FilterMetric,
    KlControllerKind,
    KlPlacement,
    RewardKlKind,
    RewardNorm,
)
from mrlhf.user_code import check_name


class KlCtrlSection(Section):
    """The coefficient of the KL in the reward."""

    type: KlControllerKind = Field("fixed", description="adaptive: steered towards target_kl")
    kl_coef: NotNegative = Field(0.001, description="(initial) coefficient")
    target_kl: Positive = Field(0.1, description="adaptive: wanted mean KL a token, nats")
    horizon: Count = Field(10000, description="adaptive: samples over which the coefficient moves")


class OverlongBufferSection(Section):
    """DAPO's soft penalty (arXiv 2503.14476) of responses that come close to
    data.max_response_length.
    """

    enable: bool = Field(False, description="take a penalty off the score of long responses")
    len: Count | None = Field(
        None, description="the last so many tokens are penalised; needed where enabled"
    )
    penalty_factor: NotNegative = Field(
        1.0, description="penalty of a response of full length; it grows linearly"
    )


class FilterGroupsSection(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476): a prompt whose answers all score alike teaches
    nothing.
    """

    enable: bool = Field(
        False, description="drop such prompts and generate others until the batch is full"
    )
    metric: FilterMetric = Field(
        "score",
        description="what must differ: right or wrong, the score, or (seq_reward) the clipped score with penalties",
    )
    max_num_gen_batches: Count = Field(
        10, description="batches of data.gen_batch_size prompts a step at most"
    )


class AlgorithmSection(Section):
    """From scores to advantages."""

    adv_estimator: AdvantageEstimator | str = Field(
        "gae",
        description="advantage estimator; only gae needs a critic; "
        "path/to/file.py:function: your own",
    )
    use_critic: bool = Field(
        False, description="train a critic and give its values to an estimator of your own"
    )
    gamma: Fraction = Field(1.0, description="discount a token; of gae and reinforce_plus_plus")
    lam: Fraction = Field(1.0, description="lambda of generalised advantage estimation")
    lam_critic: Fraction | None = Field(
        None, description="lambda of the critic's targets; null: the policy's own"
    )
    lam_length_alpha: Positive | None = Field(
        None,
        description="VAPO: lambda = 1 - 1 / (this x response length), in place of lam; null: off",
    )
    norm_adv_by_std_in_grpo: bool = Field(
        True, description="grpo, grpo_passk: divide by the group's standard deviation"
    )
    f_norm: Positive = Field(1.0, description="gpg: divisor of the advantages")
    use_kl_in_reward: bool = Field(
        False, description="take coefficient x KL(old, reference) off the reward"
    )
    kl_penalty: RewardKlKind = Field("kl", description="estimator of the KL in the reward")
    kl_placement: KlPlacement = Field(
        "token", description="KL off each token's reward, or all off the last"
    )
    kl_ctrl: KlCtrlSection = Field(description="coefficient of the KL in the reward")
    reward_clip: Positive | None = Field(None, description="scores are cut to -/+ this; null: off")
    reward_norm: RewardNorm | None = Field(
        None,
        description="scores - mean over std, of all so far, of the prompt's group or of the batch; null: off",
    )
    whiten_rewards: bool = Field(
        False, description="gae: divide token rewards by their std over the batch, mean kept"
    )
    missing_eos_penalty: NotNegative = Field(
        0.0, description="off the score of a response that was cut off"
    )
    overlong_buffer: OverlongBufferSection = Field(description="penalty of long responses")
    filter_groups: FilterGroupsSection = Field(
        description="prompts that teach nothing are replaced"
    )
    rollout_correction: RolloutCorrectionSection = Field(
        description="the engine's policy against the trainer's"
    )

    @field_validator("adv_estimator", mode="before")
    @classmethod
    def _is_estimator_or_function(cls, name: object) -> str:
        return check_name(name, get_args(AdvantageEstimator))
