"""Reads the calls of tools out of what a model says, in the forms that model families use.

It knows text alone, and not which tools there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mrlhf.errors import DataError

Call = tuple[str, dict[str, Any]]
"""Name and arguments."""


@dataclass(frozen=True)
class ParsedTurn:
    """What a model says in one turn."""

    content: str  # the text beside the calls
    calls: tuple[Call, ...] = ()  # in their order
    error: str | None = None  # why a call cannot be read, on one line, for the model


class _CallError(Exception):
    """A call cannot be read."""


def parser_for(name: str, chat_template: str) -> Callable[[str], ParsedTurn]:
    """The parser of a form; "auto" takes the form that the chat template shows.

    Raises:
        DataError: there is no such form.
    """
    if name == "auto":
        marks = ((mark, form) for form, mark in _MARKS.items())
        name = next((form for mark, form in marks if mark in chat_template), "json")
    if name not in PARSERS:
        raise DataError(f"there is no form of tool calls {name!r}; use one of {', '.join(PARSERS)}")
    return PARSERS[name]


def _parse(text: str, read: Callable[[str], Iterator[Call | str]]) -> ParsedTurn:
    """Collect calls, and the text beside them, until one cannot be read."""
    calls: list[Call] = []
    content: list[str] = []
    error = None
    try:
        for part in read(text):
            if isinstance(part, str):
                content.append(part)
            else:
                calls.append(part)
    except _CallError as problem:
        error = str(problem)
    except RecursionError:
        error = "the arguments of a call are nested too deeply"
    return ParsedTurn("".join(content).strip(), tuple(calls), error)


def _hermes(text: str) -> Iterator[Call | str]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times."""
    while True:
        before, opens, rest = text.partition("<tool_call>")
        yield before
        if not opens:
            return
        inside, closes, text = rest.partition("</tool_call>")
        if not closes:
            raise _CallError("a <tool_call> has no </tool_call>")
        yield _call_of(_json(inside))


def _llama3(text: str) -> Iterator[Call | str]:
    """{"name": ..., "parameters": {...}} as the whole turn, several with ; between."""
    text = text.strip()
    is_marked = text.startswith("<|python_tag|>")
    text = text.removeprefix("<|python_tag|>").strip()
    if not is_marked and not text.startswith("{"):
        yield text
        return
    while text:
        value, text = _json_at(text)
        yield _call_of(value)
        text = text.lstrip().removeprefix(";").lstrip()


def _mistral(text: str) -> Iterator[Call | str]:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}."""
    content, opens, rest = text.partition("[TOOL_CALLS]")
    yield content
    while opens:
        if rest.lstrip().startswith("["):
            values, _ = _json_at(rest.lstrip())
            for value in values:
                yield _call_of(value)
            return
        name, has_arguments, rest = rest.partition("[ARGS]")
        if not has_arguments:
            raise _CallError("a call has no [ARGS]")
        value, rest = _json_at(rest.lstrip())
        # Newer templates put the number of the call between name and arguments.
        yield _call_of({"name": name.partition("[CALL_ID]")[0].strip(), "arguments": value})
        _, opens, rest = rest.partition("[TOOL_CALLS]")


_DEEPSEEK_OPENS, _DEEPSEEK_CLOSES = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_BETWEEN = "<｜tool▁sep｜>"


def _deepseek(text: str) -> Iterator[Call | str]:
    """Each call as type, separator, name and a block of JSON; newer ones without the type."""
    content, _, rest = text.partition("<｜tool▁calls▁begin｜>")
    yield content
    while True:
        _, opens, rest = rest.partition(_DEEPSEEK_OPENS)
        if not opens:
            return
        inside, closes, rest = rest.partition(_DEEPSEEK_CLOSES)
        if not closes:
            raise _CallError(f"a {_DEEPSEEK_OPENS} has no {_DEEPSEEK_CLOSES}")
        before, _, after = inside.partition(_DEEPSEEK_BETWEEN)
        name, arguments = before, after
        if before.strip() == "function":
            name, _, arguments = after.partition("\n")
        yield _call_of({"name": name.strip(), "arguments": _json(_without_fence(arguments))})


def _json_form(text: str) -> Iterator[Call | str]:
    """An object with name and arguments, or a list of them, as the whole turn."""
    inside = _without_fence(text.strip())
    if not inside.startswith(("{", "[")):
        yield text
        return
    values = _json(inside)
    for value in values if isinstance(values, list) else [values]:
        yield _call_of(value)


PARSERS: Mapping[str, Callable[[str], ParsedTurn]] = {
    "hermes": lambda text: _parse(text, _hermes),
    "llama3": lambda text: _parse(text, _llama3),
    "mistral": lambda text: _parse(text, _mistral),
    "deepseek": lambda text: _parse(text, _deepseek),
    "json": lambda text: _parse(text, _json_form),
}
"""The parser of each form; none raises."""

_MARKS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "deepseek": "tool▁call",
    "llama3": "<|python_tag|>",
}


def _without_fence(text: str) -> str:
    """The content of a fenced block, if the text is one."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text.partition("\n")[2].removesuffix("```").strip()
    return text


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _CallError(f"a call is no JSON: {error}") from None


def _json_at(text: str) -> tuple[Any, str]:
    """The JSON value at the beginning of `text`, and the rest."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except ValueError as error:
        raise _CallError(f"a call is no JSON: {error}") from None
    return value, text[end:]


def _call_of(value: Any) -> Call:
    """Name and arguments of a call; some models write the arguments as text, or call them so."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _json(arguments)
        if isinstance(arguments, dict):
            return value["name"], arguments
    raise _CallError('a call must be {"name": "...", "arguments": {...}}')
