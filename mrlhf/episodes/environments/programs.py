"""Finds what a user's environment and tools offer, and calls it.

It is imported in the process of the environment, and does not know that process.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pydantic

from mrlhf.config.user_code import UserCodeError, check_kind, check_parameters
from mrlhf.errors import DataError
from mrlhf.messages import read_message

_TAKES = {"reset": ("row",), "reply": ("text",), "reward": (), "turn_reward": ()}

RESERVED = (*_TAKES, "state_dict", "load_state_dict", "done")
"""Members of an environment that are no tools."""
LARGEST_SCORE = 1e15  # as of `rewards.interface`

_MOST_CHARACTERS = 200_000  # of what is said at once


class ProgramError(UserCodeError):
    """The environment or a tool cannot be used; the message says why, on one line."""


class Tool:
    """A function that the policy may call."""

    def __init__(self, name: str, function: Callable[..., Any], is_method: bool) -> None:
        """Read the signature; ProgramError if it does not say what the arguments are."""
        self.name = name
        self.function = function
        self.is_method = is_method
        parameters = list(inspect.signature(function).parameters.values())[is_method:]
        named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        _check_call(f"tool {name}", function, ("self",) * is_method, named)
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except Exception as error:
            raise ProgramError(f"tool {name}: its types cannot be read: {error}") from None

        config = pydantic.ConfigDict(extra="forbid")
        self._model: type[pydantic.BaseModel] = pydantic.create_model(name, __config__=config)
        about = _argument_docs(function)
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ProgramError(
                    f"tool {name} takes *{parameter.name}; name each argument, so that the policy "
                    "can be told"
                )
            if parameter.name not in hints:
                raise ProgramError(
                    f"tool {name}: argument {parameter.name} has no type; write "
                    f"{parameter.name}: str, or int"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            field = pydantic.Field(default, description=about.get(parameter.name))
            fields: dict[str, Any] = {parameter.name: (hints[parameter.name], field)}
            try:
                self._model = pydantic.create_model(name, __base__=self._model, **fields)
                self._model.model_json_schema()
            except Exception as error:
                # Without the address that pydantic adds.
                reason = " ".join(getattr(error, "message", str(error)).split()).split(". ")[0]
                raise ProgramError(
                    f"tool {name}: the type of argument {parameter.name} has no JSON schema: "
                    f"{reason}"
                ) from None

        text = inspect.getdoc(function) or ""
        self.schema = {
            "type": "function",
            "function": {
                "name": name,
                "description": " ".join(text.split("\n\n")[0].split()),
                "parameters": _without_titles(self._model.model_json_schema()),
            },
        }

    def call(self, owner: object | None, arguments: Mapping[str, Any]) -> str:
        """The tool's answer as text; ValueError says which argument is wrong."""
        try:
            checked = self._model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ValueError(f"{self.name} got wrong arguments: {'; '.join(wrong)}") from None
        given = {name: getattr(checked, name) for name in type(checked).model_fields}
        answer = self.function(**given) if owner is None else self.function(owner, **given)
        is_data = isinstance(answer, (dict, list))
        return as_text(json.dumps(answer, default=str) if is_data else str(answer))


class Offer:
    """An environment class with its tools, and functions that are tools."""

    def __init__(
        self,
        environment: type | None,
        functions: Sequence[Tool],
        rollout: Callable[..., Any] | None = None,
    ) -> None:
        """Read what they offer; ProgramError if something cannot be used.

        A `rollout` function leads episodes by itself, without environment and tools.
        """
        if rollout is not None:
            takes = ("engine", "row", "sampling")
            _check_call("the rollout function", rollout, takes, is_async=True)
        if rollout is not None and functions:
            raise ProgramError(
                f"{rollout.__name__} is a rollout function, which calls its tools itself; remove "
                "rollout.tools"
            )
        self.environment = environment
        self.rollout = rollout
        self.methods = {name for name in _TAKES if callable(getattr(environment, name, None))}
        self.tools: dict[str, Tool] = {}
        if environment is not None:
            _check_arguments(environment)
            if callable(getattr(environment, "done", None)):
                raise ProgramError("done is a method; make it a property, or an attribute")
            for name in sorted(self.methods):
                member = inspect.getattr_static(environment, name)
                is_bound = isinstance(member, (staticmethod, classmethod))
                owner = () if is_bound or not hasattr(member, "__get__") else ("self",)
                _check_call(name, getattr(environment, name), (*owner, *_TAKES[name]))
            for name, function in _tools_of(environment):
                self.tools[name] = Tool(name, function, is_method=True)

        for tool in functions:
            if tool.name in self.tools:
                whose = ""
                if environment is not None and self.tools[tool.name].is_method:
                    whose = f", one of them a method of {environment.__name__}"
                raise ProgramError(f"two tools have the name {tool.name}{whose}; rename one")
            self.tools[tool.name] = tool

    def describe(self) -> dict[str, Any]:
        """The offer, as the trainer reads it."""
        return {
            "tools": [tool.schema for tool in self.tools.values()],
            "is_stateless": self.environment is None and self.rollout is None,
            "has_reward": "reward" in self.methods,
            "is_function": self.rollout is not None,
        }


def as_text(text: str) -> str:
    """A text of bounded length that can be encoded."""
    return text[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()


def said(value: Any, method: str) -> str | list[Any] | None:
    """An environment's observation; ProgramError if it is neither text nor chat messages."""
    if value is None:
        return None
    if isinstance(value, str):
        return as_text(value)
    problem = 'return a text, a list of {"role", "content"} messages, or None'
    try:
        messages = list(map(read_message, value)) if isinstance(value, Sequence) else None
    except DataError as error:
        messages = None
        problem = f"a message {error}"
    if messages is None:
        raise ProgramError(f"{method} returned {repr(value)[:100]}; {problem}")
    return [{**message, "content": as_text(message["content"])} for message in messages]


def number(value: Any, method: str) -> float:
    """A number that a score may be; ProgramError if it is none."""
    try:
        result = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        result = math.nan
    if isinstance(value, (str, bytes)) or not abs(result) <= LARGEST_SCORE:
        raise ProgramError(
            f"{method} returned {repr(value)[:100]}; return a finite number from "
            f"-{LARGEST_SCORE:g} to {LARGEST_SCORE:g}"
        )
    return result


def reward(value: Any) -> float | dict[str, float]:
    """The result of `reward` in numbers; ProgramError without a finite score."""
    if not isinstance(value, Mapping):
        return number(value, "reward")
    if "score" not in value:
        raise ProgramError(
            f'reward returned a dict without "score" (it has {sorted(map(str, value))}); add it'
        )
    return {str(key): number(item, f"reward, as {key!r},") for key, item in value.items()}


def _check_call(
    what: str,
    function: Callable[..., Any],
    by_position: Sequence[str],
    by_name: Sequence[str] = (),
    *,
    is_async: bool = False,
) -> None:
    """ProgramError if a function does not take these arguments, or give its result at once."""
    try:
        if not is_async:
            check_kind(function)
        check_parameters(function, by_position, by_name)
    except UserCodeError as error:
        raise ProgramError(f"{what} {error}") from None


def _check_arguments(environment: type) -> None:
    wanted = [
        parameter.name
        for parameter in inspect.signature(environment).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if wanted:
        raise ProgramError(
            f"{environment.__name__} cannot be made without {', '.join(wanted)}; give its "
            "__init__ no arguments, and take what it needs from the row in reset"
        )


def _tools_of(environment: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods of a class that are no reserved members, in the order of the file."""
    seen = set()
    for owner in environment.__mro__[:-1]:
        for name, member in vars(owner).items():
            if name.startswith("_") or name in RESERVED or name in seen:
                continue
            seen.add(name)
            if inspect.isfunction(member):
                yield name, member


def _argument_docs(function: Callable[..., Any]) -> dict[str, str]:
    """The sentence on each argument in the section "Args:" of a docstring."""
    _, found, section = (inspect.getdoc(function) or "").partition("Args:\n")
    docs: dict[str, str] = {}
    for line in section.splitlines() if found else ():
        if not line.startswith(" "):
            break
        match = re.match(r"\s+(\w+)(?: \([^)]*\))?: (.*)", line)
        if match is not None:
            docs[match[1]] = match[2].strip()
        elif docs:
            last = next(reversed(docs))
            docs[last] = f"{docs[last]} {line.strip()}"
    return docs


def _without_titles(schema: Any) -> Any:
    """A JSON schema without the titles that pydantic makes of names, and without nulls."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(part) for name, part in value.items()}
        if key == "properties"
        else _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
        and not (key == "default" and value is None)
    }
