"""Imports a user's policy loss and advantage estimator before anything is built.

It does not know what they compute.
"""

from __future__ import annotations

from mrlhf.config.roots import PPOConfig
from mrlhf.errors import ConfigError
from mrlhf.methods import find_method
from mrlhf.user_code import is_reference


def check_user_methods(config: PPOConfig) -> None:
    """Import the files that `loss_mode` and `adv_estimator` name, and find the functions in them.

    Raises:
        ConfigError: one line for each function that cannot be used.
    """
    names = {
        "actor.policy_loss.loss_mode": config.actor.policy_loss.loss_mode,
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
    }
    problems = []
    for key, name in names.items():
        if not is_reference(name):
            continue
        try:
            find_method(key, name, {})
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
