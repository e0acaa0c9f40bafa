"""The method of a PPO configuration in words: its chosen parts, and its keys that are not at their
defaults.

It does not judge the method: `method_checks` does.
"""

from __future__ import annotations

from collections.abc import Iterator

from mrlhf.config.presets import is_of_method
from mrlhf.config.reads import ESTIMATOR, LOSS_MODE, trained_loss
from mrlhf.config.roots import PPOConfig
from mrlhf.config.tree import in_yaml, nodes
from mrlhf.config.unread import default_of, is_read
from mrlhf.config.user_code import is_reference
from mrlhf.rl.names import ESTIMATOR_TRAITS
from mrlhf.roles.policy_loss import configured_bypass, needs_mini_batch_pass

_SAID = (ESTIMATOR, LOSS_MODE, "actor.loss_agg_mode", "rollout.n", "trainer.critic_warmup")
_SAFETY = ("actor.entropy_coeff", "actor.target_kl_stop")


def describe_method(config: PPOConfig) -> Iterator[str]:
    """The parts of the method, the keys that shape them, and what it costs."""
    estimator = config.algorithm.adv_estimator
    loss, _ = trained_loss(config)
    own = ", your own" if is_reference(loss) else ""
    yield "the method"
    if not config.needs_critic:
        needless = f"{estimator} needs none"
        if is_reference(estimator):
            needless = "algorithm.use_critic is false"
        yield f"  no critic: {needless}"
    yield f"  advantages: {estimator}{_of_estimator(estimator)}"
    yield f"  policy loss: {loss}{own}, aggregation: {config.actor.agg_mode}"

    changed = [f"{key} {in_yaml(config.value_of(key))}" for key in _changed_keys(config)]
    yield f"  with {', '.join(changed)}" if changed else "  with all other keys at their defaults"

    if needs_mini_batch_pass(loss, configured_bypass(config.algorithm.rollout_correction)):
        yield (
            "  one more forward pass a mini-batch: a statistic of the current policy over all of "
            "it comes first"
        )


def _of_estimator(name: str) -> str:
    """The needs and effects of an estimator, apart from its keys."""
    traits = ESTIMATOR_TRAITS.get(name)
    if traits is None:
        return ", your own, not whitened"
    words = ", whitened" if traits.whitened else ""
    if traits.compares_terms:
        words += ", of single terms of the reward"
    if traits.needs_squared_probabilities:
        words += ", with a baseline for each token"
    if traits.needs_greedy_answer:
        words += ", against a greedy answer to each prompt"
    return words


def _changed_keys(config: PPOConfig) -> Iterator[str]:
    """The keys of the method that are read and not at their defaults."""
    for key, node in nodes(PPOConfig).items():
        is_part = is_of_method(key) or key.startswith("algorithm.") or key in _SAFETY
        is_part |= key.endswith("optim.skip_grad_norm")
        if not is_part or node.is_section or key in _SAID or key.split(".")[0] in config.unbuilt:
            continue
        if is_read(config, key) and config.value_of(key) != default_of(config, key):
            yield key
