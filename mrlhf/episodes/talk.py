"""Talks with a policy turn by turn, and hands over its answers token by token.

What stands between two turns is rendered behind the tokens that were drawn, as in episodes. This
file knows no terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mrlhf.data.tokenizer import Message, Tokenizer
from mrlhf.episodes.template import TurnRenderer
from mrlhf.errors import DataError
from mrlhf.inference.base import EngineStats, Request, SamplingParams
from mrlhf.inference.native.engine import NativeEngine


@dataclass
class Talk:
    """A conversation with a policy; without a chat template, a text that both go on with."""

    engine: NativeEngine
    tokenizer: Tokenizer
    end_ids: Sequence[int]
    max_length: int  # of the conversation, in tokens
    system: Sequence[Message] = ()
    tokens: list[int] = field(default_factory=list)  # up to the last answer
    last: list[int] | None = None  # the last answer
    stopped: bool = False  # whether the policy ended it
    stats: EngineStats = field(default_factory=EngineStats)  # the engine's work for it

    @cached_property
    def renderer(self) -> TurnRenderer | None:
        """The writer of the messages; None for a text."""
        has_template = self.tokenizer.has_chat_template
        return TurnRenderer(self.tokenizer, (), self.end_ids) if has_template else None

    def begin(self, system: str) -> None:
        """Begin another conversation, with a system message unless it is empty."""
        said: list[Message] = [{"role": "system", "content": system}] if system else []
        question: Message = {"role": "user", "content": "a"}
        if system.strip() not in (self.renderer.text([*said, question]) if self.renderer else ""):
            raise DataError("the chat template, if there is one, leaves out a system message")
        self.system = said
        self.tokens = []
        self.last = None

    def answer(
        self, text: str, sampling: SamplingParams, number: int, on_text: Callable[[str], bool]
    ) -> None:
        """Draw the answer to a message; if that raises an error, the conversation stays as it was.

        Answers with the same `number` draw with the same random numbers. `on_text` is called
        with the text as it comes, and returns whether the answer goes on.
        """
        prompt = self._prompt(text)
        most = min(sampling.max_tokens, self.max_length - len(prompt))
        if most < 1:
            raise DataError(
                f"the conversation with this message has {len(prompt)} tokens, and there is room "
                f"for {self.max_length}, the answer included; /new begins another"
            )
        sampling = replace(sampling, max_tokens=most, stop_token_ids=tuple(self.end_ids))
        request = Request(
            id=0, prompt=prompt, uid=number, samples=range(1), sampling=sampling, goes_on=True
        )
        self.engine.submit([request])
        drawn: list[int] = []
        stopped = False
        stats = EngineStats()
        shown = ""
        goes_on = True
        while self.engine.in_flight:
            if goes_on:
                self.engine.step()
            finished = self.engine.collect() if goes_on else self.engine.cancel()
            stats += finished.stats
            for tokens in self.engine.drawn_so_far():
                drawn = tokens
            for sample in finished.samples:
                drawn = sample.token_ids
                stopped = sample.stopped

            # A part of a character waits for its rest.
            whole = self.tokenizer.decode(drawn)
            whole = whole.rstrip("\ufffd") if self.engine.in_flight else whole
            goes_on = on_text(whole[len(shown) :]) and goes_on
            shown = max(shown, whole, key=len)

        self.tokens = prompt + drawn
        self.last = drawn
        self.stopped = stopped
        self.stats = stats

    def _prompt(self, text: str) -> list[int]:
        """The tokens of the conversation up to the next answer."""
        if self.renderer is None:
            if self.last is None or self.stopped:  # a text that the policy has ended is over
                return self.tokenizer.encode_prompt(text)[1]
            return self.tokens + self.tokenizer.encode(text)

        message: Message = {"role": "user", "content": text}
        if self.last is None:
            return self.renderer.first([*self.system, message])
        return self.tokens + self.renderer.after(self.last, self.stopped, [message])
