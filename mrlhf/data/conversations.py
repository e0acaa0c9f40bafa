"""Reads the prompt of a row, a string or a list of chat messages, and checks it.

It knows which messages make sense as a prompt. It does not know what a row is used for.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from mrlhf.data.rows import Row
from mrlhf.data.tokenizer import Message, Prompt, Tokenizer
from mrlhf.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant"}


def prompt_of(row: Row) -> Prompt:
    """The row's prompt, a string or chat messages; DataError if there is nothing to answer."""
    prompt = row.require("prompt")
    if isinstance(prompt, list):
        return message_list(row, "prompt", prompt)
    if not isinstance(prompt, str):
        raise DataError(
            f'{row.where}: "prompt" must be a string or a list of {{"role", "content"}} messages, '
            f"found {type(prompt).__name__}"
        )
    if not prompt:
        raise DataError(f"{row.where}: the prompt is empty; remove the row")
    return prompt


def message_list(row: Row, column: str, messages: list[Any]) -> list[Message]:
    """The messages that a response follows, each with a string as its content.

    A DataError says that one of them has no role or no text, that all texts are empty, or that the
    last message is the assistant's.
    """
    if not messages:
        raise DataError(f"{row.where}: {column!r} is an empty list; give at least one message")
    for number, message in enumerate(messages, start=1):
        problem = _problem(message)
        if problem:
            raise DataError(f"{row.where}: message {number} of {column!r} {problem}")

    # Many templates would write a list of parts as Python writes a list.
    checked: list[Message] = []
    for message in messages:
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        checked.append({**message, "content": text})

    if not any(message["content"] for message in checked):
        raise DataError(f"{row.where}: all messages of {column!r} are empty; remove the row")
    if checked[-1]["role"] == "assistant":
        raise DataError(
            f"{row.where}: the last message of {column!r} is the assistant's, which leaves nothing "
            "to answer; end with another role's"
        )
    return checked


def encode_prompt(
    row: Row, prompt: Prompt, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, list[int]]:
    """Text and tokens of `prompt`, which shows `tools`; error messages name `row`.

    A DataError says that there is no token, that a message has a role that neither we nor the chat
    template know, or that the template fails.
    """
    try:
        if not isinstance(prompt, str) and tokenizer.has_chat_template:
            _check_roles(prompt, tokenizer)
        text, token_ids = tokenizer.encode_prompt(prompt, tools)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
    if not token_ids:
        raise DataError(
            f"{row.where}: the prompt has no tokens: the tokenizer makes none of {text[:80]!r}; "
            "remove the row, or use a tokenizer that knows its characters"
        )
    return text, token_ids


def encode_response(row: Row, text: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens of a response and eos; error messages name `row`, where it comes from."""
    try:
        return tokenizer.encode_response(text)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error


def _problem(message: Any) -> str | None:
    """The fault of one message of a list, or None."""
    if not isinstance(message, dict):
        return f'must be an object with "role" and "content", found {type(message).__name__}'

    for field in ("role", "content"):
        if message.get(field) is None:
            return f'has no "{field}"; it has {sorted(key for key in message if message[key])}'
    if not isinstance(message["role"], str) or not message["role"]:
        return f'must have a name as "role", found {message["role"]!r}'

    content = message["content"]
    if isinstance(content, str) or (isinstance(content, list) and all(map(_is_text, content))):
        return None
    return 'must have text as "content": a string, or a list of {"type": "text", "text"} objects'


def _is_text(part: Any) -> bool:
    """Whether an entry of a message's content is text, and not an image or a sound."""
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _check_roles(messages: Sequence[Message], tokenizer: Tokenizer) -> None:
    """Refuse a role that is neither a usual one nor named in the chat template."""
    for message in messages:
        role = message["role"]
        if role in ROLES or role in tokenizer.chat_template:
            continue

        near = difflib.get_close_matches(role.lower(), ROLES, n=1)
        meant = _OTHER_NAMES.get(role.lower(), near[0] if near else None)
        hint = f"did you mean {meant!r}?" if meant else f"use one of {', '.join(ROLES)}"
        raise DataError(f"a message has the role {role!r}, which the chat template lacks; {hint}")
