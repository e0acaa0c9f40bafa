"""Writes the tokens that stand between two turns of the assistant, as the chat template has them.

Tokens that were drawn stay as they are: only what follows them is rendered, behind a placeholder
for the assistant's message, and tokenised alone. It knows of a template what it writes, and nothing
of tools, episodes or engines. A template writes special tokens in a message as such, and so does
this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from mrlhf.data.tokenizer import Message, Tokenizer, Tool
from mrlhf.errors import DataError

# Texts of placeholders; they stand nowhere else, and no template strips, splits or escapes them.
_QUESTION = "Qqz7question"
_ANSWER = "Qqz7answer"
_FOLLOWING = "Qqz7following{number}z"
_REMEDY = "set data.chat_template to a jinja file that"
_LONGEST_EXCERPT = 80  # characters
_RESUMED = 20  # characters after which two texts are taken to agree again

_Segment = tuple[list[int], Sequence[Message]]  # tokens of an episode, and their messages
# How the assistant's placeholder is given to the template: as its content, or as the argument of a
# call. Some templates write the results of tools only after calls.
_Form = Literal["content", "call"]


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant and the messages that follow it."""

    drawn: Sequence[int]  # tokens of the engine
    stopped: bool  # whether an end token or a stop string ended it
    messages: Sequence[Message] = ()  # none after the last turn


@dataclass(frozen=True)
class Mismatch:
    """Where a conversation rendered at once parts from its tokens as built turn by turn."""

    # Its index in the whole conversation, the assistant's messages included; of several messages
    # that stand together, that of the first.
    message: int
    # The template left out a part of the message, or tokens are cut in another way, though their
    # text is the same; or anything else.
    kind: Literal["dropped", "merged", "changed"]
    built: str  # where they part, the text as built; of what is dropped, that alone
    rendered: str  # and the template's

    def __str__(self) -> str:
        return (
            f"message {self.message} is {self.kind}: the turns hold {self.built!r} where the "
            f"template writes {self.rendered!r}"
        )


class TurnRenderer:
    """Renders the first prompt of an episode, and what follows each turn of the assistant."""

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[Tool] = (), end_ids: Collection[int] = ()
    ) -> None:
        """Try the chat template.

        Args:
            tokenizer: with a chat template.
            tools: as the template takes them.
            end_ids: the tokens that end a response of the engine; those of the tokenizer count too.

        Raises:
            DataError: there is no chat template, or it ignores `tools` or the results of tools.
        """
        if not tokenizer.has_chat_template:
            raise DataError("turns need a chat template: there is none; set data.chat_template")
        self._tokenizer = tokenizer
        self._tools = tools
        self._end_ids = {tokenizer.eos_id, *tokenizer.end_ids, *end_ids}
        self._forms: dict[tuple[str, ...], _Form] = {}

        system: Message = {"role": "system", "content": "system"}
        question: Message = {"role": "user", "content": _QUESTION}
        prompt = self._render([question])
        if tools and not any(map(self._shows_tools, ([question], [system, question]))):
            raise DataError(f"the chat template ignores tools; {_REMEDY} writes them")
        self._answered = [question, {"role": "assistant", "content": _ANSWER}]
        self._prompt_end = _behind(prompt, _QUESTION)

        # The end of the assistant's turn. A template may end the last message with another token
        # than those before it; it ends the user's as those before.
        self._last = tokenizer.encode(_behind(self._render(self._answered, False), _ANSWER))
        of_question = tokenizer.encode(_behind(self._render([question], False), _QUESTION))[:1]
        self._ends = self._end_ids | {n for n in of_question if not tokenizer.is_ordinary(n)}
        self._end = next((n for n, token in enumerate(self._last) if token in self._ends), None)

        if tools:
            self._form(("tool",))

    def with_tools(self, tools: Sequence[Tool]) -> TurnRenderer:
        """The same with other tools; DataError if the template ignores them."""
        return TurnRenderer(self._tokenizer, tools, self._end_ids)

    def first(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of the first prompt: tools, messages and the header of the answer.

        DataError if the template refuses the messages, or does not write the tools beside them.
        """
        text = self._render(messages)
        if self._tools and text == self._tokenizer.apply_chat_template(_numbered(messages)):
            raise DataError(
                "the chat template writes no tools beside the prompt's messages; begin them with a "
                "system message, which some templates need"
            )
        return self._tokenizer.encode(text)

    def after(self, drawn: Sequence[int], stopped: bool, messages: Sequence[Message]) -> list[int]:
        """The tokens that follow a turn: the rest of its end, `messages`, and the next header.

        Without messages, the rest of its end alone. Of its end, nothing is repeated: an end token
        that was drawn stands in the place of the template's, even if it is another one.

        Args:
            drawn: the turn's tokens.
            stopped: whether an end token or a stop string ended it, and not a limit.
            messages: {"role": "tool", "name", "content"} for each result, or the user's. A result
                without a `tool_call_id` gets one of nine characters.

        Raises:
            DataError: the template refuses the messages, or leaves out those of a role.
        """
        form: _Form = "content"
        tail = self._last
        if messages:
            form = self._form(tuple(message["role"] for message in messages))
            tail = self._tokenizer.encode(self._tail(form, messages))
        end = self._end
        if form != "content":  # what closes the placeholder's call is no part of the end
            tail = tail[next(n for n, token in enumerate(tail) if token in self._ends) :]
            end = None if end is None else 0

        if not self._has_end(drawn, stopped):
            return tail
        if tail[:1] == [drawn[-1]]:
            return tail[1:]
        if end is not None and end < len(tail) and tail[end] in self._ends:
            return tail[end + 1 :]
        return tail

    def check(self, messages: Sequence[Message], turns: Sequence[Turn]) -> Mismatch | None:
        """Compare an episode's tokens with those of the whole conversation, rendered at once.

        `messages` are those of the first prompt. The template is given a turn as the text of its
        tokens.
        """
        segments: list[_Segment] = [(self.first(messages), messages)]
        for turn in turns:
            has_end = self._has_end(turn.drawn, turn.stopped)
            # The template's own end of the last turn is compared with itself.
            drawn = list(turn.drawn[: len(turn.drawn) - (has_end and not turn.messages)])
            follows = self.after(drawn, has_end and bool(turn.messages), turn.messages)
            segments += [(drawn, [{"content": ""}]), (follows, turn.messages)]
        built = list(chain.from_iterable(tokens for tokens, _ in segments))

        conversation = self._conversation(messages, turns)
        is_open = not turns or bool(turns[-1].messages)
        try:
            rendered = self._tokenizer.encode(self._render(conversation, is_open))
        except DataError as error:
            return Mismatch(len(messages), "changed", "", _excerpt(str(error)))
        return None if rendered == built else self._mismatch(segments, built, rendered)

    def text(self, messages: Sequence[Message]) -> str:
        """The text of the first prompt."""
        return self._render(messages)

    def new_context(self, messages: Sequence[Message], turns: Sequence[Turn]) -> list[int] | None:
        """The tokens of a conversation up to its next turn, rendered at once.

        None if the template only adds to the text up to the last of `turns`; DataError if it
        refuses the conversation.
        """
        last = turns[-1]
        before = self._render(self._conversation(messages, turns[:-1]))
        text = self._render(self._conversation(messages, turns))
        added = self._said(last) + self._tail("content", last.messages)
        return None if text == before + added else self._tokenizer.encode(text)

    def _conversation(self, messages: Sequence[Message], turns: Sequence[Turn]) -> list[Message]:
        conversation = [*messages]
        for turn in turns:
            said: Message = {"role": "assistant", "content": self._content(turn)}
            conversation += [said, *turn.messages]
        return conversation

    def _render(self, messages: Sequence[Message], is_open: bool = True) -> str:
        return self._tokenizer.apply_chat_template(_numbered(messages), is_open, self._tools)

    def _shows_tools(self, messages: Sequence[Message]) -> bool:
        """Whether the template writes the tools beside these messages."""
        try:
            return self._render(messages) != self._tokenizer.apply_chat_template(messages)
        except DataError:  # a template may know no system message
            return False

    def _has_end(self, drawn: Sequence[int], stopped: bool) -> bool:
        return stopped and len(drawn) > 0 and drawn[-1] in self._end_ids

    def _tail(self, form: _Form, messages: Sequence[Message]) -> str:
        """The template's text behind the placeholder's if `messages` follow it."""
        question, answer = self._answered
        if form != "content":
            # One call stands for all: some templates write no further ones.
            name = next(m.get("name", "") for m in messages if m["role"] == "tool")
            function = {"name": name, "arguments": {"argument": _ANSWER}}
            calls = [{"type": "function", "function": function}]
            answer = {"role": "assistant", "content": None, "tool_calls": calls}
        return _behind(self._render([question, answer, *messages]), _ANSWER)

    def _form(self, roles: tuple[str, ...]) -> _Form:
        """The first form of the placeholder after which messages of these roles are written."""
        if roles in self._forms:
            return self._forms[roles]

        messages: list[Message] = [
            {"role": role, "name": "name", "content": _FOLLOWING.format(number=number)}
            for number, role in enumerate(roles)
        ]
        forms: tuple[_Form, ...] = ("content", "call") if "tool" in roles else ("content",)
        reason = ""
        for form in forms:
            try:
                tail = self._tail(form, messages)
            except DataError as error:
                reason = reason or str(error)
                continue
            reason = reason or "it leaves them out"
            before = self._tokenizer.encode(tail.partition(messages[0]["content"])[0])
            is_cut = form == "content" or any(token in self._ends for token in before)
            if is_cut and all(message["content"] in tail for message in messages):
                self._forms[roles] = form
                return form

        named = " and ".join(repr(role) for role in dict.fromkeys(roles))
        raise DataError(
            f"the chat template takes no messages of role {named} after the assistant's: {reason}; "
            f"{_REMEDY} writes them"
        )

    def _content(self, turn: Turn) -> str:
        """The text of a turn as the content of a message.

        The header of an answer in a prompt may be longer or shorter than that of a message: it may
        open a thought, or leave a line's end to the model.
        """
        text = self._said(turn)
        question, _ = self._answered
        earlier = _behind(self._render([*self._answered, question]), _QUESTION)
        header = earlier.partition(_ANSWER)[0]
        asked = self._prompt_end + text
        return asked.removeprefix(header) if asked.startswith(header) else text

    def _said(self, turn: Turn) -> str:
        """The text of a turn without its end."""
        has_end = self._has_end(turn.drawn, turn.stopped)
        return self._tokenizer.decode(turn.drawn[: len(turn.drawn) - has_end], False)

    def _mismatch(
        self, segments: Sequence[_Segment], built: Sequence[int], rendered: Sequence[int]
    ) -> Mismatch:
        """Describe where two sequences part; each segment has its tokens and its messages."""

        def text_of(tokens: Sequence[int]) -> str:
            return self._tokenizer.decode(tokens, skip_special_tokens=False)

        same = _shared(built, rendered)
        message, segment_end = _place(segments, same)
        begun = len(text_of(built[:same]))
        ours = text_of(built)[begun:]
        theirs = text_of(rendered)[begun:]

        longest = max(len(text_of(side[: same + 1])) for side in (built, rendered)) - begun
        if 0 < longest <= _shared(ours, theirs):
            return Mismatch(message, "merged", _excerpt(ours), _excerpt(theirs))

        rest = len(text_of(built[:segment_end])) - begun
        resumed = ours.find(theirs[:_RESUMED], 1, rest + _RESUMED) if theirs else rest
        if resumed > 0:
            return Mismatch(message, "dropped", _excerpt(ours[:resumed]), _excerpt(theirs))
        return Mismatch(message, "changed", _excerpt(ours), _excerpt(theirs))


def _place(segments: Sequence[_Segment], position: int) -> tuple[int, int]:
    """The message that holds the token at `position`, and where its segment ends."""
    start = first = 0
    for number, (tokens, messages) in enumerate(segments):
        end = start + len(tokens)
        if position < end:
            # Segments of drawn tokens are odd; what follows one begins with the end of the turn.
            follows = number > 0 and number % 2 == 0
            is_end = follows and (not messages or position == start)
            return first - is_end, end
        start = end
        first += len(messages)
    return first - 1, start


def _numbered(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages, with ids of calls and results of nine characters, as some templates insist."""
    numbered = []
    results = 0
    for message in map(dict, messages):
        if message["role"] == "assistant":
            results = 0
            if message.get("tool_calls"):
                message["tool_calls"] = [
                    {"id": f"call{number:05}", **call}
                    for number, call in enumerate(message["tool_calls"])
                ]
        elif message["role"] == "tool":
            message.setdefault("tool_call_id", f"call{results:05}")
            results += 1

        numbered.append(message)
    return numbered


def _behind(text: str, placeholder: str) -> str:
    """The text behind the first placeholder; DataError if there is none."""
    _, found, rest = text.partition(placeholder)
    if not found:
        raise DataError(f"the chat template leaves out messages; {_REMEDY} writes all")
    return rest


def _shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The length of what both sequences begin with."""
    pairs = zip(left, right, strict=False)
    shortest = min(len(left), len(right))
    return next((number for number, (a, b) in enumerate(pairs) if a != b), shortest)


def _excerpt(text: str) -> str:
    return text if len(text) <= _LONGEST_EXCERPT else f"{text[:_LONGEST_EXCERPT]} ..."
