"""The parts of every section: the frozen base class and the kinds of values.

Each kind of number has bounds, beyond which some part of a run would overflow, divide by 0, or do
nothing. In a path, `~` and `${VARIABLE}` are replaced as in a shell. This file does not know any
section or key, nor whether anything exists at a path.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import reduce
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

from mrlhf.config.user_code import OWN_FUNCTION, check_name, is_reference

MOST = 10**9  # largest whole number where there is no other bound
_LEAST_BUT_ZERO = 1e-12


def _zero_or_not_tiny(value: float) -> float:
    """`value`, unless it is so small that it would vanish in a sum."""
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


def one_or_many(value: object) -> object:
    """`value` as a list; a single text stands for a list of one."""
    return [value] if isinstance(value, str) else value


def on_or_off(value: object) -> object:
    """`value`, in which YAML has taken on for true, or off for false."""
    return "on" if value is True else "off" if value is False else value


_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")
_VARIABLE = re.compile(r"\$(\w+|\{[^{}]*\})")


def expand_path(text: str) -> str:
    """Replace a `~` at the start of `text`, and environment variables.

    Raises:
        ValueError: it is empty or an address and no path, or names a user or a variable that does
            not exist.
    """
    if not text.strip():
        raise ValueError("should be a path, and is empty")
    if not text.isprintable():
        raise ValueError("should be a path, and holds characters that cannot be printed")

    path = _VARIABLE.sub(_value, text)
    scheme = _SCHEME.match(path.strip())
    if scheme is not None:
        raise ValueError(
            f"should be a path of the file system, and '{scheme[0]}' begins an address; copy what "
            "is there into a directory and name that, or name a repository of the Hub as org/name"
        )
    if path.startswith("~"):
        path = os.path.expanduser(path)
        if path.startswith("~"):
            user = path.split("/")[0]
            raise ValueError(f"'{user}' names no user of this machine; write the path in full")
    if not path.strip():
        raise ValueError("should be a path, and is empty once its variables are replaced")
    return path


def _value(match: re.Match[str]) -> str:
    """The value of the environment variable that `match` names."""
    name = match[1].strip("{}")
    value = os.environ.get(name)
    if value is None:
        raise ValueError(f"the environment variable {name or match[0]} is not set")
    return value


def _day(value: object) -> object:
    """A day as text, which YAML reads as a date."""
    try:
        return None if value is None else date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError("should be a day, such as 2026-01-31") from None


Day = Annotated[str | None, BeforeValidator(_day)]
PathText = Annotated[str, AfterValidator(expand_path)]

_ONE_OR_MANY = BeforeValidator(one_or_many, json_schema_input_type=str | list[str])
Files = Annotated[list[PathText], _ONE_OR_MANY]
Texts = Annotated[list[Annotated[str, Field(min_length=1)]], _ONE_OR_MANY]
Name = Annotated[str, Field(pattern=r"\S")]


def known_or_own(names: Sequence[str], own: str = OWN_FUNCTION) -> BeforeValidator:
    """Refuses what is neither one of `names` nor of the form `own`; expands its path."""

    def check(value: object) -> str:
        text = check_name(value, names, own)
        if not is_reference(text):
            return text
        path, _, function = text.rpartition(":")
        return f"{expand_path(path)}:{function}"

    return BeforeValidator(check)


def known_name(names: Sequence[str]) -> BeforeValidator:
    """Refuses a text that is not one of `names`, and offers the nearest; null passes."""

    def check(value: object) -> object:
        if value is None or value in names:
            return value
        near = difflib.get_close_matches(str(value), names, n=1)
        hint = f"did you mean '{near[0]}'? It should be" if near else "should be"
        raise ValueError(f"{hint} one of {', '.join(names)}")

    return BeforeValidator(check)


# The reference to a user's own function, and its form in a JSON schema.
FunctionReference = Annotated[
    str,
    WithJsonSchema(
        {"type": "string", "title": "path/to/file.py:function", "pattern": r"\.py:\w+$"}
    ),
]


Rows = Mapping[str, Callable[..., Any]]


class Section(BaseModel):
    """A frozen section of keys; unknown keys, inexact types, inf and nan are refused.

    The text below a key is its meaning in --help, in the page of all keys and in the schemas.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    # Values that contradict each other: the text of the refusal, and what then holds of the
    # configuration; see `unread.contradictions`.
    refused: ClassVar[Rows] = {}

    def value_of(self, key: str) -> Any:
        """The value of `key`; a dot leads into a subsection."""
        return reduce(getattr, key.split("."), self)

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, raw: Any) -> Any:
        """Replace a missing section by an empty one, so that its own missing keys are named."""
        if not isinstance(raw, Mapping):
            return raw
        filled = dict(raw)
        for name, field in cls.model_fields.items():
            kind = field.annotation
            is_section = isinstance(kind, type) and issubclass(kind, Section)
            if is_section and filled.get(name) is None:
                filled[name] = {}
        return filled
