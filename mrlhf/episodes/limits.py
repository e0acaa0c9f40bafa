"""How far episodes may go. It knows neither engines nor environments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from mrlhf.batch import Episode

OnError = Literal["tell", "end"]


@dataclass(frozen=True)
class TurnLimits:
    """Where turns, contexts and episodes end."""

    max_turns: int
    max_turn_tokens: int | None  # most tokens of one turn; None: as many as the context has room
    max_told_tokens: int  # most tokens of one answer of a tool or of the environment
    max_prompt_tokens: int  # most tokens of a prompt with the first observation
    max_response_tokens: int  # most tokens of the first context, without its prompt
    on_parse_error: OnError  # tell the model, or end the episode
    on_tool_error: OnError
    # A template that writes earlier turns otherwise than they were drawn: go on with what was
    # drawn, or begin another context with what it writes.
    on_rewrite: Literal["keep", "split"] = "keep"

    @property
    def max_length(self) -> int:
        """The most tokens of a context, its prompt included."""
        return self.max_prompt_tokens + self.max_response_tokens

    def room(self, episode: Episode, length: int) -> int:
        """How many tokens may follow the `length` tokens of a response in its last context."""
        begins = episode.context_begins
        if not begins:
            return self.max_response_tokens - length
        return self.max_length - (length - begins[-1])

    def of_turn(self, room: int) -> int:
        """The most tokens of a turn that begins where a context has this room."""
        return room if self.max_turn_tokens is None else min(room, self.max_turn_tokens)

    def turn_tokens(self, episode: Episode) -> int:
        """The most tokens of an episode's present turn."""
        return self.of_turn(self.room(episode, episode.turn_begins[-1]))

    def fits(self, episode: Episode, length: int, has_ended: bool) -> bool:
        """Whether an episode of `length` tokens is in these limits, and can go on if it is open."""
        length += not has_ended  # there must be room for a token
        ends = [*episode.context_begins, length]
        longest = max((end - begin for begin, end in pairwise(ends)), default=0)
        turn = 0 if has_ended else length - episode.turn_begins[-1]
        return (
            ends[0] <= self.max_response_tokens
            and longest <= self.max_length
            and len(episode.prompt_ids or ()) <= self.max_prompt_tokens
            and self.of_turn(turn) == turn
        )
