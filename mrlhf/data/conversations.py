"""Reads the prompt of a row, a string or a list of chat messages, and checks it.

It knows which messages make sense as a prompt. It does not know what a row is used for.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mrlhf.data.rows import Row
from mrlhf.data.tokenizer import Message, Prompt, Tokenizer
from mrlhf.errors import DataError
from mrlhf.messages import read_message, refuse_media, refuse_messages_as_text

ROLES = ("system", "developer", "user", "assistant", "tool")
ReadT = TypeVar("ReadT")
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
    return plain_text(row, "prompt", prompt)


def plain_text(row: Row, column: str, text: str) -> str:
    """The text of a column; DataError if it is meant as chat messages."""
    _named(row, repr(column), refuse_messages_as_text, text)
    return text


def read_messages(row: Row, column: str, messages: list[Any]) -> list[Message]:
    """Each message with a string as its content; DataError if one has no role or no text."""
    return [
        _named(row, f"message {number} of {column!r}", read_message, message)
        for number, message in enumerate(messages, start=1)
    ]


def message_list(row: Row, column: str, messages: list[Any]) -> list[Message]:
    """The messages that a response follows, read.

    A DataError says what is wrong with one of them, that all texts are empty, or that the last
    message is the assistant's.
    """
    if not messages:
        raise DataError(f"{row.where}: {column!r} is an empty list; give at least one message")
    checked = read_messages(row, column, messages)
    if not any(message["content"] for message in checked):
        raise DataError(f"{row.where}: all messages of {column!r} are empty; remove the row")
    if checked[-1]["role"] == "assistant":
        raise DataError(
            f"{row.where}: the last message of {column!r} is the assistant's, which leaves nothing "
            "to answer; end with another role's"
        )
    return checked


def _named(row: Row, name: str, read: Callable[[Any], ReadT], value: Any) -> ReadT:
    """The result of `read` for a value of the row; its DataErrors follow row and name."""
    try:
        return read(value)
    except DataError as error:
        raise DataError(f"{row.where}: {name} {error}") from None


def encode_prompt(
    row: Row, prompt: Prompt, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, list[int]]:
    """Text and tokens of `prompt`, which shows `tools`; error messages name `row`.

    A DataError says that there is no token, that a message has a role that neither we nor the chat
    template know, or that the template fails.
    """
    _named(row, "the row", refuse_media, row.fields)
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
