"""Turns text into token ids and back, with a Hugging Face tokenizer or a sentencepiece model.

This is the one place that says how a prompt and a response become tokens, so that supervised,
preference and RL data agree: both are encoded separately and then joined. It does not know rows,
data files or models.
"""

from __future__ import annotations

import json
import logging
import re
import signal
import threading
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from itertools import chain, groupby
from pathlib import Path
from types import FrameType
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mrlhf.data.hub_files import read_object, refuse_pointer
from mrlhf.data.subword import MODEL_FILE, check_sentencepiece, convert_sentencepiece
from mrlhf.data.tokenizer_files import CONFIG_FILE, adapt_files, copy_files
from mrlhf.errors import DataError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]
Tool = Mapping[str, Any]  # a function's name, description and JSON schema, as templates take them

_FAST_FILE = "tokenizer.json"
_VOCABULARIES = (
    *(_FAST_FILE, MODEL_FILE, "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)
_LONGEST_REASON = 300  # characters of an error of transformers that are shown
_LONGEST_TEMPLATE = 1_000_000  # characters; known ones have fewer than 20,000
_LONGEST_RENDER_S = 10.0
_MOST_COPIES = 10  # of a conversation in what a template makes of it
_LONGEST_EXCERPT = 40  # characters of a text that are shown
_TESTS_NONE = re.compile(r"content\W{0,3} is (not )?none")
_TORN = "\ufffd"  # what stands in a text for a part of a character
_GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


class Tokenizer:
    """A Hugging Face tokenizer, narrowed to what training needs."""

    def __init__(
        self, backend: PreTrainedTokenizerBase, end_ids: Collection[int] = (), date: str = ""
    ) -> None:
        """`end_ids` end a response too; `date` is today's for the chat template."""
        if backend.eos_token_id is None:
            raise DataError(
                f"tokenizer {backend.name_or_path!r} has no eos token; set eos_token in "
                "tokenizer_config.json"
            )

        self._backend = backend
        self._date = date
        self.eos_id: int = backend.eos_token_id  # ends a response
        # eos can stand for padding, because padding is always masked.
        self.pad_id: int = self.eos_id if backend.pad_token_id is None else backend.pad_token_id
        self.bos_id: int | None = backend.bos_token_id
        # The token for unknown text; None if there is none, or if it is one of the others too.
        unk_id: int | None = backend.unk_token_id
        others = (self.eos_id, self.bos_id, self.pad_id)
        self.unk_id: int | None = None if unk_id in others else unk_id
        # All token ids, added ones included. There may be gaps between them.
        self.ids: frozenset[int] = frozenset(backend.get_vocab().values())
        # Further tokens that end a response. At its end they have no text, as eos has none.
        self.end_ids = frozenset(end_ids)

    @property
    def highest_id(self) -> int:
        """The highest token id, added tokens included."""
        return max(self.ids)

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be encoded."""
        return self._backend.chat_template is not None

    @property
    def chat_template(self) -> str:
        """The source of the chat template; empty without one."""
        return str(self._backend.chat_template or "")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; DataError if it has characters without tokens, or is not valid.

        With `add_special_tokens`, those with which the model family begins and ends a sequence are
        added.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # of many types: unknown words without <unk>, lone surrogates
            start = text[:_LONGEST_EXCERPT]
            raise DataError(
                f"the tokenizer cannot encode the text that begins {start!r}: {_brief(error)}"
            ) from error
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, with or without special tokens."""
        if skip_special_tokens and self.end_ids and len(ids) and ids[-1] in self.end_ids:
            ids = ids[:-1]
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def pieces(self, rows: Sequence[Sequence[int]]) -> list[list[str]]:
        """The text of each token of each row, special tokens included.

        A character that is spread over several tokens stands at the first of them, and the others
        have no text.
        """
        # Each token is read after another one, since some tokenizers drop the space before a first.
        first = self._whole_token()
        before = self.decode([first], skip_special_tokens=False)

        def text_of(tokens: Sequence[int]) -> str:
            text = self.decode([first, *tokens], skip_special_tokens=False)
            return text.removeprefix(before)

        texts = {token: text_of([token]) for token in set(chain.from_iterable(rows))}
        pieces: list[list[str]] = []
        for row in rows:
            pieces.append([])
            for is_torn, run in groupby(row, lambda token: _TORN in texts[token]):
                part: list[int] = []
                text = ""
                for token in run:
                    part.append(token)
                    text = text_of(part) if is_torn else texts[token]
                    if not text.endswith(_TORN):
                        pieces[-1] += [text, *[""] * (len(part) - 1)]
                        part = []
                if part:  # bytes that are no character, or the beginning of one
                    pieces[-1] += [text, *[""] * (len(part) - 1)]
        return pieces

    def _whole_token(self) -> int:
        """An ordinary token that has a text of its own, and is not part of a character."""
        for token in sorted(self.ids):
            text = self.decode([token]) if self.is_ordinary(token) else ""
            if text.strip() and _TORN not in text:
                return token
        raise AssertionError("a tokenizer is loaded only if it has tokens for text")

    def ending_with(self, end_ids: Collection[int]) -> Tokenizer:
        """The same tokenizer, with these further tokens that end a response."""
        return Tokenizer(self._backend, end_ids, self._date)

    def shows(self, string: str) -> bool:
        """Whether the text of a response can contain `string`."""
        texts = (string, f"a{string}", f"a{string}a")
        return any(string in self.decode(self.encode(text)) for text in texts)

    def special_id(self, string: str) -> int | None:
        """The id of the special token that is written `string`, or None if there is none.

        A special token is one that decoded text does not show.
        """
        token: int | None = self._backend.get_vocab().get(string)
        if token is None or self.is_ordinary(token) or self.decode([token]):
            return None
        return token

    def holding(self, string: str) -> list[int]:
        """The tokens in whose text `string` occurs, special tokens included."""
        return [i for i in sorted(self.ids) if string in self.decode([i], False)]

    def is_ordinary(self, token: int) -> bool:
        """Whether a token is part of the vocabulary that was trained, and was not added to it."""
        return token not in self._backend.added_tokens_decoder

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Tool] | None = None,
    ) -> str:
        """The text that the chat template makes of `messages`, and of `tools` if it writes them.

        `tools` are the JSON schemas of functions that the assistant may call. With
        `add_generation_prompt` the text ends with the header of the assistant's answer. A DataError
        says that there is no template, or that it refuses the messages.
        """
        if not self.has_chat_template:
            raise DataError(
                f"tokenizer {self._backend.name_or_path!r} has no chat template, which chat "
                "prompts need; set data.chat_template to a jinja file, or give prompts as plain "
                "strings"
            )

        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if tools:
            options["tools"] = [dict(tool) for tool in tools]
        if self._date:
            options["strftime_now"] = datetime.fromisoformat(self._date).strftime
        try:
            return _render(self._backend, [dict(message) for message in messages], **options)
        except _TemplateLimitError as error:
            raise DataError(f"the chat template {error}; mend it") from None
        except Exception as error:  # a template is a program, and may fail in any way
            raise DataError(f"the chat template refuses the messages: {_brief(error)}") from error

    def encode_prompt(
        self, prompt: Prompt, tools: Sequence[Tool] | None = None
    ) -> tuple[str, list[int]]:
        """The text of a prompt as the model sees it, and its tokens.

        The chat template writes `tools` beside messages; a string has none.
        """
        if isinstance(prompt, str):
            return prompt, self._with_begin(prompt)
        text = self.apply_chat_template(prompt, tools=tools)
        return text, self.encode(text)

    def _with_begin(self, text: str) -> list[int]:
        """Tokens of a text that begins a sequence, with what the model family puts before it.

        That is not repeated if it stands in the text, as in one that a chat template has made.
        """
        ids = self.encode(text)
        whole = self.encode(text, add_special_tokens=True)
        for begin in range(len(whole) - len(ids), -1, -1):
            end = begin + len(ids)  # what is added behind is left out: the response must follow
            if whole[begin:end] == ids:
                return ids if ids[:begin] == whole[:begin] else whole[:end]
        return whole

    def encode_response(self, text: str) -> list[int]:
        """Tokens of a response: the tokens of its text, then eos, if that does not end it already.

        Blanks behind an eos, as a chat template may write them, are left out.
        """
        ids = self.encode(text)
        if self.eos_id in ids:
            end = len(ids) - ids[::-1].index(self.eos_id)
            if not self.decode(ids[end:], skip_special_tokens=False).strip():
                return ids[:end]
        return [*ids, self.eos_id]

    def save_pretrained(self, directory: Path, pad_id: int | None = None) -> None:
        """Write the tokenizer's files into `directory`: those that it was loaded from, if it can.

        `pad_id` is the padding token of the written tokenizer; None: the same.
        """
        backend = self._backend
        if backend.name_or_path and holds_tokenizer(Path(backend.name_or_path)):
            copy_files(Path(backend.name_or_path), directory)
        else:
            backend.save_pretrained(directory)
        is_other = pad_id not in (None, backend.pad_token_id)
        pad_token = backend.convert_ids_to_tokens(pad_id) if is_other else None
        # A source may hold several templates, each with a name.
        template = backend.chat_template if isinstance(backend.chat_template, str) else None
        adapt_files(directory, type(backend).__name__, template, pad_token)


def load_tokenizer(
    path: str | Path, chat_template: str | Path | None = None, date: str = ""
) -> Tokenizer:
    """Load a tokenizer from local files; DataError if they are missing or malformed.

    Args:
        path: a Hugging Face directory, a directory with only sentencepiece's tokenizer.model, or
            that file itself.
        chat_template: a jinja file that replaces the tokenizer's own chat template.
        date: the day that a chat template writes as today, such as "2026-01-31"; "": today's.
    """
    backend = _load_backend(Path(path))
    if chat_template is not None:
        _set_chat_template(backend, chat_template)

    tokenizer = Tokenizer(backend, date=date)
    if len(tokenizer.chat_template) > _LONGEST_TEMPLATE:
        raise DataError(
            f"the chat template of {chat_template or path} has more than {_LONGEST_TEMPLATE} "
            "characters, so it is none; give another data.chat_template"
        )
    if chat_template is not None:
        _try_chat_template(backend, chat_template)

    if not any(tokenizer.is_ordinary(token) for token in tokenizer.ids):
        _check_vocabulary(Path(path))
        raise DataError(f"the tokenizer {path} has no tokens for text; its files are damaged")
    return tokenizer


def load_vocabulary(path: str | Path) -> dict[str, int]:
    """The id of each token of a tokenizer, which `tokenizer.json` says soonest."""
    file = Path(path) / _FAST_FILE
    model = read_object(file, DataError) if file.is_file() else {}
    try:
        added = {token["content"]: token["id"] for token in model["added_tokens"]}
        return dict(model["model"]["vocab"] | added)
    except (LookupError, TypeError):  # it is in another file, or a list
        return dict(_load_backend(Path(path)).get_vocab())


def holds_tokenizer(directory: Path) -> bool:
    """Whether there is any file of a tokenizer in `directory`."""
    return (directory / CONFIG_FILE).is_file() or holds_vocabulary(directory)


def holds_vocabulary(directory: Path) -> bool:
    """Whether there is a file of a tokenizer in `directory` that has its tokens."""
    return any((directory / name).is_file() for name in _VOCABULARIES)


def _set_chat_template(backend: PreTrainedTokenizerBase, file: str | Path) -> None:
    """Replace the tokenizer's chat template by the beginning of `file`; DataError if unreadable."""
    try:
        with Path(file).open(encoding="utf-8") as stream:
            backend.chat_template = stream.read(_LONGEST_TEMPLATE + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise DataError(f"cannot read the chat template {file}: {reason}") from error


def _try_chat_template(backend: PreTrainedTokenizerBase, file: str | Path) -> None:
    """Apply the chat template to a message; DataError if it is not jinja, or does not end."""
    try:
        _render(backend, [{"role": "user", "content": "a"}])
    except _TemplateLimitError as error:
        raise DataError(f"the chat template {file} {error}; mend it") from None
    except jinja2.TemplateSyntaxError as error:
        raise DataError(f"the chat template {file} is no jinja: {_brief(error)}") from error
    except Exception as error:  # it may refuse this message and take those of the data
        logger.debug("the chat template %s refuses a message of the user: %s", file, error)


class _TemplateLimitError(Exception):
    """A chat template does not end, or writes without bound."""


def _render(
    backend: PreTrainedTokenizerBase, conversation: list[dict[str, Any]], **options: Any
) -> str:
    """Apply the chat template to a conversation, with calls in the form that it takes.

    Some templates take arguments as an object, others as JSON text; and beside calls, some take
    None as an empty content.
    """
    if not any(message.get("tool_calls") for message in conversation):
        return _apply(backend, conversation, **options)

    empty = None if _TESTS_NONE.search(str(backend.chat_template)) else ""
    failures: list[Exception] = []
    for as_text in (False, True):
        form = [_with_arguments(message, as_text, empty) for message in conversation]
        try:
            text = _apply(backend, form, **options)
        except _TemplateLimitError:
            raise
        except Exception as error:  # a template is a program, and may fail in any way
            failures.append(error)
            continue
        calls = chain.from_iterable(message.get("tool_calls") or () for message in form)
        objects = [str(call["function"]["arguments"]) for call in calls]
        # A template that wants text writes an object as Python does, as contents may do too.
        quoted = "\n".join(str(message.get("content")) for message in form)
        if as_text or all(text.count(shown) <= quoted.count(shown) for shown in objects):
            return text
    raise failures[0]


def _with_arguments(message: Mapping[str, Any], as_text: bool, empty: str | None) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON text, or as objects."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if as_text != isinstance(arguments, str):
            arguments = (
                json.dumps(arguments, ensure_ascii=False) if as_text else json.loads(arguments)
            )
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "content": message.get("content") or empty, "tool_calls": calls}


def _apply(
    backend: PreTrainedTokenizerBase, conversation: list[dict[str, Any]], **options: Any
) -> str:
    """Apply the chat template to messages as they are, within limits of time and length.

    The time is that of the processor, so that a busy machine does not count. The limit needs a
    signal, which Python delivers only to the main thread; so in other threads there is none.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread:
        before = signal.signal(signal.SIGVTALRM, _end_template)
        signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_RENDER_S)
    try:
        text: str = backend.apply_chat_template(conversation, tokenize=False, **options)
    finally:
        if is_main_thread:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)

    given = len(str(conversation)) + len(str(options))
    if len(text) > _LONGEST_TEMPLATE + _MOST_COPIES * given:
        raise _TemplateLimitError(f"makes {len(text)} characters of one conversation")
    return text


def _end_template(number: int, frame: FrameType | None) -> None:
    raise _TemplateLimitError(f"has not ended after {_LONGEST_RENDER_S:g} s of computing")


def _load_backend(path: Path) -> PreTrainedTokenizerBase:
    if path.is_file():
        return convert_sentencepiece(path)
    if not path.is_dir():
        raise DataError(
            f"tokenizer {path} does not exist; give a local directory (fetch one with "
            "`hf download`)"
        )

    refuse_pointer(path / MODEL_FILE, DataError)
    model, config = (
        read_object(file, DataError) if file.is_file() else None
        for file in (path / _FAST_FILE, path / CONFIG_FILE)
    )
    if (path / MODEL_FILE).is_file() and model is None and config is None:
        return convert_sentencepiece(path / MODEL_FILE)
    if model is not None and not isinstance(model.get("model"), dict):
        raise DataError(f'{path / _FAST_FILE}: no "model", so it is no tokenizer; save it anew')

    # AutoTokenizer chooses a class by the model type in config.json, and some of these classes
    # (Qwen2) ignore tokenizer.json. That is enough where no class builds a pipeline of its own.
    named = None if config is None else config.get("tokenizer_class")
    is_generic = model is not None and named in _GENERIC_CLASSES
    try:
        loader = PreTrainedTokenizerFast if is_generic else AutoTokenizer
        backend: PreTrainedTokenizerBase = loader.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        backend.encode("")  # some mistakes come out only here
    except Exception as error:  # of many types: transformers checks little of what it reads
        if "trust_remote_code" in str(error):
            raise DataError(
                f"the tokenizer {path} needs Python code of its own (auto_map), which is never "
                "run; save it anew as a plain tokenizer.json"
            ) from None
        _check_vocabulary(path)
        if model is None and (path / MODEL_FILE).is_file():
            check_sentencepiece(path / MODEL_FILE)
        raise DataError(f"cannot load a tokenizer from {path}: {_brief(error)}") from error
    return backend


def _check_vocabulary(path: Path) -> None:
    """Raise a DataError if the directory has no file with tokens.

    Call it only for a tokenizer that cannot be loaded, since a few (of bytes) need no such file.
    """
    if not path.is_file() and not any((path / name).is_file() for name in _VOCABULARIES):
        raise DataError(
            f"tokenizer {path}: the directory holds no {_FAST_FILE}, {MODEL_FILE}, vocab.json or "
            "vocab.txt; name one that holds the tokenizer's files"
        ) from None


def _brief(error: Exception) -> str:
    """The error's message on one line of bounded length, or its type if it says little."""
    words = " ".join(str(error).split())
    if len(words) > _LONGEST_REASON:
        words = f"{words[:_LONGEST_REASON]} ..."
    if isinstance(error, OSError | ValueError | jinja2.TemplateError):
        return words
    return f"{type(error).__name__}: {words}"
