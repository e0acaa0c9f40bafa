"""The section `algorithm`: from scores to advantages.

It knows the names of the methods. It does not know their formulas or other sections.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Field, field_validator

from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.config.fields import (
    Count,
    Fraction,
    FunctionReference,
    NotNegative,
    Positive,
    Section,
    Switch,
)
from mrlhf.config.path_text import expand_name
from mrlhf.rl.names import (
    AdvantageEstimator,
    FilterMetric,
    KlControllerKind,
    KlPlacement,
    RewardKlKind,
    RewardNorm,
)


class KlCtrlSection(Section):
    """The coefficient of the KL in the reward."""

    switches = (
        Switch(
            "type",
            lambda kind: kind == "fixed",
            ("target_kl", "horizon"),
            "is fixed",
            "use adaptive",
        ),
    )

    type: KlControllerKind = Field(
        "fixed",
        description="fixed: the coefficient stays; adaptive: it is steered towards target_kl",
    )
    kl_coef: NotNegative = Field(0.001, description="coefficient; adaptive: at the start")
    target_kl: Positive = Field(0.1, description="adaptive: wanted mean KL per token, nats")
    horizon: Count = Field(
        10000, description="adaptive: the larger, the slower the coefficient changes, samples"
    )


def _is_false(value: Any) -> bool:
    return value is False


class OverlongBufferSection(Section):
    """DAPO's penalty (arXiv 2503.14476) for responses near data.max_response_length."""

    switches = (Switch("enable", _is_false, ("len", "penalty_factor"), "is false", "turn that on"),)

    enable: bool = Field(False, description="lower the score of responses that are almost too long")
    len: Count | None = Field(
        None,
        description="the penalty begins this many tokens before the longest response; required "
        "if enabled",
    )
    penalty_factor: NotNegative = Field(
        1.0, description="penalty of a response of full length; it grows linearly from 0"
    )


class FilterGroupsSection(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476).

    A prompt whose answers all have the same score teaches nothing.
    """

    switches = (
        Switch("enable", _is_false, ("metric", "max_num_gen_batches"), "is false", "turn that on"),
    )

    enable: bool = Field(
        False, description="drop such prompts, and generate others until the batch is full"
    )
    metric: FilterMetric = Field(
        "score",
        description="what must differ between the answers: acc, whether they are right; score; "
        "seq_reward, the score after clipping and penalties",
    )
    max_num_gen_batches: Count = Field(
        10, description="most batches of data.gen_batch_size prompts in one step"
    )


class AlgorithmSection(Section):
    """From scores to advantages."""

    switches = (
        Switch(
            "use_kl_in_reward",
            _is_false,
            (
                "kl_penalty",
                "kl_placement",
                "kl_ctrl.type",
                "kl_ctrl.kl_coef",
                "kl_ctrl.target_kl",
                "kl_ctrl.horizon",
            ),
            "is false",
            "turn that on",
        ),
        Switch(
            "lam_length_alpha",
            lambda alpha: alpha is not None,
            ("lam",),
            "sets the lambda of the advantages",
            "set that to null",
        ),
    )

    adv_estimator: AdvantageEstimator | FunctionReference = Field(
        "gae",
        description="advantage estimator; only gae needs a critic; "
        "path/to/file.py:function: your own",
    )
    use_critic: bool = Field(
        False, description="train a critic and give its values to an estimator of your own"
    )
    gamma: Fraction = Field(
        1.0, description="discount from one token to the next; read by gae and reinforce_plus_plus"
    )
    lam: Fraction = Field(1.0, description="gae: lambda of generalised advantage estimation")
    lam_critic: Fraction | None = Field(
        None, description="gae: lambda of the critic's targets; null: as that of the advantages"
    )
    lam_length_alpha: Positive | None = Field(
        None,
        description="gae: lambda = 1 - 1 / (this x response length) instead of lam, from VAPO; "
        "null: off",
    )
    norm_adv_by_std_in_grpo: bool = Field(
        True,
        description="grpo, grpo_passk, gdpo: divide by the standard deviation of the prompt's "
        "scores",
    )
    f_norm: Positive = Field(1.0, description="gpg: divisor of the advantages")
    gdpo_reward_keys: Annotated[list[str], Field(min_length=1)] | None = Field(
        None,
        description="gdpo: the scores that are compared one by one, as reward/<name> reports them; "
        "a number that only one function reports needs no function's name; null: reward.terms, "
        "with their weights",
    )
    gdpo_reward_weights: Annotated[list[float], Field(min_length=1)] | None = Field(
        None, description="gdpo: the weight of each of gdpo_reward_keys; null: 1 for each"
    )
    use_kl_in_reward: bool = Field(
        False, description="subtract coefficient x KL(old, reference) from the reward"
    )
    kl_penalty: RewardKlKind = Field("kl", description="estimator of the KL in the reward")
    kl_placement: KlPlacement = Field(
        "token",
        description="token: subtract each token's KL from its reward; terminal: all of it from "
        "the last token's",
    )
    kl_ctrl: KlCtrlSection = Field(description="coefficient of the KL in the reward")
    reward_clip: Positive | None = Field(
        None, description="scores are clipped to -/+ this; null: off"
    )
    reward_norm: RewardNorm | None = Field(
        None,
        description="(score - mean) / std; running: of all scores so far; group: of the "
        "prompt's; batch: of the step's; null: off",
    )
    whiten_rewards: bool = Field(
        False,
        description="gae: divide the rewards of the tokens by their std over the batch; their "
        "mean is kept",
    )
    missing_eos_penalty: NotNegative = Field(
        0.0, description="subtracted from the score of a response that was cut off"
    )
    overlong_buffer: OverlongBufferSection = Field(description="penalty of long responses")
    filter_groups: FilterGroupsSection = Field(
        description="dynamic sampling: prompts that teach nothing are replaced"
    )
    rollout_correction: RolloutCorrectionSection = Field(
        description="correction of the difference between the engine's policy and the trainer's"
    )

    @field_validator("adv_estimator", mode="before")
    @classmethod
    def _is_estimator_or_function(cls, name: object) -> str:
        return expand_name(name, get_args(AdvantageEstimator))
