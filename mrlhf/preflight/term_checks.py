"""Conditions between the terms of the reward and the keys that name single terms.

Each complaint is one line with the remedy. A user's function tells its names only when it is
called, so with a function among the terms names are checked on the first step. This file does not
know how a term scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mrlhf.config.roots import PPOConfig
from mrlhf.config.unread import is_read
from mrlhf.rl.names import CORRECTNESS_TERMS

_SHARES_OF_RIGHT = ("/acc@", "/pass@", "/maj@")


def term_problems(config: PPOConfig) -> Iterator[str]:
    """Every complaint, one line each."""
    yield from _weight_problems(config)
    yield from _component_problems(config)
    yield from _correctness_problems(config)


def tells_right_from_wrong(config: PPOConfig) -> bool:
    """Whether a reward term may say which responses are right; a function's `acc` does."""
    return any(term.name in CORRECTNESS_TERMS or ":" in term.name for term in config.reward.terms)


def _weight_problems(config: PPOConfig) -> Iterator[str]:
    """Terms that all have the weight 0, where only their sum counts."""
    terms = config.reward.terms
    if config.algorithm.gdpo_reward_keys is None and not any(term.weight for term in terms):
        names = ", ".join(term.name for term in terms)
        yield (
            f"reward.terms gives every term the weight 0 ({names}), so every score would be 0 and "
            "nothing could be learned; give at least one term another weight"
        )


def _component_problems(config: PPOConfig) -> Iterator[str]:
    """Terms to compare that do not exist, and weights that do not fit them."""
    algorithm = config.algorithm
    if not is_read(config, "algorithm.gdpo_reward_keys"):
        return

    keys = algorithm.gdpo_reward_keys
    if algorithm.gdpo_reward_weights is not None:
        yield from _component_weight_problems(algorithm.gdpo_reward_weights, keys)
    if keys is not None:
        yield from _component_name_problems(keys, [term.name for term in config.reward.terms])


def _component_name_problems(keys: Sequence[str], terms: Sequence[str]) -> Iterator[str]:
    """Names of compared terms that are given twice, or that no rule reports."""
    key = "algorithm.gdpo_reward_keys"
    for name in sorted({name for name in keys if keys.count(name) > 1}):
        yield f"{key} names {name} {keys.count(name)} times; name it once and add the weights"
    if any(":" in term for term in terms):
        return
    for name in keys:
        if name not in terms:
            yield (
                f"{key} names {name}, which no term of reward.terms reports (they are "
                f"{', '.join(terms)}); name one of these, or add a function that returns {name}"
            )


def _component_weight_problems(
    weights: Sequence[float], keys: Sequence[str] | None
) -> Iterator[str]:
    """Weights of single terms that do not fit the terms."""
    key = "algorithm.gdpo_reward_weights"
    if keys is None:
        yield f"{key} needs algorithm.gdpo_reward_keys, which says what is weighted; set both"
    elif len(keys) != len(weights):
        yield (
            f"{key} has {len(weights)} numbers for the {len(keys)} names in "
            "algorithm.gdpo_reward_keys; give one for each"
        )
    if not any(weights):
        yield f"{key} is 0 for every term, so nothing could be learned; give another weight"


def _correctness_problems(config: PPOConfig) -> Iterator[str]:
    """Keys that need to know which responses are right, although no reward term says it."""
    if tells_right_from_wrong(config):
        return

    users = []
    filters = config.algorithm.filter_groups
    if filters.enable and filters.metric == "acc":
        users.append("algorithm.filter_groups.metric acc")
    if config.actor.positive_lm_coef > 0:
        users.append(f"actor.positive_lm_coef {config.actor.positive_lm_coef}")
    for key in ("keep_best", "export_best"):
        metric = getattr(config.trainer, key)
        if metric is not None and any(share in metric for share in _SHARES_OF_RIGHT):
            users.append(f"trainer.{key} {metric}")

    for user in users:
        yield (
            f"{user} needs to know which responses are right, but no reward term says whether a "
            "response is right; add {name: exact_match, weight: 0}, gsm8k, or a function that "
            "returns acc, to reward.terms"
        )
