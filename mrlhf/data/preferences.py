"""Responses to a prompt that people have compared, or given a number, tokenised.

It also splits rows so that no prompt is both in the training and in the held-out part. It does not
know the loss or the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.data import Overlong
from mrlhf.data.conversations import (
    encode_prompt,
    encode_response,
    message_list,
    plain_text,
    prompt_of,
    read_messages,
)
from mrlhf.data.rows import Row, of_rows, warn_of_dropped
from mrlhf.data.tokenizer import Message, Prompt, Tokenizer
from mrlhf.errors import DataError
from mrlhf.rl.names import RowKind

logger = logging.getLogger(__name__)

_MOST = 1e6
_NUMBER = (
    f"a number from -{_MOST:g} to {_MOST:g}",
    lambda value: type(value) in (int, float) and abs(value) <= _MOST,
)
_FLAG = ("true or false", lambda value: isinstance(value, bool))
_UNITS: dict[RowKind, str] = {"pairs": "pair", "rankings": "ranking", "targets": "response"}
_RESPONSE = "must be a string, or messages of which the last is the assistant's"


@dataclass(frozen=True)
class ComparedPair:
    """Two responses to one prompt."""

    better: int  # their places among the responses of some rows
    worse: int
    margin: float  # by how much the better one is to score higher
    is_tie: bool  # neither is better
    share: float  # of the loss of its row


@dataclass(frozen=True)
class PreferenceRows:
    """Tokenised rows: pairs, rankings, or single responses with numbers; see `RowKind`."""

    responses: list[list[list[int]]]  # [rows][responses]: prompt, response and eos, the best first
    prompt_lengths: list[int]  # tokens of the prompt, the first ones of each response
    margins: list[float] | None = None  # of pairs: by how much the better one is to score higher
    ties: list[bool] | None = None  # of pairs: whether neither is better; None: no pair is a tie
    # float32 [rows, columns], the numbers of single responses; NaN where a row has none
    targets: Tensor | None = None

    def __post_init__(self) -> None:
        columns = (self.prompt_lengths, self.margins, self.ties, self.targets)
        sizes = {len(self.responses), *(len(column) for column in columns if column is not None)}
        assert len(sizes) == 1, f"columns have different lengths: {sorted(sizes)}"

    def __len__(self) -> int:
        return len(self.responses)

    def compared(self, rows: Sequence[int]) -> list[ComparedPair]:
        """Each two responses of each of these rows; the places are among all of their responses."""
        pairs = []
        begin = 0
        for row in rows:
            count = len(self.responses[row])
            margin = 0.0 if self.margins is None else self.margins[row]
            is_tie = self.ties is not None and self.ties[row]
            for better, worse in combinations(range(begin, begin + count), 2):
                share = 2 / (count * (count - 1))
                pairs.append(ComparedPair(better, worse, margin, is_tie, share))
            begin += count
        return pairs

    def losses(self, rows: Sequence[int]) -> int:
        """The number of what the loss is a mean of: the rows, or the numbers that they give."""
        if self.targets is None:
            return len(rows)
        return int((~self.targets[list(rows)].isnan()).sum())

    def sizes(self, rows: Sequence[int]) -> list[int]:
        """The number of responses of each of these rows."""
        return [len(self.responses[row]) for row in rows]

    def sequences(self, rows: Sequence[int]) -> Sequences:
        """The responses of each of these rows, in turn."""
        every = [response for row in rows for response in self.responses[row]]
        prompts = [self.prompt_lengths[row] for row in rows for _ in self.responses[row]]
        return Sequences.of(every, prompts)


@dataclass(frozen=True)
class PreferenceColumns:
    """What rows hold beside the prompt."""

    kind: RowKind = "pairs"
    margin: str | None = None  # a column with a number
    tie: str | None = None  # a column with true or false
    targets: tuple[str, ...] = ()  # columns with numbers, of which a row has one or more


def encode_preferences(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    overlong: Overlong = "drop",
    columns: PreferenceColumns = PreferenceColumns(),
) -> PreferenceRows:
    """Tokenise preference rows.

    `chosen` and `rejected` are strings that answer `prompt`, or lists of chat messages of which the
    last is the assistant's. Such a list may hold the prompt itself, as in TRL. A ranking has
    `responses`, a list of strings, and a row with numbers a `response`. A row is never truncated,
    because the reward is read at eos: if a response has more than `max_length` tokens, the row is
    refused, or dropped.

    Raises:
        DataError: a row is malformed or too long, or no row is left.
    """
    read = READERS[columns.kind]
    responses: list[list[list[int]]] = []
    prompt_lengths: list[int] = []
    kept: list[Row] = []
    empty = 0
    for row in rows:
        prompt, texts = read(row)
        empty += not all(texts)
        _, prompt_ids = encode_prompt(row, prompt, tokenizer)
        encoded = [prompt_ids + encode_response(row, text, tokenizer) for text in texts]

        length = max(map(len, encoded))
        if length <= max_length:
            responses.append(encoded)
            prompt_lengths.append(len(prompt_ids))
            kept.append(row)
        elif overlong == "error":
            raise DataError(
                f"{row.where}: the {_UNITS[columns.kind]} has {length} tokens, more than "
                f"data.max_length {max_length}; raise it, or set data.overlong to drop"
            )

    if not kept:
        raise DataError(
            f"none of {len(rows)} preference {_UNITS[columns.kind]}s fits into data.max_length "
            f"{max_length}; raise it"
        )
    warn_of_dropped("sequences", len(rows) - len(kept), rows, max_length)
    if empty:
        logger.warning("a response is empty in %s", of_rows(empty, rows))

    margins = _column(kept, columns.margin, _NUMBER, "rm.margin_column")
    ties = _column(kept, columns.tie, _FLAG, "rm.tie_column")
    if columns.kind == "pairs":
        is_tie = ties or [False] * len(kept)
        decided = [pair for pair, tie in zip(responses, is_tie, strict=True) if not tie]
        _check_differences(rows, decided)
    targets = _targets(kept, columns.targets)
    return PreferenceRows(responses, prompt_lengths, margins, ties, targets)


def _check_differences(rows: Sequence[Row], responses: list[list[list[int]]]) -> None:
    """Warn of pairs that teach nothing, or the opposite of another one."""
    pairs = [(tuple(chosen), tuple(rejected)) for chosen, rejected in responses]
    equal = sum(chosen == rejected for chosen, rejected in pairs)
    if pairs and equal == len(pairs):
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

    read = prompt or prompt_reader("pairs")
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


def _column(
    rows: Sequence[Row], column: str | None, kind: tuple[str, Callable[[Any], bool]], key: str
) -> list[Any] | None:
    """The values of a column, which `key` names; DataError if one is missing or of another kind."""
    return None if column is None else [_value(row, column, kind, key) for row in rows]


def _value(row: Row, column: str, kind: tuple[str, Callable[[Any], bool]], key: str) -> Any:
    words, fits = kind
    value = row.require(column)
    if not fits(value):
        raise DataError(
            f"{row.where}: {column!r} must be {words}, since {key} names it; found {value!r:.40}"
        )
    return value


def _targets(rows: Sequence[Row], names: Sequence[str]) -> Tensor | None:
    """The numbers of each row; DataError if a row has none, or what is no number."""
    if not names:
        return None
    table = []
    for row in rows:
        given = [name for name in names if row.fields.get(name) is not None] or names[:1]
        numbers = {name: _value(row, name, _NUMBER, "rm.target_column") for name in given}
        table.append([numbers.get(name, math.nan) for name in names])
    return torch.tensor(table, dtype=torch.float32, device="cpu")


def _ranking(row: Row) -> tuple[Prompt, list[str]]:
    """The prompt and the responses of a ranking; DataError if malformed."""
    texts = row.require("responses")
    are_texts = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not are_texts or len(texts) < 2:
        raise DataError(
            f"{row.where}: 'responses' must be a list of at least two strings, the best first, "
            f"since rm.rows is rankings; found {texts!r:.40}"
        )
    return prompt_of(row), [plain_text(row, "responses", text) for text in texts]


def _single(row: Row) -> tuple[Prompt, list[str]]:
    """The prompt and the only response of a row; DataError if malformed."""
    return prompt_of(row), [plain_text(row, "response", row.text("response"))]


def _pair(row: Row) -> tuple[Prompt, list[str]]:
    """The prompt, the chosen and the rejected response of a row; DataError if malformed."""
    chosen = row.require("chosen")
    rejected = row.require("rejected")
    if isinstance(chosen, str) and isinstance(rejected, str):
        plain_text(row, "chosen", chosen)
        plain_text(row, "rejected", rejected)
        return prompt_of(row), [chosen, rejected]

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
        return prompt_of(row), [better, worse]
    context = message_list(row, "chosen", context)
    prompt = row.fields.get("prompt")
    if isinstance(prompt, list) and message_list(row, "prompt", prompt) != context:
        raise DataError(
            f'{row.where}: the messages before the last of "chosen" are not those of "prompt"'
        )
    return context, [better, worse]


def _conversation(row: Row, name: str, messages: Any) -> tuple[list[Message], str]:
    """The messages before the last one, and the text of the last one."""
    *context, last = read_messages(row, name, messages) or [{}]
    if last.get("role") != "assistant" or "tool_calls" in last:
        raise DataError(f"{row.where}: {name!r} {_RESPONSE}")
    return context, last["content"]


READERS: dict[RowKind, Callable[[Row], tuple[Prompt, list[str]]]] = {
    "pairs": _pair,
    "rankings": _ranking,
    "targets": _single,
}


def prompt_reader(kind: RowKind) -> Callable[[Row], object]:
    """What reads the prompt of a row of this kind."""
    return lambda row: READERS[kind](row)[0]
