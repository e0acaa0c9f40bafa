"""Reads the calls of tools out of the text of a turn, in the formats that models are trained on.

A format is a generator of calls. It goes through the text once and stops at the first call that
cannot be read. It does not know which tools there are, or what they take.
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


class _Reader:
    """Goes through a text once. What stands from `start` to `at` belongs to the next call."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text = text
        self.at = at
        self.start = at

    def skip_space(self) -> None:
        self.at += len(self._space())

    def sees(self, *signs: str) -> bool:
        """Whether one of `signs` follows, behind spaces."""
        return self.text.startswith(signs, self.at + len(self._space()))

    def take(self, sign: str) -> bool:
        """Go on behind `sign`, if it follows behind spaces."""
        found = self.sees(sign)
        if found:
            self.at += len(self._space()) + len(sign)
        return found

    def expect(self, sign: str) -> None:
        """Go on behind `sign`, which must follow."""
        if not self.take(sign):
            raise _UnreadableError(f"{sign} is missing")

    def seek(self, tag: str) -> bool:
        """Go on behind the next `tag`, with which a call begins; False if there is none."""
        found = self.text.find(tag, self.at)
        if found >= 0:
            self.start = found
            self.at = found + len(tag)
        return found >= 0

    def until(self, tag: str, problem: str) -> str:
        """Go on behind the next `tag`; the text before it. Without one, `problem` is the error."""
        begin = self.at
        end = self.text.find(tag, begin)
        if end < 0:
            raise _UnreadableError(problem)
        self.at = end + len(tag)
        return self.text[begin:end]

    def mentions_call(self, end: int) -> bool:
        """Whether JSON without a tag is meant as a call, and not as an answer."""
        return any(self.text.find(key, self.at, end) >= 0 for key in _CALL_KEYS)

    def value(self) -> Any:
        """The JSON value that follows."""
        self.skip_space()
        try:
            value, self.at = _DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            reason = error.msg.removesuffix(" at")
            raise _UnreadableError(
                f"no valid JSON ({reason}, {error.pos - self.at} characters after its start)"
            ) from None
        except (ValueError, RecursionError):  # a number of too many digits, brackets too deep
            problem = "no valid JSON (too long a number, or too many brackets)"
            raise _UnreadableError(problem) from None
        return value

    def _space(self) -> str:
        match = _SPACE.match(self.text, self.at)
        return match[0] if match is not None else ""


_Scan = Callable[[_Reader], Iterator[Call | None]]


def _parse(text: str, scan: _Scan, expected: str) -> ParsedTurn:
    """Collect what `scan` finds behind the thoughts of a turn."""
    calls: list[Call] = []
    beside: list[str] = []
    read = 0
    error = None
    thought = text.find(_THOUGHT_END)  # a thought may mention a call
    reader = _Reader(text, thought + len(_THOUGHT_END) if thought >= 0 else 0)
    reader.skip_space()
    reader.start = reader.at
    try:
        for call in scan(reader):
            if call is not None:
                calls.append(call)
            beside.append(text[read : reader.start])
            read = reader.start = reader.at
    except _UnreadableError as reason:
        error = f"call {len(calls) + 1} cannot be read: {reason}; expected {expected}"

    beside.append(text[read:])
    return ParsedTurn("".join(beside).strip(), tuple(calls), error)


def _hermes(reader: _Reader) -> Iterator[Call | None]:
    while reader.seek("<tool_call>"):
        call = _call(reader.value())
        reader.expect("</tool_call>")
        yield call


def _llama3(reader: _Reader) -> Iterator[Call | None]:
    """Objects that ";" separates, after the tag or as the whole text."""
    is_tagged = reader.seek("<|python_tag|>")
    if not is_tagged and not (reader.sees("{") and reader.mentions_call(len(reader.text))):
        return

    goes_on = True
    while goes_on:
        call = _call(reader.value())
        goes_on = reader.take(";")
        if goes_on:
            reader.skip_space()
            goes_on = reader.at < len(reader.text)
        yield call


def _mistral(reader: _Reader) -> Iterator[Call | None]:
    """A list of objects behind the tag, or a name and its arguments behind each tag."""
    while reader.seek("[TOOL_CALLS]"):
        if reader.take("["):
            yield from _elements(reader)
        else:
            written = reader.until("[ARGS]", "neither a list nor [ARGS] follows [TOOL_CALLS]")
            yield _named(written.partition("[CALL_ID]")[0], reader.value())


def _deepseek(reader: _Reader) -> Iterator[Call | None]:
    """Calls within a pair of tags: of V3 with a type and a fenced block, of V3.1 without them."""
    call_begin = "<｜tool▁call▁begin｜>"
    separator = "<｜tool▁sep｜>"
    if not reader.seek("<｜tool▁calls▁begin｜>"):
        return

    reader.expect(call_begin)
    goes_on = True
    while goes_on:
        name = reader.until(separator, f"{separator} is missing")
        is_fenced = name.strip() == "function"
        if is_fenced:
            name = reader.until("```json", "the arguments stand in no ```json block")
        call = _named(name, reader.value())
        if is_fenced:
            reader.expect("```")
        reader.expect("<｜tool▁call▁end｜>")
        yield call
        goes_on = reader.take(call_begin)
    reader.expect("<｜tool▁calls▁end｜>")
    yield None


def _json(reader: _Reader) -> Iterator[Call | None]:
    """An object or a list, as the whole text or in fenced blocks."""
    text = reader.text
    if reader.sees("{", "["):
        if reader.mentions_call(len(text)):
            yield from _object_or_list(reader)
        return

    fence = "```"
    while reader.seek(fence):
        closing = text.find(fence, reader.at)
        end = closing if closing >= 0 else len(text)
        reader.at = max(text.find("\n", reader.at, end), reader.at)
        if reader.sees("{", "[") and reader.mentions_call(end):
            yield from _object_or_list(reader)
            reader.expect(fence)
            yield None
        else:
            reader.at = end + len(fence)


def _object_or_list(reader: _Reader) -> Iterator[Call]:
    if reader.take("["):
        yield from _elements(reader)
    else:
        yield _call(reader.value())


def _elements(reader: _Reader) -> Iterator[Call]:
    """The calls of a list, one after the other, so that those before a mistake are known."""
    if reader.take("]"):
        raise _UnreadableError("the list is empty")

    is_last = False
    while not is_last:
        call = _call(reader.value())
        is_last = reader.take("]")
        if not is_last and not reader.take(","):
            raise _UnreadableError("neither ',' nor ']' follows it")
        yield call


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
    if len(words) != 1 or len(words[0]) > _LONGEST_NAME or not words[0].isprintable():
        raise _UnreadableError(f"its name is no word of at most {_LONGEST_NAME} characters")

    if isinstance(arguments, str):
        written = _Reader(arguments)
        arguments = written.value()
        written.skip_space()
        if written.at != len(written.text):
            raise _UnreadableError("more than one JSON value stands in its arguments")
    if not isinstance(arguments, dict):
        raise _UnreadableError("its arguments are no JSON object")
    return words[0], arguments


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
