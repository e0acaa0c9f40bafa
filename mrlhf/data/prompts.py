"""Rows of RL data as tokenised prompts with their reference answers.

It reads plain rows and rows in verl's schema. It does not know rewards, sampling order or models.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from mrlhf.batch import Prompts
from mrlhf.data.conversations import encode_prompt, prompt_of
from mrlhf.data.reference_answers import AnswerRules, reference_answer
from mrlhf.data.rows import Row, of_rows, read_rows, warn_of_dropped
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import DataError

logger = logging.getLogger(__name__)

Overlong = Literal["error", "drop"]

_KNOWN_COLUMNS = ("prompt", "answer", "reward_model", "data_source", "extra_info")


@dataclass(frozen=True)
class _Entry:
    token_ids: list[int]
    uid: int
    text: str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


class PromptDataset:
    """The prompts of one or several files, tokenised once; `dropped` rows were too long.

    A plain row is `{"prompt", "answer"}`, with `data_source` and `extra_info` optional. A row in
    verl's schema is `{"data_source", "prompt": [{"role", "content"}, ...],
    "reward_model": {"ground_truth"}, "extra_info"}`. In both, a prompt is a string or a list of
    chat messages, and the answer is optional if no rule compares with it. If a row has no
    `data_source`, the name of its file without the suffix is used.

    The uid of a prompt is the number of its row over all files, counted before rows are dropped.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        tokenizer: Tokenizer,
        *,
        max_prompt_length: int,
        overlong: Overlong = "error",
        chat: bool = False,
        split: str = "train",
        answer_rules: AnswerRules = MappingProxyType({}),
    ) -> None:
        """Read and tokenise.

        Args:
            files: jsonl or parquet files.
            max_prompt_length: the most tokens of a prompt.
            overlong: refuse a longer prompt, or drop it and count it.
            chat: put plain string prompts through the chat template too.
            split: the value of "split" in the `extra_info` of rows that do not state one.
            answer_rules: the rules that need an answer in every row; none: the answer may be left
                out.

        Raises:
            DataError: a row is malformed or too long, no row is left, or a rule cannot find any
                response right.
        """
        rows = read_rows(files)
        self._entries: list[_Entry] = []
        for uid, row in enumerate(rows):
            entry = _entry(row, uid, split, tokenizer, answer_rules, chat)
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
        warn_of_dropped("prompts", self.dropped, rows, max_prompt_length)
        self._check_answers(rows, answer_rules)
        self._report_copies(rows)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Prompts:
        """Prompt `index` as a batch of one."""
        return self.batch([index])

    def with_uids(self, uids: Sequence[int]) -> Prompts:
        """The prompts with these uids, in that order; DataError if there is no such prompt."""
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
        entries = [self._entries[index] for index in indices]
        columns = {
            column.name: [getattr(entry, column.name) for entry in entries]
            for column in fields(_Entry)
        }
        return Prompts(**columns)

    def _check_answers(self, rows: Sequence[Row], rules: AnswerRules) -> None:
        """Warn of answers with which a rule gives every response 0; DataError if all are such."""
        for rule, can_be_right in rules.items():
            hopeless = [entry for entry in self._entries if not can_be_right(entry.ground_truth)]
            if not hopeless:
                continue

            first = hopeless[0]
            problem = (
                f"{rows[first.uid].where}: {rule} finds no response right if the answer is "
                f"{first.ground_truth[:80]!r}"
            )
            if len(hopeless) == len(self._entries):
                raise DataError(
                    f"{problem}, and so in every row; give answers that it can find in a response, "
                    "or use another term"
                )
            logger.warning("%s; so it is in %s", problem, of_rows(len(hopeless), rows))

    def _report_copies(self, rows: Sequence[Row]) -> None:
        """Report how many prompts stand more than once, and warn if their answers differ."""
        first_with: dict[tuple[int, ...], _Entry] = {}
        copies = 0
        contradicting = []
        for entry in self._entries:
            first = first_with.setdefault(tuple(entry.token_ids), entry)
            if first is entry:
                continue
            copies += 1
            if first.ground_truth != entry.ground_truth:
                contradicting.append((first, entry))

        if copies:
            logger.info("%s repeat the prompt of an earlier row", of_rows(copies, rows))
        if contradicting:
            first, other = contradicting[0]
            logger.warning(
                "another answer than that of an earlier row with the same prompt stands in %s; "
                "the first is %s, which contradicts %s",
                of_rows(len(contradicting), rows),
                rows[other.uid].where,
                rows[first.uid].where,
            )


def _entry(
    row: Row, uid: int, split: str, tokenizer: Tokenizer, rules: AnswerRules, chat: bool
) -> _Entry:
    text, token_ids = encode_prompt(row, prompt_of(row), tokenizer, chat)
    return _Entry(
        token_ids=token_ids,
        uid=uid,
        text=text,
        data_source=_data_source(row),
        ground_truth=reference_answer(row, rules),
        extra_info=_extra_info(row, uid, split),
    )


def _data_source(row: Row) -> str:
    source = row.fields.get("data_source")
    if source is None or source == "":
        return row.file.stem
    if isinstance(source, bool) or not isinstance(source, (str, int)):
        raise DataError(
            f"{row.where}: 'data_source' must be a string, found {type(source).__name__}"
        )
    return str(source)


def _extra_info(row: Row, uid: int, split: str) -> dict[str, Any]:
    """The facts about the row that the reward gets beside its prompt, answer and data source.

    These are the columns that have no meaning of their own, and the entries of `extra_info`, which
    stand in for columns of the same names. `split` and `index` are added if the row has none.
    """
    own = row.fields.get("extra_info")
    if own is not None and not isinstance(own, dict):
        raise DataError(f"{row.where}: extra_info must be an object, found {type(own).__name__}")

    info = {key: value for key, value in row.fields.items() if key not in _KNOWN_COLUMNS}
    info |= own or {}
    for key, default in {"split": split, "index": uid}.items():
        if info.get(key) is None:
            info[key] = default
    return info
