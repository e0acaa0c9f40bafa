"""What every section is made of: the frozen base class and the kinds of values.

Each kind of number has bounds, beyond which some part of a run would overflow, divide by 0, or do
nothing. This file does not know any section or key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

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
Positive = Annotated[float, Field(ge=1e-9, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9), _NOT_TINY]
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


@dataclass(frozen=True)
class Switch:
    """A key that decides whether other keys of its section are read.

    Attributes:
        key: the deciding key.
        is_off: whether a value of it leaves the other keys unread.
        numbers: the other keys; a dot leads into a subsection.
        state: what is true of the deciding key then, in words that follow its name.
        remedy: what to do so that they are read.
    """

    key: str
    is_off: Callable[[Any], bool]
    numbers: tuple[str, ...]
    state: str
    remedy: str


class Section(BaseModel):
    """A frozen section of keys; unknown keys, inexact types, inf and nan are refused.

    Attributes:
        switches: keys that decide whether others are read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    switches: ClassVar[tuple[Switch, ...]] = ()

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

    @classmethod
    def default_of(cls, key: str) -> Any:
        """The default of `key`; a dot leads into a subsection."""
        name, _, rest = key.partition(".")
        if rest:
            return cls.subsections()[name].default_of(rest)
        return cls.model_fields[name].get_default(call_default_factory=True, validated_data={})

    def unread(self) -> Iterator[tuple[Switch, str]]:
        """The numbers that a switch leaves unread although they are not at their defaults."""
        for switch in self.switches:
            if switch.is_off(self.value_of(switch.key)):
                for number in switch.numbers:
                    if self.value_of(number) != self.default_of(number):
                        yield switch, number

    def value_of(self, key: str) -> Any:
        """The value of `key`; a dot leads into a subsection."""
        name, _, rest = key.partition(".")
        value = getattr(self, name)
        return value.value_of(rest) if rest else value

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
