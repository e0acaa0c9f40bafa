"""Prompts with the responses to imitate, tokenised for supervised fine-tuning.

It knows which tokens the loss is over. It does not know the loss itself or the model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mrlhf.config.data import Overlong
from mrlhf.data.conversations import encode_prompt, encode_response, plain_text, prompt_of
from mrlhf.data.rows import Row, of_rows, warn_of_dropped
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import DataError
from mrlhf.messages import as_templates_show

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftExample:
    """One training sequence."""

    token_ids: list[int]  # prompt, response and eos [seq_len]
    loss_mask: list[int]  # 1 on the response and eos, which are to be learned, else 0 [seq_len]


def encode_sft(
    rows: Sequence[Row], tokenizer: Tokenizer, *, max_length: int, overlong: Overlong = "error"
) -> list[SftExample]:
    """Tokenise rows for supervised fine-tuning.

    A row has a `prompt` (a string or chat messages) and a `response`, or else an `answer`. It may
    have `tools`, the JSON schemas of functions that the prompt shows. If prompt, response and eos
    are more than `max_length` tokens, the row is refused, or dropped and counted in the log.

    Raises:
        DataError: a row is malformed or too long, or no row is left.
    """
    examples: list[SftExample] = []
    empty = 0
    for row in rows:
        _, prompt = encode_prompt(row, prompt_of(row), tokenizer, _tools(row))
        response = encode_response(row, _response(row), tokenizer)
        empty += len(response) == 1

        length = len(prompt) + len(response)
        if length <= max_length:
            examples.append(SftExample(prompt + response, [0] * len(prompt) + [1] * len(response)))
        elif overlong == "error":
            raise DataError(
                f"{row.where}: prompt and response have {length} tokens, more than "
                f"data.max_length {max_length}; raise it, or set data.overlong to drop"
            )

    if not examples:
        raise DataError(
            f"none of {len(rows)} rows fits into data.max_length {max_length}; raise it"
        )
    warn_of_dropped("prompts and responses", len(rows) - len(examples), rows, max_length)
    _check_responses(rows, empty)
    copies = len(examples) - len({tuple(example.token_ids) for example in examples})
    if copies:
        logger.info("%s repeat prompt and response of an earlier row", of_rows(copies, rows))
    return examples


def _tools(row: Row) -> list[dict[str, Any]]:
    """The tools of a row; DataError if they are no list of objects, and no JSON text of one."""
    tools = as_templates_show(row.fields.get("tools") or [])
    with suppress(ValueError):
        tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f'{row.where}: "tools" must be a list of JSON schemas of functions')
    return tools


def _response(row: Row) -> str:
    """The text to imitate."""
    if row.fields.get("response") is None and row.fields.get("answer") is not None:
        return plain_text(row, "answer", row.text("answer"))
    return plain_text(row, "response", row.text("response"))


def _check_responses(rows: Sequence[Row], empty: int) -> None:
    """Refuse rows of which none has a response; warn if some have none."""
    if empty == len(rows):
        raise DataError(
            f"{rows[0].where}: the response is empty, and so in all {len(rows)} rows; give the "
            "text to imitate as 'response'"
        )
    if empty:
        logger.warning("the response is empty in %s; only its end is learned", of_rows(empty, rows))
