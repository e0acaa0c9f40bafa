"""Pairs of a better and a worse response to one prompt, tokenised.

It also splits rows so that no prompt is both in the training and in the held-out part. It does not
know the loss or the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mrlhf.batch import Sequences
from mrlhf.data.conversations import (
    encode_prompt,
    encode_response,
    message_list,
    plain_text,
    prompt_of,
    read_messages,
)
from mrlhf.data.prompts import Overlong
from mrlhf.data.rows import Row, of_rows, warn_of_dropped
from mrlhf.data.tokenizer import Message, Prompt, Tokenizer
from mrlhf.errors import DataError

logger = logging.getLogger(__name__)

_MOST_MARGIN = 1e6
_RESPONSE = "must be a string, or messages of which the last is the assistant's"


@dataclass(frozen=True)
class PreferencePairs:
    """Tokenised pairs; entry i of both lists answers the same prompt."""

    chosen_ids: list[list[int]]  # prompt, better response and eos
    rejected_ids: list[list[int]]  # prompt, worse response and eos
    prompt_lengths: list[int]  # tokens of the prompt, the first ones of both sides
    dropped: int  # number of pairs left out because one side was too long
    margins: list[float] | None = None  # by how much the better side is to score higher

    def __post_init__(self) -> None:
        sizes = {len(self.chosen_ids), len(self.rejected_ids), len(self.prompt_lengths)}
        sizes |= set() if self.margins is None else {len(self.margins)}
        assert len(sizes) == 1, f"pairs must have two sides and a prompt: {sorted(sizes)}"

    def __len__(self) -> int:
        return len(self.chosen_ids)

    def sequences(self, rows: Sequence[int]) -> Sequences:
        """The chosen and the rejected side of each of these pairs, in turn."""
        sides = []
        prompt_lengths = []
        for row in rows:
            sides += [self.chosen_ids[row], self.rejected_ids[row]]
            prompt_lengths += 2 * [self.prompt_lengths[row]]
        return Sequences.of(sides, prompt_lengths)


def encode_preferences(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    overlong: Overlong = "drop",
    margin_column: str | None = None,
) -> PreferencePairs:
    """Tokenise preference rows.

    `chosen` and `rejected` are strings that answer `prompt`, or lists of chat messages of which the
    last is the assistant's. Such a list may hold the prompt itself, as in TRL. A pair is never
    truncated, because the reward is read at eos: if a side has more than `max_length` tokens, the
    pair is refused, or dropped and counted. Each row has a number in `margin_column`, if one is
    given.

    Raises:
        DataError: a row is malformed or too long, or no row is left.
    """
    chosen_ids: list[list[int]] = []
    rejected_ids: list[list[int]] = []
    prompt_lengths: list[int] = []
    margins: list[float] = []
    empty = 0
    for row in rows:
        prompt, chosen, rejected = _parts(row)
        empty += not chosen or not rejected
        _, prompt_ids = encode_prompt(row, prompt, tokenizer)
        better = prompt_ids + encode_response(row, chosen, tokenizer)
        worse = prompt_ids + encode_response(row, rejected, tokenizer)

        length = max(len(better), len(worse))
        if length <= max_length:
            chosen_ids.append(better)
            rejected_ids.append(worse)
            prompt_lengths.append(len(prompt_ids))
            if margin_column is not None:
                margins.append(_margin(row, margin_column))
        elif overlong == "error":
            raise DataError(
                f"{row.where}: the pair has {length} tokens, more than data.max_length "
                f"{max_length}; raise it, or set data.overlong to drop"
            )

    dropped = len(rows) - len(chosen_ids)
    if not chosen_ids:
        raise DataError(
            f"none of {len(rows)} preference pairs fits into data.max_length {max_length}; raise it"
        )
    warn_of_dropped("sequences", dropped, rows, max_length)
    if empty:
        logger.warning("'chosen' or 'rejected' is empty in %s", of_rows(empty, rows))
    _check_differences(rows, chosen_ids, rejected_ids)
    of_pairs = None if margin_column is None else margins
    return PreferencePairs(chosen_ids, rejected_ids, prompt_lengths, dropped, of_pairs)


def _check_differences(
    rows: Sequence[Row], chosen_ids: list[list[int]], rejected_ids: list[list[int]]
) -> None:
    """Warn of pairs that teach nothing, or the opposite of another one."""
    pairs = list(zip(map(tuple, chosen_ids), map(tuple, rejected_ids), strict=True))
    equal = sum(chosen == rejected for chosen, rejected in pairs)
    if equal == len(pairs):
        raise DataError(
            f"{rows[0].where}: 'chosen' and 'rejected' are the same, and so in all {equal} pairs; "
            "there is nothing to learn from them"
        )
    if equal:
        logger.warning(
            "'chosen' and 'rejected' have the same tokens in %s; there is nothing to learn from "
            "them, and they count as wrong in the accuracy",
            of_rows(equal, rows),
        )

    known = set(pairs)
    opposite = sum((rejected, chosen) in known for chosen, rejected in pairs) - equal
    if opposite:
        logger.warning(
            "the pair stands in another row with 'chosen' and 'rejected' the other way round in "
            "%s; such pairs cancel out",
            of_rows(opposite, rows),
        )
    if len(known) < len(pairs):
        logger.info("%s repeat the pair of an earlier row", of_rows(len(pairs) - len(known), rows))


def split_by_prompt(
    rows: Sequence[Row],
    held_out_fraction: float,
    seed: int,
    prompt: Callable[[Row], object] | None = None,
) -> tuple[list[Row], list[Row]]:
    """Split rows into training and held-out ones, all rows of a prompt on the same side.

    The fraction is of the distinct prompts, rounded. The choice depends on the seed and the
    prompts, not on the order of the rows. `prompt` is that of a row; None: that of a pair. A
    DataError says that it leaves nothing to train on.
    """
    if not 0.0 <= held_out_fraction < 1.0:
        raise DataError(f"data.held_out_fraction {held_out_fraction} is not in [0, 1)")

    read = prompt or (lambda row: _parts(row)[0])
    keys = [json.dumps(read(row), sort_keys=True) for row in rows]
    ranked = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    held_out = set(ranked[: round(held_out_fraction * len(ranked))])
    if len(held_out) == len(ranked):
        raise DataError(
            f"data.held_out_fraction {held_out_fraction} of {len(ranked)} prompts leaves none to "
            "train on; lower it"
        )

    sides: tuple[list[Row], list[Row]] = ([], [])
    for row, key in zip(rows, keys, strict=True):
        sides[key in held_out].append(row)
    return sides


def _margin(row: Row, column: str) -> float:
    """The number in `column`; DataError if it is missing, not a number, or too large."""
    value = row.require(column)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and abs(value) <= _MOST_MARGIN:
        return float(value)
    raise DataError(
        f"{row.where}: {column!r} must be a number from -{_MOST_MARGIN:g} to {_MOST_MARGIN:g}, "
        f"since rm.margin_column names it; found {value!r:.40}"
    )


def _parts(row: Row) -> tuple[Prompt, str, str]:
    """The prompt, the chosen and the rejected response of a row; DataError if malformed."""
    chosen = row.require("chosen")
    rejected = row.require("rejected")
    if isinstance(chosen, str) and isinstance(rejected, str):
        plain_text(row, "chosen", chosen)
        plain_text(row, "rejected", rejected)
        return prompt_of(row), chosen, rejected

    for name, response in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(response, str | list):
            raise DataError(f"{row.where}: {name!r} {_RESPONSE}")
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise DataError(
            f"{row.where}: one of 'chosen' and 'rejected' is a string and the other a list; write "
            "both as strings, or both as messages"
        )

    context, better = _conversation(row, "chosen", chosen)
    other_context, worse = _conversation(row, "rejected", rejected)
    if context != other_context:
        raise DataError(
            f'{row.where}: "chosen" and "rejected" must differ in the last message only'
        )

    if not context:
        return prompt_of(row), better, worse
    context = message_list(row, "chosen", context)
    prompt = row.fields.get("prompt")
    if isinstance(prompt, list) and message_list(row, "prompt", prompt) != context:
        raise DataError(
            f'{row.where}: the messages before the last of "chosen" are not those of "prompt"'
        )
    return context, better, worse


def _conversation(row: Row, name: str, messages: Any) -> tuple[list[Message], str]:
    """The messages before the last one, and the text of the last one."""
    *context, last = read_messages(row, name, messages) or [{}]
    if last.get("role") != "assistant" or "tool_calls" in last:
        raise DataError(f"{row.where}: {name!r} {_RESPONSE}")
    return context, last["content"]
