"""The labels of a classifier: whether they are those that its role trains or reads.

It knows the keys that name them, and reads no file.
"""

from __future__ import annotations

import difflib

from mrlhf.config.roots import AnyConfig, RewardModelConfig, is_reward_model
from mrlhf.errors import ConfigError
from mrlhf.models.families import with_labels
from mrlhf.models.spec import ModelSpec


def labelled(config: AnyConfig, name: str, spec: ModelSpec) -> ModelSpec:
    """A role's scalar model with the labels that it trains.

    Raises:
        ConfigError: it has others than its role trains or reads, in one line.
    """
    has = f"{config.roles()[name].path} has the labels {', '.join(spec.labels)}"
    if isinstance(config, RewardModelConfig):
        columns = tuple(config.rm.target_column)
        if spec.labels not in ((), columns) and max(spec.outputs, len(columns)) > 1:
            named = ", ".join(columns) or "none"
            raise ConfigError(
                f"{has}, and rm.target_column names {named}; name the same ones in this order, or "
                "begin with a language model"
            )
        return with_labels(spec, columns)

    if not is_reward_model(name):
        if spec.outputs > 1:
            raise ConfigError(
                f"{has}, and a critic gives one number; name a language model, or a classifier "
                "with one label"
            )
        return spec

    heads = config.value_of("reward_model.heads")
    if not heads and spec.outputs > 1:
        raise ConfigError(
            f"{has}; give the weights of those that score in reward_model.heads, such as "
            f"{{{spec.labels[0]}: 1}}"
        )
    for head in heads:
        if head not in spec.labels:
            near = difflib.get_close_matches(head, spec.labels, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"reward_model.heads names {head}, and {has}{hint}")
    return spec
