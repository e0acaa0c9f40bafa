"""The section of the reward: its terms, and the limits of a user's functions.

It does not know models, files or ranks.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, get_args

from pydantic import Field, model_validator

from mrlhf.config.fields import (
    MOST,
    FunctionReference,
    Number,
    Rows,
    Seconds,
    Section,
    known_or_own,
)
from mrlhf.config.reads import read_if
from mrlhf.config.user_code import is_reference
from mrlhf.rl.names import RewardName


class RewardTermSection(Section):
    """One part of the reward."""

    name: Annotated[RewardName | FunctionReference, known_or_own(get_args(RewardName))]
    """a rule, reward_model, environment (what rollout.environment says of an episode), or
    path/to/file.py:function: your own"""
    weight: Number = 1.0
    """factor of this term in the sum"""

    @model_validator(mode="before")
    @classmethod
    def _is_section(cls, raw: Any) -> Any:
        if isinstance(raw, str):
            raise ValueError(f"should be a section with keys of its own: {{name: {raw}}}")
        return raw


def _has_function(terms: list[RewardTermSection]) -> bool:
    """Whether any of `terms` is a user's function."""
    return any(is_reference(term.name) for term in terms)


_IF_OWN = read_if("terms", _has_function, "holds no function of your own", "name one there")


class RewardSection(Section):
    """The score of a response: the weighted sum of its terms."""

    terms: Annotated[list[RewardTermSection], Field(min_length=1)]
    """list of {name, weight}"""
    timeout_s: Annotated[Seconds, _IF_OWN] = 60.0
    """longest time that one call of a user's function may take, seconds"""
    memory_mb: Annotated[Annotated[int, Field(ge=64, le=MOST)] | None, _IF_OWN] = 16384
    """most private memory of each process of a user's function, MB; null: no limit"""

    refused: ClassVar[Rows] = {
        "reward.terms holds 'reward_model' but there is no such model; set reward_model.path or "
        "remove the term": lambda self, reward_model: (
            "reward_model" in self.names and reward_model is None
        ),
        "reward_model is set but no reward term uses it; add {name: reward_model} to reward.terms "
        "or remove it": lambda self, reward_model: (
            "reward_model" not in self.names and reward_model is not None
        ),
        "reward.terms holds 'environment' but there is none; set rollout.environment or remove the "
        "term": lambda self, rollout: "environment" in self.names and not rollout.environment,
    }

    @property
    def names(self) -> list[str]:
        """The names of the terms."""
        return [term.name for term in self.terms]


class AnyRewardSection(RewardSection):
    """The score of a response, if any is wanted."""

    terms: list[RewardTermSection] = Field(default_factory=list)
    """list of {name, weight}; may be empty"""
