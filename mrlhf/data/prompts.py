"""Rows of RL data as tokenised prompts with their reference answers.

It reads plain rows and rows in verl's schema. It does not know rewards, sampling order or models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Template

from mrlhf.batch import Prompts
from mrlhf.config.data import Overlong
from mrlhf.config.row_template import row_template
from mrlhf.config.sections import OwnPromptSection
from mrlhf.data.conversations import encode_prompt, prompt_of
from mrlhf.data.reference_answers import AnswerRules, reference_answer
from mrlhf.data.rows import Row, of_rows, read_rows, warn_of_dropped
from mrlhf.data.tokenizer import Prompt, Tokenizer
from mrlhf.errors import DataError

logger = logging.getLogger(__name__)

_VARIABLES = ("prompt", "ground_truth", "data_source", "extra_info")
_KNOWN_COLUMNS = ("prompt", "answer", "reward_model", "data_source", "extra_info")


@dataclass(frozen=True)
class OtherPrompts:
    """Makes for each row another prompt than the policy's, which another model reads."""

    key: str  # of the template
    template: Template
    most_tokens: int

    @staticmethod
    def of(role: str, section: OwnPromptSection, most_tokens: int) -> OtherPrompts:
        """The prompts of the section's template; ConfigError if it is malformed.

        `most_tokens` is the limit if the section has none of its own.
        """
        key = f"{role}.template"
        template = row_template(key, section.template or "", "prompt", _VARIABLES)
        return OtherPrompts(key, template, section.max_prompt_length or most_tokens)

    def prompt(self, row: Row, prompt: Prompt, *others: Any) -> Prompt:
        """The prompt of a row, with another last message; DataError if the template fails on it.

        So it does if it shows the answer of a row that has none.
        """
        last = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        facts = zip(_VARIABLES, (last, *others), strict=True)
        try:
            text = self.template.render({name: x for name, x in facts if x is not None})
        except Exception as error:  # a template is a program, and may fail in any way
            raise DataError(f"{row.where}: {self.key} fails: {error}") from error
        return text if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": text}]


class PromptDataset:
    """The prompts of one or several files, tokenised once; `dropped` rows were too long.

    `other_ids` are the tokens that another role reads instead of each prompt, by role and uid.

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
        split: str = "train",
        answer_rules: AnswerRules = MappingProxyType({}),
        tools_of: Callable[[str], Sequence[Mapping[str, Any]]] | None = None,
        adds_to_prompt: Callable[[str], bool] = lambda source: False,
        others: Mapping[str, OtherPrompts] = MappingProxyType({}),
    ) -> None:
        """Read and tokenise.

        Args:
            files: jsonl or parquet files.
            max_prompt_length: the most tokens of a prompt.
            overlong: refuse a longer prompt, or drop it and count it.
            split: the value of "split" in the `extra_info` of rows that do not state one.
            answer_rules: the rules that need an answer in every row; none: the answer may be left
                out.
            tools_of: for episodes of several turns, the tools that prompts of a data source show.
                Then a prompt that is a string is a message of the user, and each row's messages
                stand in its `extra_info` as "prompt".
            adds_to_prompt: whether an environment may add to the prompts of a data source, so that
                rows with the same prompt may have different answers.
            others: the prompts that other roles read instead, by role.

        Raises:
            DataError: a row is malformed or too long, no row is left, or a rule cannot find any
                response right.
        """
        rows = read_rows(files)
        entries: list[tuple[Any, ...]] = []
        self.other_ids: dict[str, dict[int, list[int]]] = {role: {} for role in others}
        for uid, row in enumerate(rows):
            source = _data_source(row)
            prompt = prompt_of(row)
            extra_info = _extra_info(row, uid, split)
            tools: Sequence[Mapping[str, Any]] = ()
            if tools_of is not None:
                if isinstance(prompt, str):
                    prompt = [{"role": "user", "content": prompt}]
                extra_info["prompt"] = prompt
                tools = tools_of(source)
            text, token_ids = encode_prompt(row, prompt, tokenizer, tools)
            answer = reference_answer(row, answer_rules)
            lengths = {"data.max_prompt_length": (len(token_ids), max_prompt_length)}
            for role, others_of_role in others.items():
                other = others_of_role.prompt(row, prompt, answer, source, extra_info)
                self.other_ids[role][uid] = ids = encode_prompt(row, other, tokenizer)[1]
                lengths[f"{role}.max_prompt_length"] = (len(ids), others_of_role.most_tokens)
            too_long = {key: sizes for key, sizes in lengths.items() if sizes[0] > sizes[1]}
            if not too_long:
                entries.append((token_ids, uid, text, source, answer, extra_info))
            elif overlong == "error":
                key, (tokens, most) = next(iter(too_long.items()))
                raise DataError(
                    f"{row.where}: the prompt has {tokens} tokens, more than {key} {most}; raise "
                    "it, or set data.overlong_prompts to drop"
                )

        self.dropped = len(rows) - len(entries)
        if not entries:
            raise DataError(
                f"all {len(rows)} prompts are longer than data.max_prompt_length "
                f"{max_prompt_length}"
            )
        warn_of_dropped("prompts", self.dropped, rows, max_prompt_length)
        self._prompts = Prompts(*map(list, zip(*entries, strict=True)))
        self._check_answers(rows, answer_rules)
        self._report_copies(rows, adds_to_prompt)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompts:
        """Prompt `index` as a batch of one."""
        return self.batch([index])

    def with_uids(self, uids: Sequence[int]) -> Prompts:
        """The prompts with these uids, in that order; DataError if there is no such prompt."""
        indices = {uid: index for index, uid in enumerate(self._prompts.uid)}
        unknown = sorted(set(uids) - indices.keys())
        if unknown:
            raise DataError(
                f"no prompt has the uid {unknown[0]}, which the checkpoint names; restore the data "
                "that the run began with"
            )
        return self.batch([indices[uid] for uid in uids])

    def batch(self, indices: Sequence[int]) -> Prompts:
        """The prompts at `indices`, in that order."""
        return self._prompts.select(indices)

    def answered(self, tokenizer: Tokenizer, longest: int) -> list[tuple[list[int], list[int]]]:
        """The tokens of each prompt and of its reference answer, which is text.

        Raises:
            DataError: an answer has more than `longest` tokens.
        """
        answers = [tokenizer.encode_response(text) for text in self._prompts.ground_truth]
        for uid, answer in zip(self._prompts.uid, answers, strict=True):
            if len(answer) > longest:
                raise DataError(
                    f"data.train_files: the reference answer of row {uid + 1} has {len(answer)} "
                    f"tokens, more than data.max_response_length {longest}; raise it, or leave "
                    "reward_model.normalise out"
                )
        return list(zip(self._prompts.token_ids, answers, strict=True))

    def responses(self, tokenizer: Tokenizer, longest: int) -> dict[int, list[list[int]]]:
        """The tokens of the texts in the column `response` of each row, by uid.

        Raises:
            DataError: a row has no such text, or one has more than `longest` tokens.
        """
        responses = {}
        for uid, row in zip(self._prompts.uid, self._prompts.extra_info, strict=True):
            texts = row.get("response")
            texts = [texts] if isinstance(texts, str) else texts
            if not isinstance(texts, list) or not texts or {*map(type, texts)} != {str}:
                raise DataError(
                    f"data.train_files: row {uid + 1} has no text in the column response, and no "
                    "list of texts, which algorithm.distillation.given_share needs; add it, or "
                    "leave that key out"
                )
            responses[uid] = [tokenizer.encode_response(text) for text in texts]
            tokens = max(map(len, responses[uid]))
            if tokens > longest:
                raise DataError(
                    f"data.train_files: a response of row {uid + 1} has {tokens} tokens, more than "
                    f"data.max_response_length {longest}; raise it, or leave "
                    "algorithm.distillation.given_share out"
                )
        return responses

    def _check_answers(self, rows: Sequence[Row], rules: AnswerRules) -> None:
        """Warn of answers with which a rule gives every response 0; DataError if all are such."""
        answers = self._prompts.ground_truth
        for rule, can_be_right in rules.items():
            hopeless = [index for index, answer in enumerate(answers) if not can_be_right(answer)]
            if not hopeless:
                continue

            first = hopeless[0]
            problem = (
                f"{rows[self._prompts.uid[first]].where}: {rule} finds no response right if the "
                f"answer is {answers[first][:80]!r}"
            )
            if len(hopeless) == len(answers):
                raise DataError(
                    f"{problem}, and so in every row; give answers that it can find in a response, "
                    "or use another term"
                )
            logger.warning("%s; so it is in %s", problem, of_rows(len(hopeless), rows))

    def _report_copies(self, rows: Sequence[Row], adds_to_prompt: Callable[[str], bool]) -> None:
        """Report how many prompts stand more than once, and warn if their answers differ."""
        prompts = self._prompts
        first_with: dict[tuple[int, ...], int] = {}
        copies = 0
        contradicting = []
        for index, token_ids in enumerate(prompts.token_ids):
            first = first_with.setdefault(tuple(token_ids), index)
            if first == index:
                continue
            copies += 1
            differs = prompts.ground_truth[first] != prompts.ground_truth[index]
            if differs and not adds_to_prompt(prompts.data_source[index]):
                contradicting.append((rows[prompts.uid[first]], rows[prompts.uid[index]]))

        if copies:
            logger.info("%s repeat the prompt of an earlier row", of_rows(copies, rows))
        if contradicting:
            earlier, other = contradicting[0]
            logger.warning(
                "another answer than that of an earlier row with the same prompt stands in %s; "
                "the first is %s, which contradicts %s",
                of_rows(len(contradicting), rows),
                other.where,
                earlier.where,
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

    columns = {key: value for key, value in row.fields.items() if value is not None}
    info = {key: value for key, value in columns.items() if key not in _KNOWN_COLUMNS}
    info |= own or {}
    for key, default in {"split": split, "index": uid}.items():
        if info.get(key) is None:
            info[key] = default
    return info
