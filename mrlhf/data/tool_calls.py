"""Reads the calls of tools out of the text of a turn, in the formats that models are trained on.

A format is a generator that walks through the text once, from one call to the next, and stops at
the first that cannot be read. It does not know which tools there are, or what they take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from mrlhf.errors import DataError

Call = tuple[str, dict[str, Any]]  # the tool's name, and its arguments
# Part of the text, from its first character to behind its last, and the call that ends there.
_Found = tuple[int, int, Call | None]
_Scan = Callable[[str, int], Iterator[_Found]]

_SPACE = re.compile(r"\s*")
_LONGEST_NAME = 200  # characters
_THOUGHT_END = "</think>"
_CALL_KEYS = ('"name"', '"arguments"', '"parameters"')


@dataclass(frozen=True)
class ParsedTurn:
    """The calls of a turn. A text with an error may have calls before it."""

    content: str  # the text beside the calls; what cannot be read is part of it
    calls: tuple[Call, ...]  # in order
    error: str | None  # one line for the model: the first call that cannot be read, what was due


class _UnreadableError(Exception):
    """A call cannot be read; the message says why."""


def parser_for(name: str, chat_template: str) -> Callable[[str], ParsedTurn]:
    """The parser of the format `name`; "auto" chooses it by what stands in the chat template.

    A parser takes the text of a turn, with special tokens and without the end token. It raises
    nothing. DataError if there is no such format, or the template has no sign of one.
    """
    if name != "auto":
        if name not in PARSERS:
            raise DataError(
                f"there is no format of tool calls {name!r}; use auto or one of {_NAMES}"
            )
        return PARSERS[name]

    is_other = any(sign in chat_template for sign in _OTHER_SIGNS)
    for chosen, signs in _SIGNS.items():
        if not is_other and any(sign in chat_template for sign in signs):
            return PARSERS[chosen]
    raise DataError(
        f"the chat template shows no known format of tool calls; name one of {_NAMES} instead of "
        "auto"
    )


def _parse(text: str, scan: _Scan, expected: str) -> ParsedTurn:
    """Collect what `scan` finds behind the thoughts of a turn."""
    calls: list[Call] = []
    beside: list[str] = []
    read = 0
    error = None
    thought = text.find(_THOUGHT_END)  # a thought may mention a call
    begin = thought + len(_THOUGHT_END) if thought >= 0 else 0
    try:
        for start, end, call in scan(text, begin):
            if call is not None:
                calls.append(call)
            beside.append(text[read:start])
            read = end
    except _UnreadableError as reason:
        error = f"call {len(calls) + 1} cannot be read: {reason}; expected {expected}"

    beside.append(text[read:])
    return ParsedTurn("".join(beside).strip(), tuple(calls), error)


def _hermes(text: str, begin: int) -> Iterator[_Found]:
    opening = "<tool_call>"
    start = text.find(opening, begin)
    while start >= 0:
        value, end = _value(text, start + len(opening))
        call = _call(value)
        end = _behind(text, end, "</tool_call>")
        yield start, end, call
        start = text.find(opening, end)


def _llama3(text: str, begin: int) -> Iterator[_Found]:
    """Objects that ";" separates, after the tag or as the whole text."""
    tag = "<|python_tag|>"
    start = text.find(tag, begin)
    cursor = start + len(tag)
    if start < 0:
        start = cursor = _skip_space(text, begin)
        if not text.startswith("{", start) or not _mentions_call(text, start, len(text)):
            return

    while True:
        value, end = _value(text, cursor)
        call = _call(value)
        following = _skip_space(text, end)
        is_last = not text.startswith(";", following)
        cursor = end if is_last else _skip_space(text, following + 1)
        yield start, cursor, call
        if is_last or cursor == len(text):
            return
        start = cursor


def _mistral(text: str, begin: int) -> Iterator[_Found]:
    """A list of objects behind the tag, or a name and its arguments behind each tag."""
    tag = "[TOOL_CALLS]"
    start = text.find(tag, begin)
    while start >= 0:
        cursor = _skip_space(text, start + len(tag))
        if text.startswith("[", cursor):
            for found in _elements(text, start, cursor):
                yield found
                cursor = found[1]
        else:
            arguments = text.find("[ARGS]", cursor)
            if arguments < 0:
                raise _UnreadableError("neither a list nor [ARGS] follows [TOOL_CALLS]")
            name = text[cursor:arguments].partition("[CALL_ID]")[0]
            value, cursor = _value(text, arguments + len("[ARGS]"))
            yield start, cursor, _named(name, value)
        start = text.find(tag, cursor)


def _deepseek(text: str, begin: int) -> Iterator[_Found]:
    """Calls within a pair of tags: of V3 with a type and a fenced block, of V3.1 without them."""
    calls_begin, call_begin, separator = (
        f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep")
    )
    start = text.find(calls_begin, begin)
    if start < 0:
        return
    cursor = start + len(calls_begin)

    while True:
        cursor = _behind(text, cursor, call_begin)
        middle = text.find(separator, cursor)
        if middle < 0:
            raise _UnreadableError(f"{separator} is missing")
        name = text[cursor:middle]
        cursor = middle + len(separator)

        is_fenced = name.strip() == "function"
        if is_fenced:
            fence = text.find("```json", cursor)
            if fence < 0:
                raise _UnreadableError("the arguments stand in no ```json block")
            name = text[cursor:fence]
            cursor = fence + len("```json")
        value, cursor = _value(text, cursor)
        call = _named(name, value)
        if is_fenced:
            cursor = _behind(text, cursor, "```")

        cursor = _behind(text, cursor, "<｜tool▁call▁end｜>")
        yield start, cursor, call
        start = cursor
        if not text.startswith(call_begin, _skip_space(text, cursor)):
            yield start, _behind(text, cursor, "<｜tool▁calls▁end｜>"), None
            return


def _json(text: str, begin: int) -> Iterator[_Found]:
    """An object or a list, as the whole text or in fenced blocks."""
    body = _skip_space(text, begin)
    if text.startswith(("{", "["), body):
        if _mentions_call(text, body, len(text)):
            yield from _object_or_list(text, body, body)
        return

    fence = "```"
    start = text.find(fence, begin)
    while start >= 0:
        inside = start + len(fence)
        closing = text.find(fence, inside)
        end = closing if closing >= 0 else len(text)
        line = text.find("\n", inside, end)
        body = _skip_space(text, max(line, inside))
        if text.startswith(("{", "["), body) and _mentions_call(text, body, end):
            end = body
            for found in _object_or_list(text, start, body):
                yield found
                end = found[1]
            yield end, _behind(text, end, fence), None
        start = text.find(fence, _skip_space(text, end) + len(fence))


def _object_or_list(text: str, start: int, body: int) -> Iterator[_Found]:
    if text.startswith("[", body):
        yield from _elements(text, start, body)
    else:
        value, end = _value(text, body)
        yield start, end, _call(value)


def _elements(text: str, start: int, bracket: int) -> Iterator[_Found]:
    """The calls of the list that begins at `bracket`, one after the other, so that those before a
    mistake are known. The first one takes the text from `start` on.
    """
    cursor = bracket + 1
    closing = _skip_space(text, cursor)
    if text.startswith("]", closing):
        raise _UnreadableError("the list is empty")

    is_last = False
    while not is_last:
        value, end = _value(text, cursor)
        call = _call(value)
        end = _skip_space(text, end)
        is_last = text.startswith("]", end)
        if not is_last and not text.startswith(",", end):
            raise _UnreadableError("neither ',' nor ']' follows it")
        cursor = end + 1
        yield start, cursor, call
        start = cursor


def _value(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start`, behind spaces, and where it ends."""
    start = _skip_space(text, start)
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise _UnreadableError(
            f"no valid JSON ({reason}, {error.pos - start} characters after its start)"
        ) from None
    except (ValueError, RecursionError):  # a number of too many digits, brackets too deep
        raise _UnreadableError("no valid JSON (too long a number, or too many brackets)") from None


def _call(value: Any) -> Call:
    """The call that a JSON object with a name and arguments, or parameters, stands for."""
    if not isinstance(value, dict):
        raise _UnreadableError("it is no JSON object")
    key = "parameters" if "parameters" in value and "arguments" not in value else "arguments"
    if "name" not in value:
        raise _UnreadableError('it has no "name"')
    if key not in value:
        raise _UnreadableError('it has no "arguments"; {} stands for none')
    return _named(value["name"], value[key])


def _named(name: Any, arguments: Any) -> Call:
    words = name.split() if isinstance(name, str) else []
    if len(words) != 1 or len(words[0]) > _LONGEST_NAME:
        raise _UnreadableError(f"its name is no word of at most {_LONGEST_NAME} characters")

    if isinstance(arguments, str):
        written = arguments
        arguments, end = _value(written, 0)
        if _skip_space(written, end) != len(written):
            raise _UnreadableError("more than one JSON value stands in its arguments")
    if not isinstance(arguments, dict):
        raise _UnreadableError("its arguments are no JSON object")
    return words[0], arguments


def _behind(text: str, start: int, tag: str) -> int:
    """Where the text goes on behind `tag`, which stands at `start` behind spaces."""
    start = _skip_space(text, start)
    if not text.startswith(tag, start):
        raise _UnreadableError(f"{tag} is missing")
    return start + len(tag)


def _mentions_call(text: str, start: int, end: int) -> bool:
    """Whether JSON without a tag is meant as a call, and not as an answer."""
    return any(text.find(key, start, end) >= 0 for key in _CALL_KEYS)


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None, "no space matches too"
    return match.end()


def _refuse_constant(name: str) -> NoReturn:
    raise _UnreadableError(f"no valid JSON ({name} is no number of JSON)")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_OBJECT = '{"name": ..., "arguments": {...}}'
PARSERS: Mapping[str, Callable[[str], ParsedTurn]] = {
    "hermes": partial(_parse, scan=_hermes, expected=f"<tool_call>{_OBJECT}</tool_call>"),
    "llama3": partial(_parse, scan=_llama3, expected='{"name": ..., "parameters": {...}}'),
    "mistral": partial(
        _parse, scan=_mistral, expected=f"[TOOL_CALLS] [{_OBJECT}] or [TOOL_CALLS]name[ARGS]{{...}}"
    ),
    "deepseek": partial(
        _parse,
        scan=_deepseek,
        expected="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "json": partial(_parse, scan=_json, expected=_OBJECT),
}
_NAMES = ", ".join(PARSERS)
_SIGNS = {
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "llama3": ("<|python_tag|>", "ipython"),
    "hermes": ("<tool_call>",),
}
# Of formats that write XML between the tags of hermes.
_OTHER_SIGNS = ("<function=", "<arg_key>")
