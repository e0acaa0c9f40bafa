"""Has the engine draw the turns that rollout functions ask for.

It knows the requests for them, and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from mrlhf.inference.base import Request, Sample, SamplingParams
from mrlhf.rollout.branches import BranchError, BranchLimits, NoRoomError
from mrlhf.rollout.conversations import UNREADABLE, Conversation, Conversations
from mrlhf.rollout.drawing import mix_seed


class AskedTurns:
    """The turns that the rollout functions of one task wait for."""

    def __init__(self, owner: Conversations, sampling: SamplingParams, first_id: int) -> None:
        """Nobody waits yet; requests have ids from `first_id` on."""
        self._owner = owner
        self._sampling = sampling
        self._ids = count(first_id)
        limits = owner.limits
        max_length = limits.max_length(sampling)
        self._limits = BranchLimits(limits.max_turns, limits.max_turn_tokens, max_length)
        # By the id of the request: the row, the question, and the number of the turn.
        self._waiting: dict[int, tuple[int, Mapping[str, Any], int]] = {}

    @property
    def sampling(self) -> dict[str, Any]:
        """What a rollout function is told of it, the fields of `rollouts.Sampling`."""
        return {
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "top_k": self._sampling.top_k,
            "max_tokens": self._limits.max_length,
            "max_turns": self._limits.max_turns,
        }

    def ask(self, one: Conversation, question: Mapping[str, Any]) -> list[Request]:
        """The request for a turn; none if the function is told that there cannot be one."""
        ids = question["token_ids"]
        known = self._owner.tokenizer.ids
        try:
            turn, most, name = one.branches.ask(ids, question["max_tokens"], self._limits, known)
        except BranchError as error:
            kind = "no room" if isinstance(error, NoRoomError) else "error"
            self._owner.answer(one.number, question["number"], str(error), kind)
            return []
        sampling = one.request.sampling
        request = Request(
            id=next(self._ids),
            prompt=ids,
            uid=one.request.uid,
            samples=range(one.sample_index, one.sample_index + 1),
            sampling=replace(sampling, max_tokens=most, seed=mix_seed(sampling.seed, name)),
            goes_on=True,
        )
        self._waiting[request.id] = (one.row, question, turn)
        return [request]

    def take(self, sample: Sample, open_samples: Mapping[int, Conversation]) -> bool:
        """Tell the function what was drawn, if it has asked for this."""
        if sample.request_id not in self._waiting:
            return False
        row, question, turn = self._waiting.pop(sample.request_id)
        one = open_samples.get(row)
        if one is not None:  # else the function has ended without waiting for it
            one.branches.drawn[turn] = sample
            text = self._owner.text_of(sample.token_ids, self._sampling.stop_token_ids)
            value = {
                "token_ids": sample.token_ids,
                "text": text,
                "stopped": sample.stopped,
                "draw": turn,
            }
            if question["reads_calls"]:
                parsed = self._owner.parse(text)
                if sample.stopped:
                    one.tools.update(name for name, _ in parsed.calls)
                    if parsed.error is not None:
                        one.tools[UNREADABLE] += 1
                        one.errors += 1
                calls = [{"name": name, "arguments": given} for name, given in parsed.calls]
                value |= {"calls": calls, "content": parsed.content, "problem": parsed.error or ""}
            self._owner.answer(one.number, question["number"], value)
        return True
