"""The section `algorithm`: from scores to advantages.

It knows the names of the methods. It does not know their formulas or other sections.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, get_args

from pydantic import Field, field_validator

from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.config.fields import (
    Count,
    Fraction,
    FunctionReference,
    NotNegative,
    Positive,
    Rows,
    Section,
    known_name,
    known_or_own,
)
from mrlhf.config.presets import PresetName
from mrlhf.config.reads import ESTIMATOR, KeyPlace, NotRead, ReadIf, by_estimator, read_if
from mrlhf.config.teacher import DistillationSection
from mrlhf.rl.names import (
    CORRECTNESS_TERMS,
    AdvantageEstimator,
    FilterMetric,
    KlControllerKind,
    KlPlacement,
    PairLossName,
    RewardKlKind,
    RewardNorm,
    estimator_traits,
)


def _not_the_sum(place: KeyPlace) -> NotRead | None:
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

    refused: ClassVar[Rows] = {
        "{horizon} is too short for data.train_batch_size x rollout.n = {samples} samples a "
        "step: the coefficient could change by -0.2 x {samples} / {=horizon} and so reach 0 or "
        "less; raise horizon above {least}": lambda self, samples_per_step: (
            samples_per_step >= 5 * self.horizon
            and {"samples": samples_per_step, "least": samples_per_step // 5}
        ),
        "{kl_coef} with {type} stays 0 for ever, since it is multiplied; set kl_coef above 0 "
        "or use_kl_in_reward to false": lambda self: (self.type, self.kl_coef) == ("adaptive", 0),
    }


class OverlongBufferSection(Section):
    """DAPO's penalty (arXiv 2503.14476) for responses near data.max_response_length."""

    enable: Annotated[bool, _SHAPES_THE_SUM] = False
    """lower the score of responses that are almost too long"""
    len: Annotated[Count | None, read_if("enable")] = None
    """the penalty begins this many tokens before the longest response; required if enabled"""
    penalty_factor: Annotated[NotNegative, read_if("enable")] = 1.0
    """penalty of a response of full length; it grows linearly from 0"""

    refused: ClassVar[Rows] = {
        "algorithm.overlong_buffer.enable is on without algorithm.overlong_buffer.len; set len "
        "to the number of last tokens to penalise, below {data.max_response_length}": lambda self: (
            self.enable and self.len is None
        ),
        "{len} is not below {data.max_response_length}, so every response would be penalised; "
        "lower the first or raise the second": lambda self, data: (
            (self.len or 0) >= data.max_response_length
        ),
    }


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

    refused: ClassVar[Rows] = {
        "algorithm.filter_groups.enable and rollout.partial both choose the prompts of a step; "
        "turn filter_groups off or set rollout.partial.over to 1": lambda self, rollout: (
            self.enable and rollout.partial.is_on
        ),
        "{max_num_gen_batches} x {data.gen_batch_size} = {most} prompts never fill "
        "{data.train_batch_size}; raise max_num_gen_batches to at least {enough} or "
        "gen_batch_size": lambda self, data: (
            (most := self.max_num_gen_batches * data.gen_batch_size) < data.train_batch_size
            and {"most": most, "enough": -(-data.train_batch_size // data.gen_batch_size)}
        ),
    }


def _comparers(self: Any, rollout: Any, judge: Any) -> list[dict[str, str]]:
    """A key that compares the answers to a prompt, although there is only one."""
    users = []
    if estimator_traits(self.adv_estimator).compares_answers:
        users.append(f"algorithm.adv_estimator {self.adv_estimator}")
    if self.filter_groups.enable:
        users.append("algorithm.filter_groups.enable")
    if self.reward_norm == "group":
        users.append("algorithm.reward_norm group")
    if judge.compares:
        users.append("judge.compare pairs")
    return [{"user": user} for user in users[:1]] if rollout.n == 1 else []


def _differing_tokens(self: Any, actor: Any, reads: Any) -> dict[str, str] | None:
    """Why a response has several advantages, where its loss is defined for one."""
    traits = estimator_traits(self.adv_estimator)
    if actor.policy_loss.loss_mode != "geo_mean":
        return None
    if traits.needs_values or traits.needs_squared_probabilities:
        return {"reason": ""}
    if traits.sums_later_rewards and reads("algorithm.gamma") and self.gamma != 1.0:
        return {"reason": f" with algorithm.gamma {self.gamma}"}
    if traits.sums_later_rewards and self.use_kl_in_reward and self.kl_placement == "token":
        return {"reason": " with the KL in the reward at algorithm.kl_placement token"}
    return None


def _is_no_dpo(self: Any, actor: Any, data: Any) -> bool:
    """Whether the gradient would not be that of the pairs' loss."""
    one_step = (actor.ppo_mini_batch_size, actor.ppo_epochs) == (data.train_batch_size, 1)
    loss = (actor.policy_loss.loss_mode, actor.agg_mode, self.rollout_correction.active)
    prefers = estimator_traits(self.adv_estimator).pairs
    return prefers and not (one_step and loss == ("gpg", "seq-mean-token-sum", False))


def _named_again(self: Any) -> list[dict[str, object]]:
    """The scores that gdpo is given more than once."""
    names = self.gdpo_reward_keys or []
    twice = sorted({name for name in names if names.count(name) > 1})
    return [{"name": name, "times": names.count(name)} for name in twice]


def _unknown_scores(
    self: Any, reward: Any, rollout: Any, reward_model: Any
) -> list[dict[str, str]]:
    """The scores for gdpo that no term reports; a user's code tells its own when it is called."""
    if rollout.environment or any(":" in name for name in reward.names):
        return []
    heads = reward_model.heads if reward_model is not None else ()
    known = [*reward.names, *(f"reward_model/{head}" for head in heads)]
    unknown = {*(self.gdpo_reward_keys or ())}.difference(known, heads)
    return [{"name": name, "terms": ", ".join(known)} for name in sorted(unknown)]


def _need_correctness(self: Any, reward: Any, actor: Any, trainer: Any) -> list[dict[str, str]]:
    """The keys that need to know which responses are right, although no term says it."""
    # A function or an environment of the user's may return acc.
    if any(name in (*CORRECTNESS_TERMS, "environment") or ":" in name for name in reward.names):
        return []
    users = []
    if self.filter_groups.enable and self.filter_groups.metric == "acc":
        users.append("algorithm.filter_groups.metric acc")
    if actor.positive_lm_coef > 0:
        users.append(f"actor.positive_lm_coef {actor.positive_lm_coef}")
    for key in ("keep_best", "export_best"):
        metric = trainer.value_of(key) or ""
        if any(share in metric for share in ("/acc@", "/pass@", "/maj@")):
            users.append(f"trainer.{key} {metric}")
    return [{"user": user} for user in users]


class ReturnsSection(Section):
    """From rewards to the targets of a critic that is trained on stored rollouts."""

    gamma: Fraction = 1.0
    """discount from one token to the next"""
    lam_critic: Fraction = 1.0
    """lambda of the targets; 1: Monte-Carlo returns; below 1: lambda-returns of the values that the
    model itself has before each optimizer step"""


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
    episode's turns and of values at positions; null: reward.terms, with their weights, and
    turn_rewards if there are any"""
    gdpo_reward_weights: Annotated[
        Annotated[list[float], Field(min_length=1)] | None, by_estimator("gdpo")
    ] = None
    """gdpo: the weight of each of gdpo_reward_keys; null: 1 for each"""
    pair_loss: Annotated[PairLossName, by_estimator("online_dpo")] = "sigmoid"
    """online_dpo: the loss on pairs, as dpo.loss_type of train_dpo"""
    pair_beta: Annotated[Positive, by_estimator("online_dpo")] = 0.1
    """online_dpo: how strongly the policy is held to the reference, as dpo.beta of train_dpo"""
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
    distillation: DistillationSection
    """what the policy learns from a teacher"""
    rollout_correction: RolloutCorrectionSection
    """correction of the difference between the engine's policy and the trainer's"""

    refused: ClassVar[Rows] = {
        "{user} compares the answers to a prompt, but rollout.n is 1; set rollout.n to at "
        "least 2": _comparers,
        "{reward_norm} with {adv_estimator}: the greedy answer's score, which is taken off, "
        "would stay on another scale; set algorithm.reward_norm to null": lambda self: (
            self.reward_norm is not None
            and estimator_traits(self.adv_estimator).needs_greedy_answer
        ),
        "{actor.policy_loss.loss_mode} is defined for one advantage a response, but "
        "{adv_estimator}{reason} gives one a token; use another estimator, such as grpo, or "
        "another loss": _differing_tokens,
        "{adv_estimator} makes one step on the pairs that the policy has drawn; set "
        "algorithm.preset=online_dpo, {actor.ppo_mini_batch_size} to {=data.train_batch_size} and "
        "{actor.ppo_epochs} to 1, without rollout_correction": _is_no_dpo,
        "{lam_length_alpha} x {data.max_response_length} = {product} is not above 1, so lambda "
        "would be 0 for every response; raise lam_length_alpha above {least} or the "
        "length": lambda self, data: (
            self.lam_length_alpha is not None
            and (product := self.lam_length_alpha * data.max_response_length) <= 1
            and {"product": f"{product:g}", "least": f"{1 / data.max_response_length:g}"}
        ),
        "reward.terms has no term with a weight other than 0 ({names}), so every score would be 0 "
        "and nothing could be learned; add one, or set "
        "teacher.path": lambda self, reward, teacher: (
            self.gdpo_reward_keys is None
            and teacher is None
            and not any(term.weight for term in reward.terms)
            and {"names": ", ".join(reward.names) or "none is there"}
        ),
        "{gdpo_reward_weights} needs algorithm.gdpo_reward_keys, which says what is "
        "weighted; set both": lambda self: (
            self.gdpo_reward_weights is not None and self.gdpo_reward_keys is None
        ),
        "{gdpo_reward_weights} has {numbers} numbers for the {names} names in "
        "algorithm.gdpo_reward_keys; give one for each": lambda self: (
            self.gdpo_reward_keys is not None
            and self.gdpo_reward_weights is not None
            and (numbers := len(self.gdpo_reward_weights)) != len(self.gdpo_reward_keys)
            and {"numbers": numbers, "names": len(self.gdpo_reward_keys)}
        ),
        "{gdpo_reward_weights} is 0 for every term, so nothing could be learned; give "
        "another weight": lambda self: (
            self.gdpo_reward_weights is not None and not any(self.gdpo_reward_weights)
        ),
        "{gdpo_reward_keys} names {name} {times} times; name it once and add the "
        "weights": _named_again,
        "{gdpo_reward_keys} names {name}, which no term of reward.terms reports (they "
        "are {terms}); name one of these, or add a function that returns {name}": _unknown_scores,
        "{user} needs to know which responses are right, but no reward term says whether a "
        "response is right; add {name: exact_match, weight: 0}, gsm8k, or a function that returns "
        "acc, to reward.terms": _need_correctness,
    }

    @field_validator("preset")
    @classmethod
    def _is_replaced(cls, name: PresetName | None) -> None:
        if name is not None:
            raise ValueError(
                f"{name} is replaced by its keys where `load_config` reads it; use that"
            )
