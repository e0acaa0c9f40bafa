"""Finds where a response ends because its text contains a stop string.

It knows token ids and a decoder, and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character
_SLACK_CHARACTERS = 16  # at the start of a decoded tail, which may differ from the whole text
_SHORTEST_TAIL_TOKENS = 16  # shorter tails are not tried
_TAIL_STARTS = 4  # places at which a tail may begin: a character has up to four bytes
_BROKEN_CHARACTERS = 5  # a character has up to four bytes, so five broken ones in a row stay broken


class StopSearch:
    """Searches one response for stop strings while it grows token by token.

    The text of a token depends on its neighbours: a character may be spread over several tokens,
    some tokens have no text, and some decoders treat the beginning of a text in another way. So the
    text of all tokens, decoded together, decides. Decoding it for every token is too slow, so only
    the end of the response is decoded, from a token that is far enough back. A hit there is
    confirmed in the whole text.
    """

    def __init__(self, decode: Decode, stop: Sequence[str], before: Sequence[int] = ()) -> None:
        """Start with the tokens `before`, none of which ends the response.

        No string in `stop` may be empty.
        """
        self._decode = decode
        self._stop = tuple(stop)
        self._needed = max(map(len, stop)) + _SLACK_CHARACTERS
        self._may_cut = not any(_REPLACEMENT in string for string in stop)

        self._tokens: list[int] = []
        self._start = 0  # the tail begins here
        # A tail of this length in tokens is shortened if possible.
        self._next_cut = 2 * _SHORTEST_TAIL_TOKENS
        self._text = ""
        self._broken = 0  # how often in a row the text changed and ended in a broken character
        for token in before:
            self.append(token)

    def append(self, token: int) -> bool:
        """Add one token; return whether the text of the response now contains a stop string."""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._start :])
        if text == self._text:
            # The same token again and again without text: a character has fewer bytes than that.
            if self._tokens[-_BROKEN_CHARACTERS:] == [token] * _BROKEN_CHARACTERS:
                self._tokens.pop()
        else:
            self._broken = self._broken + 1 if text.endswith(_REPLACEMENT) else 0
        self._text = text

        if self._has_stop(text):
            return self._start == 0 or self._has_stop(self._decode(self._tokens))
        if self._may_cut and len(self._tokens) - self._start >= self._next_cut:
            self._shorten()
        return False

    def _has_stop(self, text: str) -> bool:
        return any(string in text for string in self._stop)

    def _shorten(self) -> None:
        """Move the beginning of the tail to a later token, if that leaves enough text."""
        # A stop string that a later token completes must lie in the tail. Broken characters do not
        # count as text, because that token may mend them.
        count = len(self._tokens)
        length = _SHORTEST_TAIL_TOKENS
        while self._start < count - length:
            for start in range(count - length, max(self._start, count - length - _TAIL_STARTS), -1):
                text = self._decode(self._tokens[start:])
                if self._is_enough(text):
                    self._start = start
                    self._text = text
                    self._next_cut = 2 * (count - start)
                    return
            length *= 2
        self._next_cut = 2 * (count - self._start)

    def _is_enough(self, text: str) -> bool:
        """Whether a tail with this text has enough characters that no later token can change."""
        if self._broken >= _BROKEN_CHARACTERS:
            return len(text) >= self._needed
        return len(text) - text.count(_REPLACEMENT) >= self._needed
