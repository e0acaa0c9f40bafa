"""Conditions between the tokenizer, the vocabularies of the models, and the end of a response.

It computes with the tokenizer's ids and the sizes of vocabularies, and knows no files and no keys
but those of `rollout`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import ConfigError

logger = logging.getLogger(__name__)

# Models round their rows up, or reserve some; more rows without a token than this are unusual.
_USUAL_SHARE = 0.1
_USUAL_COUNT = 1024
# Tokens that a vocabulary keeps free for its users.
_RESERVED = re.compile(r"reserved|unused|control|extra|dummy", re.IGNORECASE)


@dataclass(frozen=True)
class Endings:
    """The ends of a response, besides the longest length."""

    token_ids: tuple[int, ...]  # it ends after any of these tokens
    strings: tuple[str, ...]  # and after the token with which its text contains any of these


def check_vocabularies(
    vocab_sizes: Mapping[str, int], highest_id: int, equal: Sequence[str] = ()
) -> None:
    """Refuse models that lack tokens of the tokenizer.

    Args:
        vocab_sizes: rows of each role's embedding.
        highest_id: the tokenizer's highest token id; ids below it may be missing.
        equal: roles whose whole distributions are compared, token by token.

    Raises:
        ConfigError: one line for each mistake.
    """
    problems = []
    needed = highest_id + 1
    short = {name: size for name, size in vocab_sizes.items() if size < needed}
    if short:
        sizes = ", ".join(f"{name}'s vocab_size is {size}" for name, size in short.items())
        problems.append(
            f"the tokenizer's token ids go up to {highest_id}, and {sizes}; use the tokenizer that "
            f"belongs to the model, or a model with vocab_size >= {needed}"
        )

    compared = {name: vocab_sizes[name] for name in equal if name in vocab_sizes}
    if len(set(compared.values())) > 1:
        sizes = " and ".join(f"{name}'s is {size}" for name, size in compared.items())
        problems.append(
            f"KL 'full' compares whole distributions, but vocab_size differs: {sizes}; use another "
            "KL estimate, or models with equal vocabularies"
        )
    if problems:
        raise ConfigError("\n".join(problems))


def check_tokens(
    tokens: Mapping[str, int], own: Mapping[str, int], place: str, must_know: bool
) -> None:
    """Refuse a model in whose own tokenizer the run's `tokens` have other ids; a ConfigError.

    A model that can be trained may lack tokens, or have reserved ones in their place. With
    `must_know` it is refused for that too.
    """
    names = {number: token for token, number in own.items()}
    for token, number in sorted(tokens.items() - own.items(), key=lambda pair: pair[1]):
        is_free = number not in names or _RESERVED.search(names[number]) is not None
        if must_know or not is_free or token in own:
            raise ConfigError(
                f"{place} has a tokenizer of its own, in which id {number} is "
                f"{names.get(number)!r}; in data.tokenizer it is {token!r}, so the model would "
                "read another text; use a model that was trained with the run's tokenizer"
            )


def ids_without_token(vocab_size: int, token_ids: AbstractSet[int]) -> list[int]:
    """The rows of a vocabulary that must not be drawn, since the tokenizer has no text for them."""
    return [number for number in range(vocab_size) if number not in token_ids]


def warn_of_undrawn(vocab_size: int, token_ids: AbstractSet[int]) -> None:
    """Warn if the tokenizer lacks so many of the actor's rows that it may be another model's."""
    without = len(ids_without_token(vocab_size, token_ids))
    if without > max(_USUAL_COUNT, _USUAL_SHARE * vocab_size):
        logger.warning(
            "%d of the actor's %d token ids are not in the tokenizer and are never drawn; is it "
            "the tokenizer that belongs to the model?",
            without,
            vocab_size,
        )


def find_endings(
    stop: Sequence[str],
    stop_token_ids: Sequence[int],
    end_tokens: Mapping[int, str],
    tokenizer: Tokenizer,
) -> Endings:
    """Find what ends a response: keys of `rollout`, the model's end tokens and the tokenizer's.

    A special token in `stop` has no text. It ends a response by its id.

    Args:
        end_tokens: the end tokens of the actor's files, each with the file that names it.

    Raises:
        ConfigError: the decoded text never shows a string, or the tokenizer lacks an id; one line
            for each mistake.
    """
    ids = [tokenizer.eos_id, *(number for number in end_tokens if number in tokenizer.ids)]
    strings = []
    problems = []
    for string in stop:
        token = tokenizer.special_id(string)
        if token is not None:
            ids.append(token)
        elif tokenizer.shows(string):
            strings.append(string)
        else:
            problems.append(
                f"rollout.stop holds {string!r}, which the tokenizer's decoded text never shows, "
                "and which is no special token of it; give a text that it can make, or the ids of "
                "tokens as rollout.stop_token_ids"
            )

    unknown = [number for number in stop_token_ids if number not in tokenizer.ids]
    if unknown:
        problems.append(
            f"rollout.stop_token_ids holds {unknown[0]}, which is no token of the tokenizer; its "
            f"ids go up to {tokenizer.highest_id}"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return Endings(tuple(dict.fromkeys([*ids, *stop_token_ids])), tuple(strings))


def warn_of_ends(end_tokens: Mapping[int, str], tokenizer: Tokenizer, draws: bool) -> None:
    """Warn of end tokens in a model's files that are not those of the tokenizer.

    Many published models have such files, and a run stops at either token. But other programs stop
    the exported model only at the tokens in its files. Where a run `draws` responses, it warns too
    of tokens that are ordinary text, or that the tokenizer lacks.
    """
    warnings = []
    for number, file in end_tokens.items() if draws else ():
        if number not in tokenizer.ids:
            warnings.append(
                f"{file} names token {number} as eos_token_id, which the tokenizer does not have; "
                "it ends no response"
            )
        elif number != tokenizer.eos_id and tokenizer.is_ordinary(number):
            warnings.append(
                f"responses end after token {number} ({_text(number, tokenizer)}), which {file} "
                "names as eos_token_id and the tokenizer has as ordinary text; correct the file if "
                "that is not meant"
            )

    end = tokenizer.eos_id
    if end_tokens and end not in end_tokens:
        files = " and ".join(dict.fromkeys(end_tokens.values()))
        warnings.append(
            f"the tokenizer's end token is {end} ({_text(end, tokenizer)}), and {files} of the "
            f"model names {' and '.join(map(str, end_tokens))} as eos_token_id; other programs "
            "would not stop the exported model where it has learned to end: make the files agree"
        )
    for warning in warnings:
        logger.warning(warning)


def _text(number: int, tokenizer: Tokenizer) -> str:
    return repr(tokenizer.decode([number], skip_special_tokens=False))
