"""Prompts with the responses to imitate, tokenised for supervised fine-tuning.

Does not know the model or the loss, only which tokens the loss is over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mrlhf.data.prompts import Overlong, encode_prompt, prompt_of
from mrlhf.data.rows import Row
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import DataError

__all__ = ["SftExample", "encode_sft"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftExample:
    """One training sequence.

    Attributes:
        token_ids: prompt, response and eos [seq_len].
        loss_mask: 1 on the tokens to learn, the response and eos, else 0 [seq_len].
    """

    token_ids: list[int]
    loss_mask: list[int]


def encode_sft(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    overlong: Overlong = "error",
    chat: bool = False,
) -> list[SftExample]:
    """Tokenise rows with `prompt` (string or chat messages) and `response`, or `answer` where there
    is no response.

    Args:
        rows: the rows.
        tokenizer: encodes them.
        max_length: most tokens of prompt, response and eos together.
        overlong: refuse a longer row, or drop it and log how many.
        chat: put plain string prompts through the chat template too.

    Raises:
        DataError: a row is malformed or too long, or none is left.
    """
    examples: list[SftExample] = []
    for row in rows:
        prompt = encode_prompt(row, prompt_of(row), tokenizer, chat)[1]
        response_column = (
            "response" if "response" in row.fields or "answer" not in row.fields else "answer"
        )
        response = tokenizer.encode_response(row.text(response_column))
        length = len(prompt) + len(response)
        if length <= max_length:
            examples.append(SftExample(prompt + response, [0] * len(prompt) + [1] * len(response)))
        elif overlong == "error":
            raise DataError(
                f"{row.where}: prompt and response have {length} tokens, more than max_length {max_length}; "
                "raise it, or drop long rows"
            )
    if not examples:
        raise DataError(f"none of {len(rows)} rows fits into max_length {max_length}; raise it")
    if len(examples) < len(rows):
        logger.warning(
            "dropped %d of %d rows longer than %d tokens",
            len(rows) - len(examples),
            len(rows),
            max_length,
        )
    return examples
