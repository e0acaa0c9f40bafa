"""Stored responses with their rewards, from which a critic learns: dumps of a run, or JSON lines.

It knows which tokens count and what each of them earns. It does not know returns, nor the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mrlhf.config.data import Overlong
from mrlhf.data.conversations import encode_prompt, encode_response, plain_text, prompt_of
from mrlhf.data.rows import Row, warn_of_dropped
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import DataError


@dataclass(frozen=True)
class ScoredResponse:
    """A response whose tokens have rewards."""

    token_ids: list[int]  # prompt and response [seq_len]
    drew: list[bool]  # whether the policy drew each token, and so it counts [response_len]
    rewards: list[float]  # of each token, any KL subtracted [response_len]


def encode_rollouts(
    rows: Sequence[Row], tokenizer: Tokenizer, *, max_length: int, overlong: Overlong = "error"
) -> list[ScoredResponse]:
    """Read rows of stored rollouts.

    A row of a parquet dump has tokens and the reward of each. Another has a `prompt` (a string or
    chat messages), a `response`, or else its `token_ids`, and a `score`, or else a `reward`, which
    the last token earns. That is eos, unless the response was cut off. A row of more than
    `max_length` tokens is refused, or dropped and counted in the log; one of which no policy drew a
    token, as of an episode that failed, is left out.

    Raises:
        DataError: a row is malformed or too long, or no row is left.
    """
    read = [(row, _read(row, tokenizer)) for row in rows]
    for row, response in read:
        length, highest = len(response.token_ids), max(response.token_ids)
        if length > max_length and overlong == "error":
            raise DataError(
                f"{row.where}: prompt and response have {length} tokens, more than "
                f"data.max_length {max_length}; raise it, or set data.overlong to drop"
            )
        if highest > tokenizer.highest_id:
            raise DataError(
                f"{row.where}: token {highest} is not in the tokenizer, whose ids go up to "
                f"{tokenizer.highest_id}; give that of the run of these rollouts"
            )
    fitting = [response for _, response in read if len(response.token_ids) <= max_length]
    warn_of_dropped("prompts and responses", len(rows) - len(fitting), rows, max_length)
    kept = [response for response in fitting if any(response.drew)]
    if not kept:
        raise DataError(
            f"no row of {rows[0].file} fits into data.max_length {max_length} and has a token that "
            "a policy drew; raise it, or give other rows"
        )
    return kept


def _read(row: Row, tokenizer: Tokenizer) -> ScoredResponse:
    """One row; its tokens are taken as they are if it has them."""
    fields = row.fields
    if fields.get("context_begins") or ("turns" in fields and "loss_mask" not in fields):
        raise DataError(
            f"{row.where}: the response has several turns or contexts; of turns a critic needs the "
            "tokens, as rollout.dump_format parquet has them, and contexts cannot be read"
        )
    for name in ("prompt_ids", "response_ids", "token_ids", "loss_mask"):
        given = fields.get(name) or []
        if not isinstance(given, list) or any(type(x) not in (int, bool) or x < 0 for x in given):
            raise DataError(f"{row.where}: {name} is no list of whole numbers: {given!r:.40}")
    prompt = fields.get("prompt_ids") or encode_prompt(row, prompt_of(row), tokenizer)[1]
    response = fields.get("response_ids") or fields.get("token_ids")
    if response is None:
        text = plain_text(row, "response", row.text("response"))
        response = encode_response(row, text, tokenizer)
        was_cut = fields.get("stopped") is False or fields.get("finish_reason") == "length"
        response = response[:-1] if was_cut else response

    rewards = fields.get("reward")
    if not isinstance(rewards, list):
        score = row.require("score") if rewards is None else rewards
        rewards = [0.0] * (len(response) - 1) + [score]
    drew = list(map(bool, fields.get("loss_mask") or [True] * len(response)))
    if not all(type(reward) in (int, float) and math.isfinite(reward) for reward in rewards):
        raise DataError(f"{row.where}: score or reward is no finite number: {rewards[-1]!r:.40}")
    if not len(response) == len(rewards) == len(drew):
        raise DataError(f"{row.where}: the response has no token, or not a reward for each")
    return ScoredResponse([*prompt, *response], drew, _earned(rewards, drew))


def _earned(rewards: list[float], drew: list[bool]) -> list[float]:
    """The rewards, each at the last token up to it that counts, since targets skip the others."""
    earned = [0.0] * len(rewards)
    lasts = accumulate((at if counts else 0 for at, counts in enumerate(drew)), max)
    for last, reward in zip(lasts, rewards, strict=True):
        earned[last] += reward
    return earned
