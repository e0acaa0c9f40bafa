"""Talks with a policy turn by turn, and hands over its answers token by token.

Tokens that the engine drew stay as they are: what stands between two turns is rendered behind them,
as in episodes. This file knows no terminal, and not where the weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from mrlhf.data.tokenizer import Message, Tokenizer
from mrlhf.data.turns import TurnRenderer
from mrlhf.errors import DataError
from mrlhf.inference.base import EngineStats, Request, SamplingParams
from mrlhf.inference.native.engine import NativeEngine

_TORN = "\ufffd"  # what a decoder writes for a part of a character
_LONGEST_TAIL_TOKENS = 32
_KEPT_TOKENS = 8  # more than a character has, so what is kept ends with a whole one


class TextStream:
    """The text of tokens that come one by one; a part of a character waits for its rest."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tail: list[
            int
        ] = []  # tokens are decoded behind some others, which they may depend on
        self._told = ""  # of the text of the tail

    def add(self, tokens: Sequence[int], is_end: bool = False) -> str:
        """Return the text that these tokens make whole; at the end, all that is left."""
        self._tail += tokens
        text = self._decode(self._tail)
        whole = text if is_end else text.rstrip(_TORN)
        new = whole[len(self._told) :]
        if whole == text and len(self._tail) > _LONGEST_TAIL_TOKENS:
            del self._tail[:-_KEPT_TOKENS]
            self._told = self._decode(self._tail)
        elif new:
            self._told = whole
        return new


@dataclass(frozen=True)
class Answer:
    """A turn of the policy."""

    token_ids: list[int]
    stopped: bool  # whether the policy ended it
    stats: EngineStats  # the engine's work for it


@dataclass
class Talk:
    """A conversation with one policy; without a chat template, a text that both go on with."""

    engine: NativeEngine  # with nothing in flight
    tokenizer: Tokenizer
    end_ids: Collection[int]  # tokens that end an answer
    max_length: int  # most tokens of a conversation
    _renderer: TurnRenderer | None = field(init=False)
    _system: list[Message] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)  # up to the last answer, included
    _last: Answer | None = None

    def __post_init__(self) -> None:
        has_template = self.tokenizer.has_chat_template
        self._renderer = TurnRenderer(self.tokenizer, (), self.end_ids) if has_template else None

    @property
    def has_template(self) -> bool:
        """Whether it is a chat, and not a text."""
        return self._renderer is not None

    def check_system(self, system: str) -> None:
        """Raise a DataError if a system message would not be written; "" is none."""
        if not system:
            return
        if self._renderer is None:
            raise DataError("without a chat template there is no system message")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "a"}]
        if system.strip() not in self._renderer.text(messages):
            raise DataError("the chat template leaves out the system message")

    def begin(self, system: str | None) -> None:
        """Begin another conversation with this system message; None: the same, "": none."""
        if system is not None:
            self._system = [{"role": "system", "content": system}] if system else []
        self._tokens = []
        self._last = None

    def answer(
        self,
        text: str,
        sampling: SamplingParams,
        number: int,
        hear: Callable[[str], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Draw the answer to a message.

        Args:
            sampling: its `max_tokens` is lowered to what the conversation leaves.
            number: answers with the same number draw with the same random numbers.
            hear: is given the text as it comes.
            is_over: is asked before each pass through the model whether to end the answer.

        Raises:
            DataError: the conversation is too long, or the template refuses the message; it is left
                as it was.
        """
        prompt = self._prompt(text)
        room = self.max_length - len(prompt)
        if room < 1:
            raise DataError(
                f"the conversation with this message has {len(prompt)} tokens, and there is room "
                f"for {self.max_length}, the answer included; /new begins another"
            )

        max_tokens = min(sampling.max_tokens, room)
        ends = tuple(self.end_ids)
        sampling = replace(sampling, max_tokens=max_tokens, stop_token_ids=ends)
        request = Request(
            id=0, prompt=prompt, uid=number, samples=range(1), sampling=sampling, goes_on=True
        )
        self._last = self._draw(request, hear, is_over)
        self._tokens = prompt + self._last.token_ids
        return self._last

    def _prompt(self, text: str) -> list[int]:
        """The tokens of the conversation up to the next answer."""
        last = self._last
        if self._renderer is None:
            if last is None or last.stopped:  # a text that the policy has ended is over
                return self.tokenizer.encode_prompt(text)[1]
            return self._tokens + self.tokenizer.encode(text)

        message: Message = {"role": "user", "content": text}
        if last is None:
            return self._renderer.first([*self._system, message])
        return self._tokens + self._renderer.after(last.token_ids, last.stopped, [message])

    def _draw(
        self, request: Request, hear: Callable[[str], None], is_over: Callable[[], bool]
    ) -> Answer:
        stream = TextStream(self.tokenizer.decode)
        stats = EngineStats()
        drawn: list[int] = []
        stopped = False
        self.engine.submit([request])
        while self.engine.in_flight:
            if is_over():
                finished = self.engine.cancel()
            else:
                self.engine.step()
                finished = self.engine.collect()
            stats += finished.stats

            now = self.engine.drawn_so_far().get((request.id, 0), drawn)
            for sample in finished.samples:
                now = sample.token_ids
                stopped = sample.stopped
            hear(stream.add(now[len(drawn) :]))
            drawn = now
        hear(stream.add([], is_end=True))
        return Answer(drawn, stopped, stats)
