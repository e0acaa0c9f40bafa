"""Keeps the turns that the rollout function of an episode asks for, and makes a response of them.

The function asks for turns behind token ids of its own, and returns trajectories. These follow each
other in the response as its contexts. Tokens that several of them have train in the first. It knows
neither engines nor the function's process.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from mrlhf.batch import Episode
from mrlhf.episodes.limits import TurnLimits
from mrlhf.inference.base import Sample
from mrlhf.rollout.drawn_sample import DrawnSample

_Turns = list[tuple[int, int]]  # of a trajectory: the number of each turn, and where it begins


class FunctionError(Exception):
    """A rollout function asks for or returns something useless; the message is one line."""


class NoRoomError(FunctionError):
    """It asks for more than fits."""


@dataclass
class FunctionTurns:
    """The turns that are drawn for one episode, by their numbers."""

    drawn: dict[int, Sample] = field(default_factory=dict)
    _contexts: list[bytes] = field(default_factory=list)  # digests of the tokens before each turn

    def ask(
        self, ids: Any, max_tokens: Any, limits: TurnLimits, known: Collection[int]
    ) -> tuple[int, int, str]:
        """The number of a turn behind these ids, its most tokens, a name for its random numbers.

        The name depends on the ids alone, and on how often they came before: functions that ask for
        several turns at once may do so in any order. `known` are all ids that there are.

        Raises:
            NoRoomError: the trajectory or the episode is as long as it may be.
            FunctionError: the arguments are wrong.
        """
        if not ids or not all(type(token) is int and token in known for token in ids):
            raise FunctionError("generate needs at least one token id, and all of the tokenizer's")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise FunctionError(f"generate got max_tokens {max_tokens!r}; give a number from 1 on")
        if len(self._contexts) >= limits.max_turns:
            raise NoRoomError(f"the episode has rollout.max_turns {limits.max_turns} turns")
        if len(ids) >= limits.max_length:
            raise NoRoomError(
                f"the trajectory has {len(ids)} tokens, and data.max_prompt_length + "
                f"max_response_length is {limits.max_length}"
            )

        digest = _digest(ids)
        name = f"draw {digest.hex()} {self._contexts.count(digest)}"
        self._contexts.append(digest)
        room = limits.of_turn(limits.max_length - len(ids))
        return len(self._contexts) - 1, min(room, max_tokens or room), name

    def assemble(self, returned: Sequence[Mapping[str, Any]], response: DrawnSample) -> None:
        """Append the trajectories that the function has returned to an empty response.

        FunctionError, and nothing is appended, if one has tokens that were not drawn for it or
        nothing that trains, or if some of several have rewards.
        """
        rewards = [trajectory["reward"] for trajectory in returned]
        given = [reward for reward in rewards if reward is not None]
        if len(given) not in (0, 1, len(rewards)):
            raise FunctionError(
                f"{len(given)} of {len(rewards)} trajectories have a reward; give one to one of "
                "them, which all share, or to each"
            )
        new_turns = self._new_turns(returned)

        episode = response.episode
        assert episode is not None
        episode.turn_begins = []
        for trajectory, turns in zip(returned, new_turns, strict=True):
            self._append(trajectory["token_ids"], turns, response, episode)

        # A lone trajectory is compared by its role with the episodes of other trajectories.
        has_own = len(given) == len(rewards) and (len(given) > 1 or bool(returned[0]["role"]))
        of_turns = [_turn_rewards(*pair) for pair in zip(returned, new_turns, strict=True)]
        if has_own:
            _add_own_rewards(returned, of_turns, episode)
        elif given:
            episode.set_reward(given[0])
        if has_own or any(trajectory["turn_rewards"] for trajectory in returned):
            episode.turn_rewards = [reward for rewards in of_turns for reward in rewards]

    def _new_turns(self, returned: Sequence[Mapping[str, Any]]) -> list[_Turns]:
        """The turns of each trajectory that none before it has."""
        every = []
        taken: set[int] = set()
        for trajectory in returned:
            self._check(trajectory["token_ids"], trajectory["turns"])
            turns = [(draw, begin) for draw, begin in trajectory["turns"] if draw not in taken]
            if not turns:
                raise FunctionError("a trajectory was returned that others before it contain")
            taken |= {draw for draw, _ in turns}
            every.append(turns)
        return every

    def _check(self, ids: list[int], turns: Sequence[tuple[int, int]]) -> None:
        """Compare the tokens of a trajectory with what was drawn."""
        end = 1  # something stands before the first turn
        try:
            for draw, begin in turns:
                drawn = self.drawn[draw].token_ids
                fits = (
                    begin >= end
                    and drawn == ids[begin : begin + len(drawn)]
                    and all(type(token) is int for token in ids[:begin])
                    and _digest(ids[:begin]) == self._contexts[draw]
                )

                if not fits:
                    raise ValueError
                end = begin + len(drawn)
        # A function may have written anything into it, even numbers that no token has.
        except (LookupError, TypeError, ValueError, OverflowError):
            raise FunctionError(
                "a trajectory has other tokens than those that were drawn or read; continue "
                "those that generate returns"
            ) from None

    def _append(
        self, ids: list[int], turns: _Turns, response: DrawnSample, episode: Episode
    ) -> None:
        """Append a trajectory up to the last of those `turns`, which train."""
        position = turns[0][1]
        prompt = ids[:position]
        if episode.turns:
            episode.context_begins.append(response.length)
            episode.context_prompts.append(len(prompt))
            response.add_read(prompt)
        else:
            episode.prompt_ids = prompt

        for draw, begin in turns:
            response.add_read(ids[position:begin])
            episode.turn_begins.append(response.length)
            response.add_drawn(self.drawn[draw])
            episode.turns.append(response.length)
            response.stopped = self.drawn[draw].stopped
            position = begin + len(self.drawn[draw].arrays[0])


def _turn_rewards(trajectory: Mapping[str, Any], turns: _Turns) -> list[float]:
    """The rewards that a trajectory has for some of its turns."""
    draws = (draw for draw, _ in trajectory["turns"])
    paid = dict(zip(draws, trajectory["turn_rewards"], strict=False))
    return [paid.get(draw, 0.0) for draw, _ in turns]


def _add_own_rewards(
    returned: Sequence[Mapping[str, Any]], of_turns: list[list[float]], episode: Episode
) -> None:
    """Add the reward of each trajectory to that of its last turn; report the mean of each role."""
    of_role: dict[str, list[float]] = {}
    for trajectory, rewards in zip(returned, of_turns, strict=True):
        own = trajectory["reward"]
        rewards[-1] += own["score"] if isinstance(own, Mapping) else own
        episode.context_roles.append(trajectory["role"])
        of_role.setdefault(trajectory["role"], []).append(sum(rewards))
    means = {f"{role}/reward": fmean(scores) for role, scores in of_role.items() if role}
    episode.set_reward({**means, "score": 0.0})


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=8).digest()
