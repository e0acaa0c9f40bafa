"""The tokens between two turns of a conversation, found by rendering what follows alone.

The assistant's tokens are as they were drawn. What a chat template writes after them, up to the
next turn, does not depend on them; so it is rendered after a placeholder, and tokenised alone. This
file does not know engines or environments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mrlhf.data.tokenizer import Message, Tokenizer
from mrlhf.errors import DataError

# Texts that occur nowhere else. Templates strip white space around contents, so they have none.
_SAID = "QxSaidxQ"
_TOLD = "QxToldxQ"
_SHOWN = 60  # characters of a text in messages
_USER: Message = {"role": "user", "content": "a"}


class TurnRenderer:
    """Renders the prompt of a conversation, and what comes between its turns."""

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], end_ids: Collection[int]
    ) -> None:
        """Try the chat template.

        Args:
            tools: JSON schemas of the functions that the assistant may call.
            end_ids: the tokens that end a turn.

        Raises:
            DataError: there is no chat template, or it shows no tools, or has no place for their
                answers.
        """
        self._tokenizer = tokenizer
        self._tools = tools
        self._end_ids = frozenset(end_ids)
        plain = tokenizer.apply_chat_template([_USER])
        self._end = self._after([], with_calls=False, goes_on=False)
        self._needs_calls = False
        if not tools:
            return
        if tokenizer.apply_chat_template([_USER], tools=tools) == plain:
            raise DataError(
                "the chat template does not show tools, so the policy could not know of them; set "
                "data.chat_template to one that does"
            )
        answer = [{"role": "tool", "name": _name(tools[0]), "content": _TOLD}]
        for self._needs_calls in (False, True):
            try:
                if _TOLD in self._after(answer, self._needs_calls):
                    return
            except DataError:
                continue
        raise DataError(
            "the chat template has no place for the answers of tools (messages of the role tool); "
            "set data.chat_template to one that has"
        )

    def first(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a prompt, with the tools and the header of the first turn."""
        return self._tokenizer.encode_prompt(messages, self._tools)[1]

    def after(self, drawn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The tokens that follow the drawn tokens of a turn, up to the next turn.

        These are the rest of the turn's end (`drawn` may have its end token), the messages, which
        are of tools or the user, and the header of the next turn.

        Raises:
            DataError: the chat template refuses the messages.
        """
        told_by_tools = any(message["role"] == "tool" for message in messages)
        text = self._after(messages, self._needs_calls and told_by_tools)
        tokens = self._tokenizer.encode(text)
        has_end = bool(drawn) and drawn[-1] in self._end_ids
        return tokens[1:] if has_end and tokens and tokens[0] in self._end_ids else tokens

    def rewritten(self) -> str | None:
        """How the template would write an earlier turn otherwise than it was drawn; else None.

        A short conversation is built turn by turn, and rendered as a whole. They differ if a
        template drops thoughts of earlier turns, moves the tools, or lets tokens merge over the
        boundary of a message.
        """
        thinks = "</think>" in self._tokenizer.chat_template
        turns = ["<think>\nb\n</think>\n\nc" if thinks else "b c", "d"]
        answer = {"role": "user", "content": "e"}
        if self._tools:
            answer = {"role": "tool", "name": _name(self._tools[0]), "content": "e"}
        told = [answer, {"role": "user", "content": "f"}]

        messages: list[Message] = [_USER]
        tokens = self.first(messages)
        for said, message in zip(turns, told, strict=True):
            drawn = self._tokenizer.encode(said)
            tokens += [*drawn, *self.after(drawn, [message])]
            spoken = {"role": "assistant", "content": said}
            messages += [_with_calls(spoken, [message], self._needs_calls), _with_id(message)]
        built = self._tokenizer.decode(tokens, skip_special_tokens=False)
        whole = self._tokenizer.apply_chat_template(messages, tools=self._tools)
        if self._tokenizer.encode(whole) == tokens:
            return None
        place = next(
            (i for i, (a, b) in enumerate(zip(built, whole, strict=False)) if a != b),
            min(len(built), len(whole)),
        )
        if built == whole:
            return "tokens merge over the boundary of a message"
        begin = max(0, place - _SHOWN // 2)
        was, would = (text[begin : begin + _SHOWN] for text in (built, whole))
        return f"what was {was!r} would be {would!r}"

    def _after(self, messages: Sequence[Message], with_calls: bool, goes_on: bool = True) -> str:
        """The text after an assistant's message, from its end to the header of the next one."""
        spoken = _with_calls({"role": "assistant", "content": _SAID}, messages, with_calls)
        conversation = [_USER, spoken, *map(_with_id, messages)]
        tail = self._tail(conversation, goes_on)
        if not with_calls:
            return tail
        calls = self._tail(conversation[:2], goes_on=False)
        if not tail.startswith(calls):
            raise DataError("the chat template writes a call otherwise once it is answered")
        return self._end + tail[len(calls) :]

    def _tail(self, conversation: Sequence[Message], goes_on: bool) -> str:
        text = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=goes_on)
        _, found, tail = text.rpartition(_SAID)
        if not found:
            raise DataError("the chat template does not write what the assistant says")
        return tail


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _with_id(message: Message) -> Message:
    """A message; with the number of its call, which some templates want, if a tool answers."""
    return {**message, "tool_call_id": _CALL_ID} if message["role"] == "tool" else message


def _with_calls(spoken: Message, answers: Sequence[Message], wanted: bool) -> Message:
    """What the assistant says, with the calls that are answered, where templates want them."""
    calls = [
        {
            "id": _CALL_ID,
            "type": "function",
            "function": {"name": answer["name"], "arguments": {}},
        }
        for answer in answers
        if wanted and answer["role"] == "tool"
    ]
    return {**spoken, "tool_calls": calls} if calls else spoken


_CALL_ID = "call00000"  # nine characters, as Mistral's templates want
