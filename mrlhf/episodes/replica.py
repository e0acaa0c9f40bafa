"""The common parts of the episodes of one replica: environments, templates and limits.

The runner draws them. This file knows neither engines nor the other replicas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from mrlhf.batch import Episode
from mrlhf.data.tokenizer import Message, Tokenizer
from mrlhf.episodes.environments.host import EnvironmentHost
from mrlhf.episodes.environments.protocol import Answer, Outcome, Program, Question
from mrlhf.episodes.functions import FunctionTurns
from mrlhf.episodes.limits import TurnLimits
from mrlhf.episodes.read import EnvironmentInputs
from mrlhf.episodes.template import Turn, TurnRenderer
from mrlhf.parallel.collectives import from_first
from mrlhf.parallel.groups import EngineGroups
from mrlhf.rollout.drawing import OpenSample

UNREADABLE = "error"  # stands for the name of the tool in a call that cannot be read
_MOST_RENDERERS = 64  # that are kept for the tools of rollout functions
_CUT = " [cut]"  # at the end of an answer that is too long


@dataclass
class OpenEpisode(OpenSample):
    """One sample on its way; its prompt is what its environment has made of the data's."""

    episode: Episode = field(kw_only=True)
    program: Program = field(kw_only=True)
    renderer: TurnRenderer = field(kw_only=True)
    number: int = field(kw_only=True)  # of its episode at the host
    # Tokens of the turns that its new environment must see before more is drawn.
    replays: list[list[int]] | None = None
    # The conversation as messages, where the template may make a new context of it.
    messages: list[Message] = field(default_factory=list)
    history: list[Turn] = field(default_factory=list)
    asked: FunctionTurns = field(default_factory=FunctionTurns)  # of a rollout function


@dataclass
class ReplicaEpisodes:
    """The common parts of one replica's episodes, whatever task they belong to."""

    groups: EngineGroups
    host: EnvironmentHost | None  # None on all ranks of the replica but the first
    environments: EnvironmentInputs
    tokenizer: Tokenizer
    limits: TurnLimits
    # The episodes that wait for later weights, by seed, uid and sample index.
    waiting: dict[tuple[int, int, int], OpenEpisode] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)  # of episodes that begin
    _renderers: dict[str, TurnRenderer] = field(default_factory=dict)  # by tools, of functions

    def on_all_ranks(self, outcomes: list[Outcome]) -> list[Outcome]:
        """The outcomes that the first rank of the replica has, on all of its ranks."""
        if self.groups.tp.size() == 1:
            return outcomes
        return from_first(outcomes, self.groups.tp)

    def end_waiting(self) -> None:
        """End the episodes that nobody goes on with."""
        for sample in self.waiting.values():
            self.end(sample.number)
        self.waiting.clear()

    def end(self, number: int) -> None:
        """End an episode and all that it has started."""
        if self.host is not None:
            self.host.end(number)

    def text_of(self, tokens: Sequence[int], stop_token_ids: Sequence[int]) -> str:
        """The policy's text of a turn, with special tokens but the one that ends it."""
        if tokens[-1] in stop_token_ids:
            tokens = tokens[:-1]
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def answer(self, number: int, answer: Answer) -> None:
        """Answer a question of a rollout function."""
        if self.host is not None:
            self.host.answer(number, answer)

    def render(self, question: Question, renderer: TurnRenderer) -> Answer:
        """The answer to a rollout function that asks for tokens or a text."""
        try:
            return Answer(question.number, self._rendered(question, renderer))
        except Exception as error:  # whatever is wrong with its arguments
            return Answer(question.number, str(error), "error")

    def _rendered(self, question: Question, renderer: TurnRenderer) -> list[int] | str:
        given = question.arguments
        renderer = self._with_tools(renderer, given.get("tools"))
        if question.what == "prompt":
            messages = given["messages"]
            return renderer.first([{**x, "content": self._plain(x["content"])} for x in messages])
        if question.what == "tell":
            return renderer.after(given["drawn"], given["stopped"], self.cut_all(given["messages"]))
        if question.what == "encode":
            return self.tokenizer.encode(given["text"])
        return self.tokenizer.decode(given["token_ids"], skip_special_tokens=False)

    def _with_tools(self, plain: TurnRenderer, tools: Any) -> TurnRenderer:
        """The renderer for a rollout function, with the tools that it names."""
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
