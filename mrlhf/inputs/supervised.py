"""Reads the rows that a supervised training learns from, and those that it validates on.

It knows the keys of the data. It does not know how a file is read, nor what is learned of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrlhf.config.data import SplitDataSection
from mrlhf.config.roots import AnySupervised, CriticConfig, PreferenceConfig, RewardModelConfig
from mrlhf.data.conversations import prompt_of
from mrlhf.data.preferences import (
    PreferenceColumns,
    PreferenceRows,
    encode_preferences,
    prompt_reader,
    split_by_prompt,
)
from mrlhf.data.rollouts import encode_rollouts
from mrlhf.data.rows import Row, read_rows
from mrlhf.data.sft import encode_sft
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.data.unknown import warn_of_unknown_tokens
from mrlhf.errors import DataError
from mrlhf.inputs.repeated import warn_of_files_named_twice, warn_of_shared_rows
from mrlhf.parallel.segments import Segments


def examples_and_held_out(
    config: AnySupervised, tokenizer: Tokenizer, split: bool
) -> tuple[Any, Any]:
    """The rows to train and to validate on, as of `RowInputs`; empty lists where none are named.

    With `split`, those to validate on may be some of the others.
    """
    train_rows, held_out_rows = _split_rows(config, split)
    examples = _encoded(config, "data.train_files", train_rows, tokenizer)
    held_out = _encoded(config, "data.val_files", held_out_rows, tokenizer)
    _check_targets(config, examples, train_rows)
    warn_of_shared_rows("data.val_files", _tokens(held_out), "data.train_files", _tokens(examples))
    return examples, held_out


def _check_targets(config: AnySupervised, examples: Any, rows: Sequence[Row]) -> None:
    """Refuse a column of numbers without any in the rows to train on."""
    if not isinstance(config, RewardModelConfig) or not rows or examples.targets is None:
        return
    for column, numbers in zip(config.rm.target_column, examples.targets.T, strict=True):
        if numbers.isnan().all():
            raise DataError(
                f"rm.target_column names {column!r}, and no row to train on has a number there; "
                f"{rows[0].where} has {sorted(rows[0].fields)}"
            )


def _split_rows(config: AnySupervised, split: bool) -> tuple[list[Row], list[Row]]:
    data = config.data
    prompt = prompt_reader(config.rows) if isinstance(config, PreferenceConfig) else prompt_of
    train_rows = _rows("data.train_files", data.train_files)
    held_out_rows = _rows("data.val_files", data.val_files)
    if train_rows and split and isinstance(data, SplitDataSection):
        fraction = data.held_out_fraction
        train_rows, held_out_rows = split_by_prompt(train_rows, fraction, config.seed, prompt)
        if config.trainer.test_freq and not held_out_rows:
            raise DataError(
                f"trainer.test_freq {config.trainer.test_freq} needs rows to validate on, but "
                f"data.held_out_fraction {fraction} of data.train_files keeps "
                "none; raise it, or name data.val_files"
            )
    return train_rows, held_out_rows


def _rows(key: str, files: Sequence[str]) -> list[Row]:
    warn_of_files_named_twice(key, files)
    return read_rows(files) if files else []


def _encoded(config: AnySupervised, key: str, rows: Sequence[Row], tokenizer: Tokenizer) -> Any:
    """The rows of `key` as tokens."""
    if not rows:
        return []
    if isinstance(config, PreferenceConfig):
        return _pairs(config, rows, tokenizer)
    encode: Any = encode_rollouts if isinstance(config, CriticConfig) else encode_sft
    data = config.data
    examples = encode(rows, tokenizer, max_length=data.max_length, overlong=data.overlong)
    warn_of_unknown_tokens([example.token_ids for example in examples], tokenizer, key)
    return list(examples)


def _tokens(examples: Any) -> list[tuple[Any, ...]]:
    """The tokens of each row, or those of each of its responses."""
    if isinstance(examples, PreferenceRows):
        return [tuple(map(tuple, responses)) for responses in examples.responses]
    return [tuple(example.token_ids) for example in examples]


def _pairs(config: PreferenceConfig, rows: Sequence[Row], tokenizer: Tokenizer) -> PreferenceRows:
    columns = PreferenceColumns()
    if isinstance(config, RewardModelConfig):
        rm = config.rm
        columns = PreferenceColumns(rm.rows, rm.margin_column, rm.tie_column, (*rm.target_column,))
    pairs = encode_preferences(
        rows,
        tokenizer,
        max_length=config.data.max_length,
        overlong=config.data.overlong,
        columns=columns,
    )
    _check_micro_batch(config, pairs)
    every = [response for responses in pairs.responses for response in responses]
    warn_of_unknown_tokens(every, tokenizer, f"the preference {config.rows}")
    return pairs


def _check_micro_batch(config: PreferenceConfig, rows: PreferenceRows) -> None:
    """Refuse a row whose responses, which stay together, do not fit into a micro-batch."""
    padded = Segments(size=config.model.cp).padded
    tokens = [sum(padded(len(ids)) for ids in responses) for responses in rows.responses]
    most = max(tokens)
    if most > config.model.micro_batch_tokens:
        count = len(rows.responses[tokens.index(most)])
        raise DataError(
            f"model.micro_batch_tokens {config.model.micro_batch_tokens} is less than {count} "
            f"responses of a prompt, {most} tokens; raise it to {most}, or give fewer responses"
        )
