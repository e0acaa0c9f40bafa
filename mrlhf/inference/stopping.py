"""Finds where a response ends because its text contains a stop string.

It knows token ids and a decoder, and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def end_of(
    token_ids: Sequence[int], decode: Decode, stop: Sequence[str], start: int = 1
) -> int | None:
    """The number of tokens after which the text first contains a stop string.

    The whole response is decoded each time, because what a token adds to the text depends on the
    tokens before it.

    Args:
        token_ids: one response.
        decode: token ids to text.
        stop: strings, none of them empty.
        start: the smallest possible result; the text of fewer tokens holds no stop string.

    Returns:
        A number from `start` to `len(token_ids)`; None if the text holds no stop string.
    """
    if not any(string in decode(token_ids) for string in stop):
        return None
    for count in range(start, len(token_ids)):
        text = decode(token_ids[:count])
        if any(string in text for string in stop):
            return count
    return len(token_ids)
