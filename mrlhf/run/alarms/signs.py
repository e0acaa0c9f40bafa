"""The signs of known failures: pure functions of the metrics so far.

Each function returns a message with the numbers while the failure is there, and otherwise None. The
bounds of a single metric stand in the table of metrics; those that compare several values stand
here. No function knows the cause or the remedy; `rules` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist, fmean, median

from mrlhf.metrics.table import lower_bound, upper_bound
from mrlhf.run.alarms.history import RECENT, History

_LATEST = 5  # steps whose mean is compared with the beginning

_REFERENCE_KLS = ("actor/reward_kl_penalty", "actor/kl_loss")
_FALSE_ALARMS = 0.0001
_FAULT_STEPS = 50  # for as long, a step that was too large may be at fault
_SLOW_SECONDS = 120.0
_COLLAPSED = 0.1
_MASTERED = 0.9
_GROWN_KL = 0.1
_GROWN_LENGTH = 1.3
_VALUE_STEPS = 12
_SPIKE_STEPS = 10
_SPIKE = 4.0
_CONSTANT_STEPS = 8


def kl_explosion(history: History, fault: str) -> str | None:
    """One step moves the policy far, or it is far from the reference, in the KL named `fault`."""
    if fault not in faults(history):
        return None
    is_step = fault == "actor/ppo_kl"
    latest = history.recent(fault, 1 if is_step else 2)
    bound = upper_bound(fault)
    if not latest or min(latest) <= bound:
        return None
    what = (
        "one step moves the policy too far" if is_step else "the policy is far from the reference"
    )
    return f"{fault} is {latest[-1]:.3g} nats a token and should be below {bound:g}: {what}"


def faults(history: History) -> list[str]:
    """Possible causes of a model that gets worse, the worst first, by metrics; see `rules`."""
    step_kl = "actor/ppo_kl"
    latest = history.recent(step_kl, min(history.count(step_kl), _FAULT_STEPS))
    if latest and max(latest) > upper_bound(step_kl):
        return [step_kl]
    kls = [name for name in _REFERENCE_KLS if history.count(name)]
    return kls or ["critic/score/mean"] * bool(history.count("critic/score/mean"))


def held_out(history: History, fault: str) -> str | None:
    """A held-out result is worse than its best one, by more than the noise of its rows.

    The bound is one that a run which only fluctuates passes with the chance `_FALSE_ALARMS`, in any
    pair of its results.
    """
    if fault != next(iter(faults(history)), ""):
        return None
    for name, values, errors in history.judged():
        best = best_step(name, values)
        last = max(values)
        pairs = max(1, math.comb(len(values), 2))
        bound = NormalDist().inv_cdf(1 - _FALSE_ALARMS / pairs)
        noise = bound * math.sqrt(2) * max(errors.values())
        if noise and abs(values[best] - values[last]) > noise:
            was, now = (
                f"{values[at]:.3g} ± {errors[at]:.2g} after step {at}" for at in (best, last)
            )
            return f"{name} is {now} and was {was}"
    return None


def best_step(name: str, values: Mapping[int, float]) -> int:
    """The first step with the best value of a held-out result; a loss falls while a run learns."""
    best = min if name.endswith("loss") else max
    return best(values, key=lambda step: values[step])


def entropy_collapse(history: History) -> str | None:
    """The policy hardly varies any more, although its answers are not yet good."""
    latest = history.recent("actor/entropy", 3)
    score = history.now("critic/score/mean")
    if not latest or score is None:
        return None

    start = fmean(history.first("actor/entropy"))
    lowest = history.extremes("critic/score/min")[0]
    highest = history.extremes("critic/score/max")[1]
    is_mastered = score >= lowest + _MASTERED * (highest - lowest)
    if start <= 0 or fmean(latest) > _COLLAPSED * start or is_mastered:
        return None
    return (
        f"actor/entropy has fallen from {start:.3g} to {fmean(latest):.3g} nats a token while the "
        f"mean score is {score:.3g} of at most {highest:.3g}"
    )


def over_optimisation(history: History, kl: str) -> str | None:
    """The reward rises together with the KL that is named `kl` and the length."""
    score = "critic/score/mean"
    length = "response_length/mean"
    if history.count(kl) < 2 * _LATEST:
        return None
    names = (score, kl, length)
    if any(not history.recent(name, _LATEST) for name in names):
        return None

    before = {name: fmean(history.first(name)) for name in names}
    after = {name: fmean(history.recent(name, _LATEST)) for name in names}
    runs_away = after[kl] > _GROWN_KL and after[length] > _GROWN_LENGTH * before[length]
    if after[score] <= before[score] or not runs_away:
        return None
    changes = [f"{name} {before[name]:.3g} to {after[name]:.3g}" for name in names]
    return f"the reward rises together with the KL and the length: {', '.join(changes)}"


def value_loss_not_falling(history: History) -> str | None:
    """The critic's loss has not fallen since the beginning, and its values explain no variance."""
    latest = history.recent("critic/vf_loss", _LATEST)
    explained = history.recent("critic/vf_explained_var", _LATEST)
    if not latest or not explained or history.count("critic/vf_loss") < _VALUE_STEPS:
        return None

    start = fmean(history.first("critic/vf_loss"))
    if fmean(latest) < start or fmean(explained) > lower_bound("critic/vf_explained_var"):
        return None
    return (
        f"critic/vf_loss was {start:.3g} and is {fmean(latest):.3g} after "
        f"{history.count('critic/vf_loss')} steps; the values explain {fmean(explained):.2g} of "
        "the variance of the returns"
    )


def clip_fraction(history: History) -> str | None:
    """More than half of the tokens are clipped."""
    clipped = history.now("actor/pg_clipfrac")
    if clipped is None or clipped <= upper_bound("actor/pg_clipfrac"):
        return None
    return f"actor/pg_clipfrac is {clipped:.2g}: over half of the tokens get no gradient"


def engine_mismatch(history: History) -> str | None:
    """The engine gives tokens other probabilities than the trainer."""
    name = "training/rollout_probs_diff_mean"
    difference = history.now(name)
    bound = upper_bound(name)
    if difference is None or difference <= bound:
        return None
    return (
        f"{name} is {difference:.3g} and should be below {bound:g}: the engine gives tokens other "
        "probabilities than the trainer"
    )


def truncation(history: History) -> str | None:
    """Many responses end at a limit."""
    name = "response_length/clip_ratio"
    latest = history.recent(name, 2)
    if not latest or min(latest) <= upper_bound(name):
        return None
    return f"{latest[-1]:.0%} of the responses are cut off at a limit of length or turns"


def equal_scores(history: History) -> str | None:
    """All responses have the same score."""
    score = history.now("critic/score/mean")
    if score is None or not _is_unhealthy_at_first_or_lastingly(history, "training/equal_scores"):
        return None
    return f"all responses of the step have the score {score:g}, so nothing can be learned"


def equal_groups(history: History) -> str | None:
    """The responses to nearly every prompt have equal scores, though prompts differ."""
    name = "training/equal_groups"
    share = history.now(name)
    if share is None or not _is_unhealthy_at_first_or_lastingly(history, name):
        return None
    if history.now("training/equal_scores") == 1.0:
        return None
    return (
        f"for {share:.0%} of the prompts all responses have equal scores, which are compared, so "
        "hardly anything can be learned"
    )


def gradient_spike(history: History, role: str) -> str | None:
    """A gradient is far larger than those before it."""
    name = f"{role}/grad_norm"
    recent = history.recent(name, min(21, max(_SPIKE_STEPS, history.count(name))))
    if not recent:
        return None

    *before, norm = recent
    if norm <= _SPIKE * max(before):
        return None
    return (
        f"{name} is {norm:.3g}; the median of the {len(before)} steps before is "
        f"{median(before):.3g}"
    )


def zero_learning_rate(history: History, role: str) -> str | None:
    """The learning rates are 0 at the first step, or for longer than one step."""
    name = f"{role}/lr"
    if history.now(name) != 0.0:
        return None
    if history.count(name) > 1 and history.recent(name, 2)[0] != 0.0:
        return None
    if history.now(f"{role}/head_lr"):
        return None  # the head alone is trained
    return f"{name} is 0, so the weights do not change"


def constant_term(history: History) -> str | None:
    """A term of the reward has the same mean in step after step, while another one changes."""
    terms = [name for name in history.measured("reward/") if name.count("/") == 1]
    constant = []
    for name in terms:
        latest = history.recent(name, _CONSTANT_STEPS)
        if latest and min(latest) == max(latest):
            constant.append(name)
    if not constant or len(constant) == len(terms):
        return None

    values = ", ".join(f"{name} {history.now(name):g}" for name in constant)
    return f"constant for {_CONSTANT_STEPS} steps: {values}"


def slow_replica(history: History, role: str | None = None) -> str | None:
    """The same replica is slower than the others, step after step and for minutes.

    It is a replica of the model `role` in updates, or of the engine if that is None.
    """
    name = "perf/slowest_replica" if role is None else f"perf/slowest_update/{role}"
    rank_name = "perf/slowest_replica_rank" if role is None else f"perf/slowest_update_rank/{role}"
    seconds = history.recent("timing_s/step", _LATEST)
    steps = math.ceil(_SLOW_SECONDS / max(fmean(seconds), 1e-3)) if seconds else _LATEST
    steps = min(RECENT, max(_LATEST, steps))
    slower = history.recent(name, steps)
    replicas = history.recent(rank_name, steps)
    if not slower or not replicas or min(slower) < upper_bound(name) or len(set(replicas)) > 1:
        return None

    rank = f"rank {replicas[-1]:.0f}"
    times = f"{fmean(slower):.3g} times as long for"
    end = f"as the median, for {steps} steps"
    if role is None:
        return f"{rank} needs {times} a pass of the engine {end}"
    return f"the replica of {rank} needs {times} its part of the update ({role}) {end}"


def everything_rejected(history: History) -> str | None:
    """The rollout correction rejects every token."""
    name = "rollout_corr/rollout_rs_masked_fraction"
    if history.now(name) != upper_bound(name):
        return None
    return f"the rollout correction has rejected every token, {_nothing_is_learned(history)}"


def zero_weights(history: History) -> str | None:
    """The rollout correction gives every token the weight 0."""
    name = "rollout_corr/rollout_is_mean"
    if history.now(name) != lower_bound(name):
        return None
    return f"the rollout correction gives every token the weight 0, {_nothing_is_learned(history)}"


def _nothing_is_learned(history: History) -> str:
    """The consequence, and the distance of the engine from the trainer, if it was measured."""
    kl = history.now("rollout_corr/kl")
    return "so nothing can be learned" + ("" if kl is None else f"; rollout_corr/kl is {kl:.3g}")


def _is_unhealthy_at_first_or_lastingly(history: History, name: str) -> bool:
    """Whether a share is at its bound in the first step, or for three."""
    latest = history.recent(name, 1 if history.count(name) == 1 else 3)
    return bool(latest) and min(latest) >= upper_bound(name)
