"""What every section is made of: the frozen base class and the kinds of values.

It does not know any section or key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


def _one_or_many(value: object) -> object:
    """`value` as a list; a single text stands for a list of one."""
    return [value] if isinstance(value, str) else value


_ONE_OR_MANY = BeforeValidator(_one_or_many, json_schema_input_type=str | list[str])
Files = Annotated[list[str], _ONE_OR_MANY]
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
