"""What every section is made of: the frozen base class and the kinds of values.

Each kind of number has bounds, beyond which some part of a run would overflow, divide by 0, or do
nothing. This file does not know any section or key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from mrlhf.config.path_text import expand_path

MOST = 10**9  # largest whole number where there is no other bound
_LEAST_BUT_ZERO = 1e-12


def _zero_or_not_tiny(value: float) -> float:
    """`value`, which must not vanish beside any number that it is added to."""
    if 0 < value < _LEAST_BUT_ZERO:
        raise ValueError(f"should be 0 or at least {_LEAST_BUT_ZERO:g}")
    return value


_NOT_TINY = AfterValidator(_zero_or_not_tiny)

Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]
Ranks = Annotated[int, Field(ge=1, le=1024)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]

Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, le=0.99999)]
Positive = Annotated[float, Field(ge=1e-6, le=1e6)]
NotNegative = Annotated[float, Field(ge=0, le=1e6), _NOT_TINY]
UpToOne = Annotated[float, Field(ge=0, le=1), _NOT_TINY]
Number = Annotated[float, Field(ge=-1e6, le=1e6)]
Seconds = Annotated[float, Field(ge=0.1, le=604800)]
Minutes = Annotated[float, Field(ge=0.001, le=525600)]


def _one_or_many(value: object) -> object:
    """`value` as a list; a single text stands for a list of one."""
    return [value] if isinstance(value, str) else value


PathText = Annotated[str, AfterValidator(expand_path)]

_ONE_OR_MANY = BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])
Files = Annotated[list[PathText], _ONE_OR_MANY]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], _ONE_OR_MANY]

# how a user's own function is named; what it looks like in a JSON schema
FunctionReference = Annotated[
    str,
    WithJsonSchema(
        {"type": "string", "title": "path/to/file.py:function", "pattern": r"\.py:\w+$"}
    ),
]


class Section(BaseModel):
    """A frozen group of keys; unknown keys, inexact types, inf and nan are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def subsections(cls) -> dict[str, type[Section]]:
        """The fields that are sections and always present, with their classes."""
        sections = {}
        for name, field in cls.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Section):
                sections[name] = kind
        return sections

    @classmethod
    def expand(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """Replace the shorthands in `raw` by the keys that they stand for.

        A section with shorthands overrides this method.

        Args:
            raw: everything that one file, or the arguments, say about this section.
        """
        return raw

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, raw: Any) -> Any:
        """Make a section that is left out an empty one, so that its own missing keys are named."""
        if not isinstance(raw, Mapping):
            return raw
        filled = dict(raw)
        for name in cls.subsections():
            if filled.get(name) is None:
                filled[name] = {}
        return filled
