"""Reads chat messages in the forms in which data files and users' functions hold them.

It does not know templates, nor which messages make sense as a prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mrlhf.errors import DataError

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_QUOTE = r"\\*['\"]"
_KEY = rf"{_QUOTE}(?:{{}}){_QUOTE}\s*:\s*"
_ROLE = rf"{_QUOTE}(?:system|developer|user|assistant|tool|human|gpt){_QUOTE}"
_SPEAKER = _KEY.format("role|from") + _ROLE
_CONTENT = _KEY.format("content|value")
# As JSON, as Python or NumPy writes it, or encoded twice.
_MESSAGES_AS_TEXT = re.compile(
    rf"[\s\"']*(?:array\(\s*)?\[?\s*\{{(?=.*?{_SPEAKER})(?=.*?{_CONTENT})", re.DOTALL
)
_ARGUMENTS = ("arguments", "parameters", "input")  # what calls name them
_LARGEST_WHOLE = 2.0**53


def read_message(message: Any) -> dict[str, Any]:
    """The message with its text as `content`; DataError, to be read after its name."""
    if not isinstance(message, Mapping):
        raise DataError(
            f'must be an object with "role" and "content", found {type(message).__name__}'
        )
    read = {key: value for key, value in message.items() if value is not None}
    calls = read.pop("tool_calls", None) or []
    for field in ("role", *([] if calls else ["content"])):
        if field not in read:
            hint = "" if "from" not in read else '; write "role" (user, assistant) and "content"'
            raise DataError(f'has no "{field}"; it has {sorted(filter(read.get, read))}{hint}')
    if not isinstance(read["role"], str) or not read["role"]:
        raise DataError(f'must have a name as "role", found {read["role"]!r}')
    if "function_call" in read or read["role"] == "function":
        raise DataError('holds a "function_call"; write "tool_calls", and role "tool" for results')
    refuse_media(read)
    if not isinstance(calls, (list, tuple)):
        raise DataError(f'must have a list as "tool_calls", found {type(calls).__name__}')

    content = read.get("content", "")
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(part["text"] for part in content)
    elif not isinstance(content, str):
        raise DataError(
            'must have text as "content": a string, or a list of {"type": "text", "text"} objects'
        )
    return {**read, "content": content} | ({"tool_calls": list(map(_call, calls))} if calls else {})


def refuse_media(fields: Mapping[str, Any]) -> None:
    """DataError if a row or a message holds images, sounds or videos."""
    for key in _MEDIA:
        if fields.get(key):
            raise DataError(f"holds {key!r}, which no model here reads; leave them out")


def refuse_messages_as_text(text: str) -> None:
    """DataError if a text is meant as chat messages, as exports of tables write them."""
    if _MESSAGES_AS_TEXT.match(text):
        raise DataError("is a text that holds chat messages; write them as a list of objects")


def as_templates_show(value: Any) -> Any:
    """The value with whole numbers as such: parquet makes 1 a 1.0 if another row has 0.5."""
    if isinstance(value, Mapping):
        return {key: as_templates_show(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(as_templates_show, value))
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_WHOLE
    return int(value) if is_whole else value


def _call(call: Any) -> dict[str, Any]:
    """A call as templates take it; its arguments may be text, as in the API of OpenAI."""
    given = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise DataError('has a call that is no {"function": {"name", "arguments"}}')
    key = next((key for key in _ARGUMENTS if given.get(key) is not None), "")
    arguments = given.get(key, "")
    if arguments == "":
        arguments = {}
    try:
        is_object = isinstance(arguments, Mapping) or isinstance(json.loads(arguments), dict)
    except (TypeError, ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise DataError(f"has a call of {given['name']!r} whose arguments are no JSON object")

    function = {"name": given["name"], "arguments": as_templates_show(arguments)}
    if "function" in call:
        others = {name: value for name, value in given.items() if name != key}
        return {**call, "function": {**others, **function}}
    return {"type": "function", "function": function} | {k: call[k] for k in ("id",) if k in call}


def _is_text(part: Any) -> bool:
    """Whether an entry of a message's content is text, and not an image or a sound."""
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)
