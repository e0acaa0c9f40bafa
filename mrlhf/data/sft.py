"""Prompts with the responses to imitate, tokenised for supervised fine-tuning.

It knows which tokens the loss is over. It does not know the loss itself or the model.
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
        loss_mask: 1 on the response and eos, which are to be learned, else 0 [seq_len].
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
    """Tokenise rows for supervised fine-tuning.

    Args:
        rows: rows with `prompt` (a string or chat messages) and `response`; `answer` is used if a
            row has no `response`.
        tokenizer: encodes them.
        max_length: the most tokens that prompt, response and eos may have together.
        overlong: refuse a longer row, or drop it and log how many.
        chat: put plain string prompts through the chat template too.

    Raises:
        DataError: a row is malformed or too long, or no row is left.
    """
    examples: list[SftExample] = []
    for row in rows:
        _, prompt = encode_prompt(row, prompt_of(row), tokenizer, chat)
        use_answer = "response" not in row.fields and "answer" in row.fields
        response = tokenizer.encode_response(row.text("answer" if use_answer else "response"))

        length = len(prompt) + len(response)
        if length <= max_length:
            examples.append(SftExample(prompt + response, [0] * len(prompt) + [1] * len(response)))
        elif overlong == "error":
            raise DataError(
                f"{row.where}: prompt and response have {length} tokens, more than max_length "
                f"{max_length}; raise it, or drop long rows"
            )

    if not examples:
        raise DataError(f"none of {len(rows)} rows fits into max_length {max_length}; raise it")
    dropped = len(rows) - len(examples)
    if dropped:
        logger.warning(
            "dropped %d of %d rows longer than %d tokens", dropped, len(rows), max_length
        )
    return examples
