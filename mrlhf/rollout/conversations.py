"""What conversations of several turns have in common: environments, templates and limits.

`conversing` leads them. This file knows neither engines nor the other replicas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

import torch.distributed as dist

from mrlhf.batch import Episode
from mrlhf.data.tokenizer import Message, Tokenizer
from mrlhf.data.tool_calls import ParsedTurn
from mrlhf.data.turns import Turn, TurnRenderer
from mrlhf.environments.host import EnvironmentHost
from mrlhf.environments.interface import Outcome, Program
from mrlhf.parallel.groups import EngineGroups
from mrlhf.rollout.branches import FunctionTurns
from mrlhf.rollout.drawing import OpenSample
from mrlhf.rollout.limits import TurnLimits

UNREADABLE = "error"  # stands for the name of the tool in a call that cannot be read
_MOST_RENDERERS = 64  # that are kept for the tools of rollout functions
_CUT = " [cut]"  # at the end of an answer that is too long


@dataclass(frozen=True)
class Dialogue:
    """How one kind of episode is led: its program, and how its turns become tokens and calls."""

    program: Program
    renderer: TurnRenderer


@dataclass
class OpenEpisode(OpenSample):
    """One sample on its way; its prompt is what its environment has made of the data's."""

    episode: Episode = field(kw_only=True)
    dialogue: Dialogue = field(kw_only=True)
    number: int = field(kw_only=True)  # of its episode at the host
    # Tokens of the turns that its new environment must see before more is drawn.
    replays: list[list[int]] | None = None
    # The conversation as messages, where the template may make a new context of it.
    messages: list[Message] = field(default_factory=list)
    history: list[Turn] = field(default_factory=list)
    text: str = ""  # of all of it, up to the present turn, if that is not the first
    asked: FunctionTurns = field(default_factory=FunctionTurns)  # of a rollout function


@dataclass
class Conversations:
    """What leads the conversations of one replica, whatever task they belong to."""

    groups: EngineGroups
    host: EnvironmentHost | None  # None on all ranks of the replica but the first
    dialogues: Mapping[str, Dialogue]  # by the name of the program
    program_of: Callable[[str], str]  # the name of the program of a data source
    parse: Callable[[str], ParsedTurn]
    tokenizer: Tokenizer
    limits: TurnLimits
    # The samples whose episodes wait for later weights, by seed, uid and sample index.
    _waiting: dict[tuple[int, int, int], OpenEpisode] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)
    _renderers: dict[str, TurnRenderer] = field(default_factory=dict)  # by tools, of functions

    def on_all_ranks(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes that the first rank of the replica has, on all of its ranks."""
        if self.groups.tp.size() == 1:
            return outcomes
        box = [outcomes]
        first = dist.get_global_rank(self.groups.tp, 0)
        dist.broadcast_object_list(box, src=first, group=self.groups.tp)
        return box[0]

    def keep(self, one: OpenEpisode) -> None:
        """Let the episode of a sample wait for later weights."""
        self._waiting[_key(one)] = one

    def new_number(self) -> int:
        """The number of an episode that begins."""
        return next(self._numbers)

    def take_waiting(self, one: OpenSample) -> OpenEpisode | None:
        """What has waited here for later weights of a sample, if its episode has."""
        return self._waiting.pop(_key(one), None)

    def end_waiting(self) -> None:
        """End the episodes that nobody goes on with."""
        for one in self._waiting.values():
            self.end(one.number)
        self._waiting.clear()

    def end(self, number: int) -> None:
        """End an episode and all that it has started."""
        if self.host is not None:
            self.host.end(number)

    def text_of(self, tokens: Sequence[int], stop_token_ids: Sequence[int]) -> str:
        """What the policy said in a turn, with special tokens but the one that ends it."""
        if tokens[-1] in stop_token_ids:
            tokens = tokens[:-1]
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def answer_render(self, outcome: Outcome) -> bool:
        """Answer a rollout function that asks for tokens or a text; False if it asks for a turn.

        Only the first rank of the replica is asked.
        """
        question = outcome.question
        if question is None or question["what"] == "generate":
            return False
        try:
            value = self._rendered(outcome.program, question)
        except Exception as error:  # whatever is wrong with its arguments
            self.answer(outcome.episode, question["number"], str(error), "error")
        else:
            self.answer(outcome.episode, question["number"], value)
        return True

    def answer(self, number: int, question: int, value: Any, kind: str = "value") -> None:
        """Answer a question of a rollout function; see `EnvironmentHost.answer`."""
        if self.host is not None:
            self.host.answer(number, question, value, kind)

    def _rendered(self, program: str, question: Mapping[str, Any]) -> list[int] | str:
        what = question["what"]
        renderer = self._renderer(program, question.get("tools"))
        if what == "prompt":
            return renderer.first(
                [{**one, "content": self._plain(one["content"])} for one in question["messages"]]
            )
        if what == "tell":
            return renderer.after(
                question["drawn"], question["stopped"], self.cut_all(question["messages"])
            )
        if what == "encode":
            return self.tokenizer.encode(question["text"])
        return self.tokenizer.decode(question["token_ids"], skip_special_tokens=False)

    def _renderer(self, program: str, tools: Any) -> TurnRenderer:
        """What renders for a rollout function, with the tools that it names."""
        plain = self.dialogues[program].renderer
        if not tools:
            return plain
        key = json.dumps(tools)
        if key not in self._renderers:
            if len(self._renderers) == _MOST_RENDERERS:
                self._renderers.clear()
            self._renderers[key] = plain.with_tools(tools)
        return self._renderers[key]

    def cut_all(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with their contents cut."""
        return [{**message, "content": self.cut(message["content"])} for message in messages]

    def cut(self, text: str) -> str:
        """The text, without what is too long of it, and without special tokens."""
        text = self._plain(text)
        tokens = self.tokenizer.encode(text)
        most = self.limits.max_told_tokens
        return text if len(tokens) <= most else self.tokenizer.decode(tokens[:most]) + _CUT

    def _plain(self, text: str) -> str:
        """The text without special tokens.

        A tool that wrote the end of its message and the header of another would speak for others.
        """
        tokens = self.tokenizer.encode(text)
        plain = self.tokenizer.decode(tokens)
        if plain == self.tokenizer.decode(tokens, skip_special_tokens=False):
            return text
        # What stood around one may be another; there a space keeps the rest apart.
        runs = groupby(self.tokenizer.encode(plain), self._has_text)
        return " ".join(self.tokenizer.decode(list(run)) for has_text, run in runs if has_text)

    def _has_text(self, token: int) -> bool:
        return self.tokenizer.is_ordinary(token) or bool(self.tokenizer.decode([token]))


def _key(one: OpenSample) -> tuple[int, int, int]:
    return one.request.sampling.seed, one.request.uid, one.sample_index
