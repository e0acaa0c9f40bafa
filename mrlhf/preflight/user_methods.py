"""Imports a user's policy loss and advantage estimator before anything is built.

It does not know what they compute.
"""

from __future__ import annotations

from collections.abc import Collection

from mrlhf.config.roots import PPOConfig
from mrlhf.errors import ConfigError
from mrlhf.methods import find_method
from mrlhf.preflight.paths import InputPath
from mrlhf.user_code import is_reference


def check_user_methods(config: PPOConfig, absent: Collection[InputPath] = ()) -> None:
    """Import the files that `loss_mode` and `adv_estimator` name, and find the functions in them.

    Args:
        config: the whole configuration.
        absent: paths that are not on this machine; the functions there are not looked for.

    Raises:
        ConfigError: one line for each function that cannot be used.
    """
    names = {
        "actor.policy_loss.loss_mode": config.actor.policy_loss.loss_mode,
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
    }
    missing = {path.key for path in absent}
    problems = []

    for key, name in names.items():
        if not is_reference(name) or key in missing:
            continue
        try:
            find_method(key, name, {})
        except ConfigError as error:
            problems.append(str(error))

    if problems:
        raise ConfigError("\n".join(problems))
