"""The section of the reward: its terms, and the limits of a user's functions.

It does not know models, files or ranks.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Field, field_validator, model_validator

from mrlhf.config.fields import MOST, FunctionReference, Number, Seconds, Section
from mrlhf.config.path_text import expand_name
from mrlhf.config.reads import read_if
from mrlhf.config.user_code import is_reference
from mrlhf.rl.names import RewardName


class RewardTermSection(Section):
    """One part of the reward."""

    name: RewardName | FunctionReference = Field(
        description="a rule, reward_model, or path/to/file.py:function: your own"
    )
    weight: Number = Field(1.0, description="factor of this term in the sum")

    @model_validator(mode="before")
    @classmethod
    def _is_section(cls, raw: Any) -> Any:
        if isinstance(raw, str):
            raise ValueError(f"should be a section with keys of its own: {{name: {raw}}}")
        return raw

    @field_validator("name", mode="before")
    @classmethod
    def _is_rule_or_function(cls, name: object) -> str:
        return expand_name(name, get_args(RewardName))


def _has_function(terms: list[RewardTermSection]) -> bool:
    """Whether any of `terms` is a user's function."""
    return any(is_reference(term.name) for term in terms)


_IF_OWN = read_if("terms", _has_function, "holds no function of your own", "name one there")


class RewardSection(Section):
    """The score of a response: the weighted sum of its terms."""

    terms: Annotated[list[RewardTermSection], Field(min_length=1)] = Field(
        description="list of {name, weight}"
    )
    timeout_s: Annotated[Seconds, _IF_OWN] = Field(
        60.0, description="longest time that one call of a user's function may take, seconds"
    )
    memory_mb: Annotated[Annotated[int, Field(ge=64, le=MOST)] | None, _IF_OWN] = Field(
        16384,
        description="most private memory of each process of a user's function, MB; null: no limit",
    )
