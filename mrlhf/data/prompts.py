"""Rows of RL data as tokenised prompts with their reference answers.

It reads plain rows and rows in verl's schema. It does not know rewards, sampling order or models.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mrlhf.batch import Prompts
from mrlhf.data.rows import Row, read_rows
from mrlhf.data.tokenizer import Prompt, Tokenizer
from mrlhf.errors import DataError

__all__ = ["Overlong", "PromptDataset", "encode_prompt", "prompt_of"]

logger = logging.getLogger(__name__)

Overlong = Literal["error", "drop"]


@dataclass(frozen=True)
class _Entry:
    token_ids: list[int]
    uid: int
    text: str
    data_source: str
    ground_truth: str
    extra_info: dict[str, Any]


class PromptDataset:
    """The prompts of one or several files, tokenised once.

    A plain row is `{"prompt", "answer"}`, with `data_source` and `extra_info` optional. A row in
    verl's schema is `{"data_source", "prompt": [{"role", "content"}, ...],
    "reward_model": {"ground_truth"}, "extra_info"}`. In both, a prompt is a string or a list of
    chat messages. If a row has no `data_source`, the name of its file without the suffix is used.

    The uid of a prompt is the number of its row over all files, counted before rows are dropped.

    Attributes:
        dropped: number of rows left out because their prompts were too long.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Tokenizer,
        *,
        max_prompt_length: int,
        overlong: Overlong = "error",
        chat: bool = False,
    ) -> None:
        """Read and tokenise.

        Args:
            files: jsonl or parquet files.
            tokenizer: encodes the prompts.
            max_prompt_length: the most tokens of a prompt.
            overlong: refuse a longer prompt, or drop it and count it.
            chat: put plain string prompts through the chat template too.

        Raises:
            DataError: a row is malformed or too long, or no row is left.
        """
        rows = read_rows(files)
        self._entries: list[_Entry] = []
        for uid, row in enumerate(rows):
            entry = _entry(row, uid, tokenizer, chat)
            length = len(entry.token_ids)
            if length <= max_prompt_length:
                self._entries.append(entry)
            elif overlong == "error":
                raise DataError(
                    f"{row.where}: the prompt has {length} tokens, more than "
                    f"data.max_prompt_length {max_prompt_length}; raise it, or set "
                    "data.overlong_prompts to drop"
                )

        self.dropped = len(rows) - len(self._entries)
        if not self._entries:
            raise DataError(
                f"all {len(rows)} prompts are longer than data.max_prompt_length "
                f"{max_prompt_length}"
            )
        if self.dropped:
            logger.warning(
                "dropped %d of %d prompts longer than %d tokens",
                self.dropped,
                len(rows),
                max_prompt_length,
            )

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Prompts:
        """Prompt `index` as a batch of one."""
        return self.batch([index])

    def with_uids(self, uids: Sequence[int]) -> Prompts:
        """The prompts with these uids, in that order.

        Raises:
            DataError: there is no such prompt.
        """
        indices = {entry.uid: index for index, entry in enumerate(self._entries)}
        unknown = sorted(set(uids) - indices.keys())
        if unknown:
            raise DataError(
                f"no prompt has the uid {unknown[0]}, which the checkpoint names; restore the data "
                "that the run began with"
            )
        return self.batch([indices[uid] for uid in uids])

    def batch(self, indices: Sequence[int]) -> Prompts:
        """The prompts at `indices`, in that order."""
        entries = [self._entries[i] for i in indices]
        return Prompts(
            token_ids=[entry.token_ids for entry in entries],
            uid=[entry.uid for entry in entries],
            text=[entry.text for entry in entries],
            data_source=[entry.data_source for entry in entries],
            ground_truth=[entry.ground_truth for entry in entries],
            extra_info=[entry.extra_info for entry in entries],
        )


def prompt_of(row: Row) -> Prompt:
    """The row's prompt, a string or chat messages; DataError if it is neither."""
    prompt = row.require("prompt")
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        return prompt
    raise DataError(
        f'{row.where}: "prompt" must be a string or a list of {{"role", "content"}} messages'
    )


def encode_prompt(
    row: Row, prompt: Prompt, tokenizer: Tokenizer, chat: bool
) -> tuple[str, list[int]]:
    """Text and tokens of `prompt`; error messages name `row`, where it comes from.

    Raises:
        DataError: there is no token, or the chat template fails.
    """
    try:
        text, token_ids = tokenizer.encode_prompt(prompt, chat=chat)
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
    if not token_ids:
        raise DataError(f"{row.where}: the prompt is empty")
    return text, token_ids


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and value.get("content") is not None
    )


def _entry(row: Row, uid: int, tokenizer: Tokenizer, chat: bool) -> _Entry:
    text, token_ids = encode_prompt(row, prompt_of(row), tokenizer, chat)
    extra_info = row.fields.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        raise DataError(
            f"{row.where}: extra_info must be an object, found {type(extra_info).__name__}"
        )
    source = row.fields.get("data_source") or row.file.stem
    return _Entry(token_ids, uid, text, str(source), _ground_truth(row), extra_info)


def _ground_truth(row: Row) -> str:
    if "reward_model" in row.fields:
        section = row.require("reward_model")
        answer = section.get("ground_truth") if isinstance(section, dict) else None
        if answer is None:
            raise DataError(f'{row.where}: "reward_model" must be an object with a "ground_truth"')
    else:
        answer = row.require("answer")
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
