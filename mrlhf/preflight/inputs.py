"""Reads everything that a run needs beside its models, before any of them is built: the tokenizer,
the data and the user's reward functions.

The trainers and `--dry-run` call the same functions. It knows which key names which input, and what
must fit together. It does not know how a file is read, nor what is done with its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from mrlhf.batch import Prompts
from mrlhf.config.data import PromptDataSection, SupervisedDataSection
from mrlhf.config.reward import RewardSection
from mrlhf.config.roots import AnyConfig, PPOConfig, PreferenceConfig, SFTConfig
from mrlhf.data.preferences import PreferencePairs, encode_preferences, split_by_prompt
from mrlhf.data.prompts import PromptDataset
from mrlhf.data.rows import Row, read_rows
from mrlhf.data.sft import SftExample, encode_sft
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.data.unknown import warn_of_lost_characters, warn_of_unknown_tokens
from mrlhf.errors import DataError
from mrlhf.models.families import load_spec
from mrlhf.models.generation_config import end_token_ids, read_generation_config
from mrlhf.preflight.model_checks import head_of
from mrlhf.preflight.paths import TOKENIZER, InputPath
from mrlhf.preflight.shared_rows import warn_of_files_named_twice, warn_of_shared_rows
from mrlhf.preflight.vocabulary import (
    Endings,
    check_vocabularies,
    find_endings,
    warn_of_end_tokens,
    warn_of_other_end,
    warn_of_undrawn,
)
from mrlhf.rewards.combine import RewardFunction
from mrlhf.rewards.rules import answer_rules
from mrlhf.rewards.worker_process import Limits

DataSection = PromptDataSection | SupervisedDataSection
Split = Literal["train", "val", "test"]
FilesKey = Literal["train_files", "val_files"]
InputsT = TypeVar("InputsT", "PPOInputs", "SFTInputs", "PreferenceInputs")


@dataclass(frozen=True)
class PPOInputs:
    """What a PPO run reads.

    Attributes:
        tokenizer: the tokenizer of all models.
        endings: what ends a response.
        generation_config: the text of the actor's `generation_config.json`, if it has one.
        prompts: the training prompts.
        held_out: the prompts of `data.val_files` as "val" and those of `data.test_files` as "test",
            as far as there are any.
        steps: training steps of the run.
        reward: the terms of the reward; users' functions are running.
    """

    tokenizer: Tokenizer
    endings: Endings
    generation_config: str | None
    prompts: PromptDataset
    held_out: Mapping[str, Prompts]
    steps: int
    reward: RewardFunction


@dataclass(frozen=True)
class SFTInputs:
    """What supervised fine-tuning reads.

    Attributes:
        tokenizer: the tokenizer of the model.
        generation_config: the text of the model's `generation_config.json`, if it has one.
        examples: the training rows.
        held_out: the validation rows; empty if there are none.
        steps: training steps of the run.
    """

    tokenizer: Tokenizer
    generation_config: str | None
    examples: list[SftExample]
    held_out: list[SftExample]
    steps: int


@dataclass(frozen=True)
class PreferenceInputs:
    """What a training on preference pairs reads.

    Attributes:
        tokenizer: the tokenizer of the model.
        generation_config: the text of the model's `generation_config.json`; None if it has none, or
            if the model generates nothing.
        pairs: the training pairs.
        held_out: the validation pairs, if there are any.
        steps: training steps of the run.
    """

    tokenizer: Tokenizer
    generation_config: str | None
    pairs: PreferencePairs
    held_out: PreferencePairs | None
    steps: int


def read_ppo_inputs(config: PPOConfig) -> PPOInputs:
    """Read and check what a PPO run needs; its paths exist.

    Raises:
        ConfigError, DataError, RewardError: an input cannot be used; one line.
    """
    return _whole(_ppo_inputs(config, absent=()))


def read_sft_inputs(config: SFTConfig) -> SFTInputs:
    """Read and check what supervised fine-tuning needs; its paths exist.

    Raises:
        ConfigError, DataError: an input cannot be used; one line.
    """
    return _whole(_sft_inputs(config, absent=()))


def read_preference_inputs(config: PreferenceConfig) -> PreferenceInputs:
    """Read and check what a training on preference pairs needs; its paths exist.

    Raises:
        ConfigError, DataError: an input cannot be used; one line.
    """
    return _whole(_preference_inputs(config, absent=()))


def _whole(inputs: InputsT | None) -> InputsT:
    assert inputs is not None, "nothing is absent, so everything is read"
    return inputs


def check_inputs(config: AnyConfig, absent: Collection[InputPath]) -> int | None:
    """Check the inputs as a run would, except those that are `absent`.

    Returns:
        The training steps of the run; None if an absent input is needed to know them.

    Raises:
        ConfigError, DataError, RewardError: an input cannot be used; one line.
    """
    inputs: PPOInputs | SFTInputs | PreferenceInputs | None
    if isinstance(config, PPOConfig):
        inputs = _ppo_inputs(config, absent)
        if inputs is not None:
            inputs.reward.close()
    elif isinstance(config, SFTConfig):
        inputs = _sft_inputs(config, absent)
    else:
        inputs = _preference_inputs(config, absent)
    return None if inputs is None else inputs.steps


def _ppo_inputs(config: PPOConfig, absent: Collection[InputPath]) -> PPOInputs | None:
    """The inputs of a PPO run; None if some are absent, after the others have been checked."""
    tokenizer = _tokenizer(config.data, absent)
    actor_is_here = bool(_here([config.actor.path], absent))
    generation_config = read_generation_config(config.actor.path) if actor_is_here else None
    endings = None
    prompts = None
    held_out: dict[str, Prompts] = {}
    if tokenizer is not None:
        end_tokens = end_token_ids(config.actor.path) if actor_is_here else {}
        tokenizer = tokenizer.ending_with(end_tokens)
        endings = find_endings(
            config.rollout.stop, config.rollout.stop_token_ids, end_tokens, tokenizer
        )
        warn_of_end_tokens(end_tokens, tokenizer)
        _check_vocabularies(config, tokenizer, absent)
        prompts = _prompts(config, "train", absent, tokenizer)
        known: dict[str, Prompts] = {}
        if prompts is not None:
            known["train"] = prompts.batch(range(len(prompts)))
        splits: tuple[Split, ...] = ("val", "test")
        for split in splits:
            rows = _prompts(config, split, absent, tokenizer)
            if rows is not None:
                held_out[split] = rows.batch(range(len(rows)))
                _compare_prompts(split, held_out[split], known)
                known[split] = held_out[split]

    if absent:
        _check_rewards(config.reward, absent)
        return None
    assert tokenizer is not None and endings is not None and prompts is not None
    return PPOInputs(
        tokenizer=tokenizer,
        endings=endings,
        generation_config=generation_config,
        prompts=prompts,
        held_out=held_out,
        steps=_ppo_steps(config, len(prompts)),
        reward=load_rewards(config.reward),
    )


def _sft_inputs(config: SFTConfig, absent: Collection[InputPath]) -> SFTInputs | None:
    """The inputs of fine-tuning; None if some are absent, after the others have been checked."""
    tokenizer = _tokenizer(config.data, absent)
    examples: list[SftExample] = []
    held_out: list[SftExample] = []
    if tokenizer is not None:
        _check_vocabularies(config, tokenizer, absent)
        examples = _examples(config.data, "train_files", absent, tokenizer)
        held_out = _examples(config.data, "val_files", absent, tokenizer)
        rows = [tuple(example.token_ids) for example in held_out]
        others = [tuple(example.token_ids) for example in examples]
        warn_of_shared_rows("data.val_files", rows, "data.train_files", others)

    if absent:
        return None
    assert tokenizer is not None
    steps = _supervised_steps(config, len(examples), "rows")
    generation_config = read_generation_config(config.model.path)
    return SFTInputs(tokenizer, generation_config, examples, held_out, steps)


def _preference_inputs(
    config: PreferenceConfig, absent: Collection[InputPath]
) -> PreferenceInputs | None:
    """The inputs of a training on pairs; None if some are absent, as in `_sft_inputs`."""
    data = config.data
    tokenizer = _tokenizer(data, absent)
    pairs = None
    held_out = None
    if tokenizer is not None:
        _check_vocabularies(config, tokenizer, absent)
        train_rows = _rows("data.train_files", data.train_files, absent)
        held_out_rows = _rows("data.val_files", data.val_files, absent)
        if train_rows and not data.val_files:
            train_rows, held_out_rows = split_by_prompt(
                train_rows, data.held_out_fraction, config.seed
            )
            if config.trainer.test_freq and not held_out_rows:
                raise DataError(
                    f"trainer.test_freq {config.trainer.test_freq} needs rows to validate on, but "
                    f"data.held_out_fraction {data.held_out_fraction} of data.train_files keeps "
                    "none; raise it, or name data.val_files"
                )
        pairs = _pairs(data, train_rows, tokenizer)
        held_out = _pairs(data, held_out_rows, tokenizer)
        if pairs is not None and held_out is not None:
            warn_of_shared_rows(
                "data.val_files", _sides(held_out), "data.train_files", _sides(pairs)
            )
        for some in (pairs, held_out):
            if some is not None:
                sides = [*some.chosen_ids, *some.rejected_ids]
                warn_of_unknown_tokens(sides, tokenizer, "the preference pairs")

    if absent:
        return None
    assert tokenizer is not None and pairs is not None
    steps = _supervised_steps(config, len(pairs), "pairs")
    generates = head_of(config, "model") == "lm"
    generation_config = read_generation_config(config.model.path) if generates else None
    return PreferenceInputs(tokenizer, generation_config, pairs, held_out, steps)


def load_rewards(section: RewardSection) -> RewardFunction:
    """The terms of the reward; users' functions are started.

    Raises:
        ConfigError, RewardError: a term is unknown, or a user's function cannot be used.
    """
    return RewardFunction(
        [(term.name, term.weight) for term in section.terms],
        limits=Limits(section.timeout_s, section.memory_mb, section.max_processes),
    )


def _check_rewards(section: RewardSection, absent: Collection[InputPath]) -> None:
    """Load the terms whose files are here, and end them again."""
    here = [
        term
        for term in section.terms
        if not any(path.path == term.name.rpartition(":")[0] for path in absent)
    ]
    if here:
        load_rewards(section.model_copy(update={"terms": here})).close()


def _here(files: Sequence[str], absent: Collection[InputPath]) -> list[str]:
    # A directory without a tokenizer may hold a model.
    missing = {path.path for path in absent if path.key != TOKENIZER}
    return [file for file in files if file not in missing]


def _tokenizer(data: DataSection, absent: Collection[InputPath]) -> Tokenizer | None:
    """The tokenizer with its template; None if one of them is absent."""
    needed = [data.tokenizer]
    if data.chat_template is not None:
        needed.append(data.chat_template)
    if _here(needed, absent) != needed or any(path.key == TOKENIZER for path in absent):
        return None
    try:
        return load_tokenizer(data.tokenizer, data.chat_template)
    except DataError as error:
        raise DataError(f"data.tokenizer: {error}") from error


def _check_vocabularies(
    config: AnyConfig, tokenizer: Tokenizer, absent: Collection[InputPath]
) -> None:
    """Refuse a tokenizer that makes tokens which a model does not have."""
    sizes = {
        name: load_spec(role.path, head_of(config, name)).vocab_size
        for name, role in config.roles().items()
        if _here([role.path], absent)
    }
    compared: tuple[str, ...] = ()
    if isinstance(config, PPOConfig) and config.needs_full_kl:
        compared = ("actor", "reference")
    check_vocabularies(sizes, tokenizer.highest_id, compared)
    if "actor" in sizes:
        warn_of_undrawn(sizes["actor"], tokenizer.ids)
    policy = "actor" if isinstance(config, PPOConfig) else "model"
    if policy in sizes and head_of(config, policy) == "lm":
        warn_of_other_end(end_token_ids(config.roles()[policy].path), tokenizer)


def _compare_prompts(split: str, held_out: Prompts, known: Mapping[str, Prompts]) -> None:
    """Warn of held-out prompts that other data have too."""
    rows = [tuple(ids) for ids in held_out.token_ids]
    for other, prompts in known.items():
        others = {tuple(ids) for ids in prompts.token_ids}
        warn_of_shared_rows(f"data.{split}_files", rows, f"data.{other}_files", others)


def _rows(key: str, files: Sequence[str], absent: Collection[InputPath]) -> list[Row]:
    here = _here(files, absent)
    warn_of_files_named_twice(key, here)
    return read_rows(here) if here else []


def _prompts(
    config: PPOConfig, split: Split, absent: Collection[InputPath], tokenizer: Tokenizer
) -> PromptDataset | None:
    data = config.data
    named = {"train": data.train_files, "val": data.val_files, "test": data.test_files}
    files = _here(named[split], absent)
    if not files:
        return None
    warn_of_files_named_twice(f"data.{split}_files", files)

    prompts = PromptDataset(
        files,
        tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        overlong=config.data.overlong_prompts,
        split=split,
        answer_rules=answer_rules(term.name for term in config.reward.terms),
    )

    every = prompts.batch(range(len(prompts)))
    warn_of_unknown_tokens(every.token_ids, tokenizer, f"data.{split}_files")
    warn_of_lost_characters(every.text, every.token_ids, tokenizer, f"data.{split}_files")
    return prompts


def _examples(
    data: SupervisedDataSection, key: FilesKey, absent: Collection[InputPath], tokenizer: Tokenizer
) -> list[SftExample]:
    files = data.train_files if key == "train_files" else data.val_files
    rows = _rows(f"data.{key}", files, absent)
    if not rows:
        return []
    examples = encode_sft(rows, tokenizer, max_length=data.max_length, overlong=data.overlong)
    tokens = [example.token_ids for example in examples]
    warn_of_unknown_tokens(tokens, tokenizer, f"data.{key}")
    return examples


def _sides(pairs: PreferencePairs) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Both sides of each pair."""
    both = zip(pairs.chosen_ids, pairs.rejected_ids, strict=True)
    return [(tuple(chosen), tuple(rejected)) for chosen, rejected in both]


def _pairs(
    data: SupervisedDataSection, rows: Sequence[Row], tokenizer: Tokenizer
) -> PreferencePairs | None:
    if not rows:
        return None
    return encode_preferences(rows, tokenizer, max_length=data.max_length, overlong=data.overlong)


def _ppo_steps(config: PPOConfig, rows: int) -> int:
    """Training steps of the run; batches that dynamic sampling adds to a step do not count.

    Raises:
        DataError: there would be none, or the prompts do not fill one batch.
    """
    drawn = config.data.gen_batch_size
    if drawn > rows:
        raise DataError(
            f"data.train_files hold {rows} prompts, which is less than data.gen_batch_size "
            f"{drawn}; give more prompts, or lower data.train_batch_size and data.gen_batch_size"
        )

    batch = config.prompts_per_step
    steps = config.trainer.steps(rows, batch)
    if steps < 1:
        raise DataError(
            f"data.train_files hold {rows} prompts, which is less than one batch of {batch}, so "
            "there would be no training step; give more prompts, lower data.train_batch_size, or "
            "set trainer.total_steps"
        )
    return steps


def _supervised_steps(config: SFTConfig | PreferenceConfig, rows: int, noun: str) -> int:
    """Training steps of the run.

    Raises:
        DataError: the rows do not fill one batch.
    """
    batch = config.data.batch_size
    if batch > rows:
        raise DataError(
            f"data.train_files hold {rows} {noun}, which is less than one batch of {batch}; give "
            "more, or lower data.batch_size"
        )
    return config.trainer.steps(rows, batch)
