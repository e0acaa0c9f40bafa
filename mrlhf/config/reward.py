"""The section of the reward: its terms, and the limits of a user's functions.

It does not know models, files or ranks.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Field, field_validator, model_validator

from mrlhf.config.fields import MOST, Count, FunctionReference, Number, Seconds, Section, Switch
from mrlhf.config.path_text import expand_name
from mrlhf.rl.names import RewardName
from mrlhf.user_code import is_reference


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


def _no_own_function(terms: list[RewardTermSection]) -> bool:
    """Whether none of `terms` is a user's function."""
    return not any(is_reference(term.name) for term in terms)


class RewardSection(Section):
    """The score of a response: the weighted sum of its terms."""

    switches = (
        Switch(
            "terms",
            _no_own_function,
            ("timeout_s", "memory_mb", "max_processes"),
            "holds no function of your own",
            "name one there",
        ),
    )

    terms: Annotated[list[RewardTermSection], Field(min_length=1)] = Field(
        description="list of {name, weight}"
    )
    timeout_s: Seconds = Field(
        60.0, description="longest time that one call of a user's function may take, seconds"
    )
    memory_mb: Annotated[int, Field(ge=64, le=MOST)] | None = Field(
        16384,
        description="most private memory of each process of a user's function, MB; null: no limit",
    )
    max_processes: Count | None = Field(
        64,
        description="most processes of a user's function at once, on each rank; they are counted "
        "twice a second; null: no limit",
    )
