"""The section `algorithm`: from scores to advantages.

It knows the names of the methods. It does not know their formulas or other sections.
"""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field, field_validator

from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.config.fields import (
    Count,
    Fraction,
    FunctionReference,
    NotNegative,
    Positive,
    Section,
    known_name,
    known_or_own,
)
from mrlhf.config.presets import PresetName
from mrlhf.config.reads import ESTIMATOR, NotRead, Place, ReadIf, by_estimator, read_if
from mrlhf.rl.names import (
    AdvantageEstimator,
    FilterMetric,
    KlControllerKind,
    KlPlacement,
    RewardKlKind,
    RewardNorm,
    estimator_traits,
)


def _not_the_sum(place: Place) -> NotRead | None:
    """A key that shapes the sum of the terms, while the estimator compares them one by one."""
    name = place.value(ESTIMATOR)
    if not estimator_traits(name).compares_terms:
        return None
    why = f" with {ESTIMATOR} {name}, which compares the scores of single terms and not their sum"
    remedy = "use another estimator, such as grpo"
    return NotRead(why, remedy, (ESTIMATOR,), leave="turn it off")


_SHAPES_THE_SUM = ReadIf(_not_the_sum)
_IF_IN_REWARD = read_if("algorithm.use_kl_in_reward")
_IF_ADAPTIVE = read_if("type", lambda kind: kind == "adaptive", "is fixed", "use adaptive")
_UNLESS_OF_LENGTH = read_if(
    "lam_length_alpha",
    lambda alpha: alpha is None,
    "sets the lambda of the advantages",
    "set that to null",
)


class KlCtrlSection(Section):
    """The coefficient of the KL in the reward."""

    type: Annotated[KlControllerKind, _IF_IN_REWARD] = "fixed"
    """fixed: the coefficient stays; adaptive: it is steered towards target_kl"""
    kl_coef: Annotated[NotNegative, _IF_IN_REWARD] = 0.001
    """coefficient; adaptive: at the start"""
    target_kl: Annotated[Positive, _IF_IN_REWARD, _IF_ADAPTIVE] = 0.1
    """adaptive: wanted mean KL per token, nats"""
    horizon: Annotated[Count, _IF_IN_REWARD, _IF_ADAPTIVE] = 10000
    """adaptive: the larger, the slower the coefficient changes, samples"""


class OverlongBufferSection(Section):
    """DAPO's penalty (arXiv 2503.14476) for responses near data.max_response_length."""

    enable: Annotated[bool, _SHAPES_THE_SUM] = False
    """lower the score of responses that are almost too long"""
    len: Annotated[Count | None, read_if("enable")] = None
    """the penalty begins this many tokens before the longest response; required if enabled"""
    penalty_factor: Annotated[NotNegative, read_if("enable")] = 1.0
    """penalty of a response of full length; it grows linearly from 0"""


class FilterGroupsSection(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476).

    A prompt whose answers all have the same score teaches nothing.
    """

    enable: bool = False
    """drop such prompts, and generate others until the batch is full"""
    metric: Annotated[FilterMetric, read_if("enable")] = "score"
    """what must differ between the answers: acc, whether they are right; score; seq_reward, the
    score after clipping and penalties"""
    max_num_gen_batches: Annotated[Count, read_if("enable")] = 10
    """most batches of data.gen_batch_size prompts in one step"""


class AlgorithmSection(Section):
    """From scores to advantages."""

    preset: Annotated[PresetName | None, known_name(get_args(PresetName))] = None
    """a method by its name, which begins anew: keys of the method in earlier files do not count,
    those beside it win; defaults: no method's keys; after reading it is null and the keys hold its
    values"""
    adv_estimator: Annotated[
        AdvantageEstimator | FunctionReference, known_or_own(get_args(AdvantageEstimator))
    ] = "gae"
    """advantage estimator; only gae needs a critic; path/to/file.py:function: your own"""
    use_critic: Annotated[bool, by_estimator()] = False
    """train a critic and give its values to an estimator of your own"""
    gamma: Annotated[Fraction, by_estimator("gae", "reinforce_plus_plus")] = 1.0
    """discount from one token to the next; read by gae and reinforce_plus_plus"""
    lam: Annotated[Fraction, by_estimator("gae"), _UNLESS_OF_LENGTH] = 1.0
    """gae: lambda of generalised advantage estimation"""
    lam_critic: Annotated[Fraction | None, by_estimator("gae")] = None
    """gae: lambda of the critic's targets; null: as that of the advantages"""
    lam_length_alpha: Annotated[Positive | None, by_estimator("gae")] = None
    """gae: lambda = 1 - 1 / (this x response length) instead of lam, from VAPO; null: off"""
    norm_adv_by_std_in_grpo: Annotated[bool, by_estimator("grpo", "grpo_passk", "gdpo")] = True
    """grpo, grpo_passk, gdpo: divide by the standard deviation of the prompt's scores"""
    f_norm: Annotated[Positive, by_estimator("gpg")] = 1.0
    """gpg: divisor of the advantages"""
    gdpo_reward_keys: Annotated[
        Annotated[list[str], Field(min_length=1)] | None, by_estimator("gdpo")
    ] = None
    """gdpo: the scores that are compared one by one, as reward/<name> reports them; a number that
    only one function reports needs no function's name, and turn_rewards is the sum of those of an
    episode's turns; null: reward.terms, with their weights, and turn_rewards if there are any"""
    gdpo_reward_weights: Annotated[
        Annotated[list[float], Field(min_length=1)] | None, by_estimator("gdpo")
    ] = None
    """gdpo: the weight of each of gdpo_reward_keys; null: 1 for each"""
    use_kl_in_reward: Annotated[bool, _SHAPES_THE_SUM] = False
    """subtract coefficient x KL(old, reference) from the reward"""
    kl_penalty: Annotated[RewardKlKind, _IF_IN_REWARD] = "kl"
    """estimator of the KL in the reward"""
    kl_placement: Annotated[KlPlacement, _IF_IN_REWARD] = "token"
    """token: subtract each token's KL from its reward; terminal: all of it from the last token's"""
    kl_ctrl: KlCtrlSection
    """coefficient of the KL in the reward"""
    reward_clip: Annotated[Positive | None, _SHAPES_THE_SUM] = None
    """scores are clipped to -/+ this; null: off"""
    reward_norm: Annotated[RewardNorm | None, _SHAPES_THE_SUM] = None
    """(score - mean) / std; running: of all scores so far; group: of the prompt's; batch: of the
    step's; null: off"""
    whiten_rewards: Annotated[bool, by_estimator("gae")] = False
    """gae: divide the rewards of the tokens by their std over the batch; their mean is kept"""
    missing_eos_penalty: Annotated[NotNegative, _SHAPES_THE_SUM] = 0.0
    """subtracted from the score of a response that was cut off"""
    overlong_buffer: OverlongBufferSection
    """penalty of long responses"""
    filter_groups: FilterGroupsSection
    """dynamic sampling: prompts that teach nothing are replaced"""
    rollout_correction: RolloutCorrectionSection
    """correction of the difference between the engine's policy and the trainer's"""

    @field_validator("preset")
    @classmethod
    def _is_replaced(cls, name: PresetName | None) -> None:
        if name is not None:
            raise ValueError(
                f"{name} is replaced by its keys where `load_config` reads it; use that"
            )
