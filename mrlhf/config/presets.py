"""Presets: a method, or a correction, by its name.

`algorithm.preset` replaces the method of earlier files by the keys of a file in
`configs/algorithms/`; the keys beside it win. This file knows which keys make a method. It does not
know what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mrlhf.config.correction import RolloutCorrectionSection
from mrlhf.version import shipped

PRESET = "algorithm.preset"
PresetName = Literal[
    "defaults",
    "ppo",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "flash_reinforce",
    "remax",
    "dapo",
    "gspo",
    "cispo",
    "gdpo",
    "optimal_token_baseline",
    "vapo",
    "online_dpo",
    "sao",
]

# Keys and sections, by the prefixes of their names.
_METHOD = (
    "algorithm.",
    "actor.policy_loss.",
    "actor.clip_ratio",
    "actor.tau_",
    "actor.positive_lm_coef",
    "actor.use_kl_loss",
    "actor.kl_loss_",
    "actor.loss_",
    "critic.cliprange_value",
    "critic.loss_",
    "rollout.n",
    "trainer.critic_warmup",
)
_CORRECTION = "algorithm.rollout_correction."
_TASK = ("algorithm.reward_", "algorithm.missing_eos", "algorithm.distillation", _CORRECTION)
# Keys that few methods set. A preset forgets those of an earlier preset, and leaves a user's own.
OF_FEW = (_CORRECTION, "critic.freeze", "critic.ppo_epochs", "rollout.partial.")
CORRECTION_PRESET = f"{_CORRECTION}preset"


def is_of_method(key: str) -> bool:
    """Whether a key is part of the method, which a preset replaces."""
    return key.startswith(_METHOD) and not key.startswith(_TASK)


def preset_file(name: str) -> Path:
    """The file that holds the keys of a preset."""
    return shipped() / "configs" / "algorithms" / f"{name}.yaml"


def with_correction(values: Mapping[str, Any]) -> dict[str, Any]:
    """The `values` of one source, with the correction's preset replaced by its keys."""
    own = {key: value for key, value in values.items() if key.startswith(_CORRECTION)}
    short = {key.removeprefix(_CORRECTION): value for key, value in own.items()}
    full = RolloutCorrectionSection.expand(short)
    others = {key: value for key, value in values.items() if key not in own}
    return others | {f"{_CORRECTION}{key}": value for key, value in full.items()}
