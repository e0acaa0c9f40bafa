"""Keeps what is drawn for the rollout function of an episode, and makes one response of it.

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

from mrlhf.inference.base import Sample
from mrlhf.rollout.trajectory import GrowingTrajectory


class BranchError(Exception):
    """What a rollout function asks for or returns cannot be used; the message is one line."""


class NoRoomError(BranchError):
    """It asks for more than fits."""


@dataclass(frozen=True)
class BranchLimits:
    """How far the trajectories of a rollout function may go."""

    max_turns: int  # of all of them
    max_turn_tokens: int | None
    max_length: int  # tokens of one, its prompt included


@dataclass
class Branches:
    """The turns that are drawn for one episode, by their numbers."""

    drawn: dict[int, Sample] = field(default_factory=dict)
    _behind: list[bytes] = field(default_factory=list)  # of what each was asked for, a digest

    def ask(
        self, ids: Any, max_tokens: Any, limits: BranchLimits, known: Collection[int]
    ) -> tuple[int, int, str]:
        """The number of a turn behind these ids, its most tokens, a name for its random numbers.

        The name depends on the ids alone, and on how often they came before: functions that ask for
        several turns at once may do so in any order. `known` are all ids that there are.

        Raises:
            NoRoomError: the trajectory or the episode is as long as it may be.
            BranchError: the arguments are wrong.
        """
        if not ids or not all(type(one) is int and one in known for one in ids):
            raise BranchError("generate needs at least one token id, and all of the tokenizer's")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise BranchError(f"generate got max_tokens {max_tokens!r}; give a number from 1 on")
        if len(self._behind) >= limits.max_turns:
            raise NoRoomError(f"the episode has rollout.max_turns {limits.max_turns} turns")
        room = limits.max_length - len(ids)
        if room < 1:
            raise NoRoomError(
                f"the trajectory has {len(ids)} tokens, and data.max_prompt_length + "
                f"max_response_length is {limits.max_length}"
            )
        digest = _digest(ids)
        name = f"draw {digest.hex()} {self._behind.count(digest)}"
        self._behind.append(digest)
        most = [room, max_tokens, limits.max_turn_tokens]
        return len(self._behind) - 1, min(one for one in most if one), name

    def weave(self, trajectories: Sequence[Mapping[str, Any]]) -> Woven:
        """What the function returned as one response.

        If one of several has a reward, all share it; if each has one, they are of their own. A lone
        trajectory has one of its own if it has a role, which episodes with others compare it by.
        Rewards of turns stand beside either.

        Raises:
            BranchError: a trajectory has tokens that were not drawn for it, or nothing that trains,
                or some of several have rewards.
        """
        rewards = [one["reward"] for one in trajectories]
        given = [reward for reward in rewards if reward is not None]
        if len(given) not in (0, 1, len(rewards)):
            raise BranchError(
                f"{len(given)} of {len(rewards)} trajectories have a reward; give one to one of "
                "them, which all share, or to each"
            )
        is_own = len(given) == len(rewards) and (len(given) > 1 or bool(trajectories[0]["role"]))
        woven = Woven()
        of_role: dict[str, list[float]] = {}
        taken: set[int] = set()
        for one in trajectories:
            self._check(one["token_ids"], one["turns"])
            turns = [(draw, begin) for draw, begin in one["turns"] if draw not in taken]
            if not turns:
                raise BranchError("a trajectory was returned that others before it contain")
            taken |= {draw for draw, _ in turns}
            woven.add(one["token_ids"], [(begin, self.drawn[draw]) for draw, begin in turns])

            paid = dict(zip((draw for draw, _ in one["turns"]), one["turn_rewards"], strict=False))
            of_turns = [paid.get(draw, 0.0) for draw, _ in turns]
            if is_own:
                own = one["reward"]
                of_turns[-1] += own["score"] if isinstance(own, Mapping) else own
                woven.context_roles.append(one["role"])
                of_role.setdefault(one["role"], []).append(sum(of_turns))
            woven.turn_rewards += of_turns
        if not is_own and not any(one["turn_rewards"] for one in trajectories):
            woven.turn_rewards = []
        if is_own:
            means = {f"{role}/reward": fmean(scores) for role, scores in of_role.items() if role}
            woven.reward = {**means, "score": 0.0}
        elif given:
            woven.reward = given[0]
        return woven

    def _check(self, ids: list[int], turns: Sequence[tuple[int, int]]) -> None:
        """Compare the tokens of a trajectory with what was drawn."""
        end = 1  # something stands before the first turn
        try:
            for draw, begin in turns:
                drawn = self.drawn[draw].token_ids
                fits = (
                    begin >= end
                    and drawn == ids[begin : begin + len(drawn)]
                    and all(type(one) is int for one in ids[:begin])
                    and _digest(ids[:begin]) == self._behind[draw]
                )
                if not fits:
                    raise ValueError
                end = begin + len(drawn)
        # A function may have written anything into it, even numbers that no token has.
        except (LookupError, TypeError, ValueError, OverflowError):
            raise BranchError(
                "a trajectory has other tokens than those that were drawn or read; continue "
                "those that generate returns"
            ) from None


@dataclass
class Woven:
    """Trajectories as one response; the fields are those of an `Episode`."""

    prompt_ids: list[int] = field(default_factory=list)
    said: GrowingTrajectory = field(default_factory=GrowingTrajectory)
    turn_begins: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    context_begins: list[int] = field(default_factory=list)
    context_prompts: list[int] = field(default_factory=list)
    context_roles: list[str] = field(default_factory=list)
    stopped: bool = False
    # What all share; of rewards of their own, the mean for each role that has a name, and score 0.
    reward: float | dict[str, float] | None = None

    def add(self, ids: Sequence[int], turns: Sequence[tuple[int, Sample]]) -> None:
        """Add a trajectory, with those of its turns that train and where they begin in `ids`."""
        said = self.said
        position = turns[0][0]
        prompt = list(ids[:position])
        if self.turns:
            self.context_begins.append(len(said))
            self.context_prompts.append(len(prompt))
            said.add_told(prompt)
        else:
            self.prompt_ids = prompt
        for begin, sample in turns:
            said.add_told(list(ids[position:begin]))
            self.turn_begins.append(len(said))
            said.add_drawn(sample)
            self.turns.append(len(said))
            self.stopped = sample.stopped
            position = begin + len(sample.arrays[0])


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", ids).tobytes(), digest_size=8).digest()
