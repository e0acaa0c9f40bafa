"""Warns of text that a tokenizer does not know: it becomes <unk>, or nothing at all.

A model cannot learn from such text, and nothing else would show that it is missing. `what` names
the data in warnings. This file does not know where the text comes from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from mrlhf.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_TOLERATED_UNKNOWN_SHARE = 0.01  # of the tokens
_TOLERATED_LOST_SHARE = 0.05  # of the characters; some tokenizers compose them and drop accents
_COMPARED_TEXTS = 1000


def warn_of_unknown_tokens(
    sequences: Iterable[Sequence[int]], tokenizer: Tokenizer, what: str
) -> None:
    """Warn if more than a small share of the tokens is <unk>."""
    if tokenizer.unk_id is None:
        return
    total = 0
    unknown = 0
    for tokens in sequences:
        total += len(tokens)
        unknown += list(tokens).count(tokenizer.unk_id)

    if unknown > _TOLERATED_UNKNOWN_SHARE * total:
        logger.warning(
            "%.3g %% of the tokens of %s are %s: the tokenizer does not know their text, and the "
            "model sees the same token for all of it",
            100 * unknown / total,
            what,
            tokenizer.decode([tokenizer.unk_id], skip_special_tokens=False).strip(),
        )


def warn_of_lost_characters(
    texts: Sequence[str], sequences: Sequence[Sequence[int]], tokenizer: Tokenizer, what: str
) -> None:
    """Warn if the tokens of some texts say less than the texts, because characters have no token.

    Some tokenizers leave out what they do not know. Only the first texts are compared. Spaces are
    not counted, because many decoders add or remove some.
    """
    if tokenizer.unk_id is not None:
        return
    total = 0
    kept = 0
    for text, tokens in zip(texts[:_COMPARED_TEXTS], sequences[:_COMPARED_TEXTS], strict=True):
        total += _visible(text)
        kept += min(_visible(text), _visible(tokenizer.decode(tokens, skip_special_tokens=False)))

    if total - kept > _TOLERATED_LOST_SHARE * total:
        logger.warning(
            "%.3g %% of the characters of %s have no token and are left out; use a tokenizer that "
            "knows them",
            100 * (total - kept) / total,
            what,
        )


def _visible(text: str) -> int:
    """The number of characters that are not white space."""
    return sum(not character.isspace() for character in text)
