"""Reads all inputs of a run except its models, before any model is built: the tokenizer, the data
and the user's reward functions.

The trainers and `--dry-run` call the same functions. This file knows the keys of the inputs, and
the conditions between these. It does not know how a file is read, nor how its rows are used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from mrlhf.batch import Prompts
from mrlhf.config.data import PromptDataSection, SupervisedDataSection
from mrlhf.config.reward import RewardSection, RewardTermSection
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
InputsT = TypeVar("InputsT", "PPOInputs", "SFTInputs", "PreferenceInputs")


@dataclass(frozen=True)
class PPOInputs:
    """The inputs of a PPO run.

    Attributes:
        generation_config: the text of the actor's `generation_config.json`, if it has one.
        held_out: the prompts of `data.val_files` as "val" and those of `data.test_files` as "test",
            if there are any.
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
    """The inputs of supervised fine-tuning.

    Attributes:
        generation_config: the text of the model's `generation_config.json`, if it has one.
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
    """The inputs of a training on preference pairs.

    Attributes:
        generation_config: the text of the model's `generation_config.json`; None if it has none, or
            if the model generates nothing.
        held_out: the validation pairs, if there are any.
        steps: training steps of the run.
    """

    tokenizer: Tokenizer
    generation_config: str | None
    pairs: PreferencePairs
    held_out: PreferencePairs | None
    steps: int


@dataclass(frozen=True)
class _PresentInputs:
    """The inputs that exist on this machine; a run has all of them, a dry run may not.

    Attributes:
        whole: whether nothing is absent.
        files: the data files of each split.
        policy: whether the trained model is present.
    """

    whole: bool
    files: Mapping[Split, list[str]]
    policy: bool
    terms: Sequence[RewardTermSection]


def _present_inputs(config: AnyConfig, absent: Collection[InputPath] = ()) -> _PresentInputs:
    """The inputs of `config` without those that are `absent`."""
    # A directory without a tokenizer may hold a model.
    missing = {path.path for path in absent if path.key != TOKENIZER}
    named: dict[Split, Sequence[str]] = {
        "train": config.data.train_files,
        "val": config.data.val_files,
    }
    terms: Sequence[RewardTermSection] = ()
    if isinstance(config, PPOConfig):
        named["test"] = config.data.test_files
        terms = config.reward.terms

    return _PresentInputs(
        whole=not absent,
        files={
            split: [file for file in files if file not in missing] for split, files in named.items()
        },
        policy=config.roles()[_policy(config)].path not in missing,
        terms=[term for term in terms if term.name.rpartition(":")[0] not in missing],
    )


def read_ppo_inputs(config: PPOConfig) -> PPOInputs:
    """Read the inputs of a PPO run, whose paths exist; raises as `check_inputs`."""
    return _whole(_ppo_inputs(config, _tokenizer(config.data), _present_inputs(config)))


def read_sft_inputs(config: SFTConfig) -> SFTInputs:
    """Read the inputs of supervised fine-tuning, whose paths exist; raises as `check_inputs`."""
    return _whole(_sft_inputs(config, _tokenizer(config.data), _present_inputs(config)))


def read_preference_inputs(config: PreferenceConfig) -> PreferenceInputs:
    """Read the inputs of a training on pairs, whose paths exist; raises as `check_inputs`."""
    return _whole(_preference_inputs(config, _tokenizer(config.data), _present_inputs(config)))


def _whole(inputs: InputsT | None) -> InputsT:
    assert inputs is not None, "nothing is absent, so everything is read"
    return inputs


def check_inputs(config: AnyConfig, absent: Collection[InputPath]) -> int | None:
    """Check the inputs as a run would, except those that are `absent`.

    Returns:
        The training steps of the run; None if an absent input determines them.

    Raises:
        ConfigError, DataError, RewardError: an input cannot be used; one line.
    """
    present = _present_inputs(config, absent)
    if {config.data.tokenizer, config.data.chat_template} & {path.path for path in absent}:
        _check_without_tokenizer(config, present)
        return None

    tokenizer = _tokenizer(config.data)
    inputs: PPOInputs | SFTInputs | PreferenceInputs | None
    if isinstance(config, PPOConfig):
        inputs = _ppo_inputs(config, tokenizer, present)
        if inputs is not None:
            inputs.reward.close()
    elif isinstance(config, SFTConfig):
        inputs = _sft_inputs(config, tokenizer, present)
    else:
        inputs = _preference_inputs(config, tokenizer, present)
    return None if inputs is None else inputs.steps


def _ppo_inputs(
    config: PPOConfig, tokenizer: Tokenizer, present: _PresentInputs
) -> PPOInputs | None:
    """The inputs of a PPO run; None if some are absent, after the others have been checked."""
    generation_config = read_generation_config(config.actor.path) if present.policy else None
    end_tokens = end_token_ids(config.actor.path) if present.policy else {}
    tokenizer = tokenizer.ending_with(end_tokens)
    stop = (config.rollout.stop, config.rollout.stop_token_ids)
    endings = find_endings(*stop, end_tokens, tokenizer)
    warn_of_end_tokens(end_tokens, tokenizer)
    _check_vocabularies(config, tokenizer)

    known: dict[str, Prompts] = {}
    prompts = None
    for split, files in present.files.items():
        if not files:
            continue
        dataset = _prompts(config, split, files, tokenizer)
        rows = dataset.batch(range(len(dataset)))
        if split == "train":
            prompts = dataset
        else:
            _compare_prompts(split, rows, known)
        known[split] = rows

    if not present.whole:
        _check_rewards(config.reward, present)
        return None
    assert prompts is not None
    known.pop("train")
    return PPOInputs(
        tokenizer=tokenizer,
        endings=endings,
        generation_config=generation_config,
        prompts=prompts,
        held_out=known,
        steps=_ppo_steps(config, len(prompts)),
        reward=load_rewards(config.reward),
    )


def _sft_inputs(
    config: SFTConfig, tokenizer: Tokenizer, present: _PresentInputs
) -> SFTInputs | None:
    """The inputs of fine-tuning; None if some are absent, after the others have been checked."""
    _check_vocabularies(config, tokenizer)
    examples = _examples(config.data, "train", present, tokenizer)
    held_out = _examples(config.data, "val", present, tokenizer)
    rows = [tuple(example.token_ids) for example in held_out]
    others = [tuple(example.token_ids) for example in examples]
    warn_of_shared_rows("data.val_files", rows, "data.train_files", others)

    if not present.whole:
        return None
    steps = _supervised_steps(config, len(examples), "rows")
    generation_config = read_generation_config(config.model.path)
    return SFTInputs(tokenizer, generation_config, examples, held_out, steps)


def _preference_inputs(
    config: PreferenceConfig, tokenizer: Tokenizer, present: _PresentInputs
) -> PreferenceInputs | None:
    """The inputs of a training on pairs; None as in `_sft_inputs`."""
    data = config.data
    _check_vocabularies(config, tokenizer)
    train_rows = _rows("train", present)
    held_out_rows = _rows("val", present)
    if train_rows and not data.val_files:
        train_rows, held_out_rows = split_by_prompt(train_rows, data.held_out_fraction, config.seed)
        if config.trainer.test_freq and not held_out_rows:
            raise DataError(
                f"trainer.test_freq {config.trainer.test_freq} needs rows to validate on, but "
                f"data.held_out_fraction {data.held_out_fraction} of data.train_files keeps "
                "none; raise it, or name data.val_files"
            )

    pairs = _pairs(data, train_rows, tokenizer)
    held_out = _pairs(data, held_out_rows, tokenizer)
    if pairs is not None and held_out is not None:
        warn_of_shared_rows("data.val_files", _sides(held_out), "data.train_files", _sides(pairs))
    if not present.whole:
        return None
    assert pairs is not None
    steps = _supervised_steps(config, len(pairs), "pairs")
    generates = head_of(config, "model") == "lm"
    generation_config = read_generation_config(config.model.path) if generates else None
    return PreferenceInputs(tokenizer, generation_config, pairs, held_out, steps)


def load_rewards(section: RewardSection) -> RewardFunction:
    """Load the terms of the reward and start users' functions; ConfigError or RewardError."""
    return RewardFunction(
        [(term.name, term.weight) for term in section.terms],
        limits=Limits(section.timeout_s, section.memory_mb),
    )


def _check_without_tokenizer(config: AnyConfig, present: _PresentInputs) -> None:
    """Check the inputs that need no tokenizer."""
    if isinstance(config, PPOConfig):
        if present.policy:
            read_generation_config(config.actor.path)
        _check_rewards(config.reward, present)


def _check_rewards(section: RewardSection, present: _PresentInputs) -> None:
    """Load the terms whose files are here, and stop them again."""
    if present.terms:
        load_rewards(section.model_copy(update={"terms": present.terms})).close()


def _tokenizer(data: DataSection) -> Tokenizer:
    """The tokenizer with its template."""
    try:
        return load_tokenizer(data.tokenizer, data.chat_template)
    except DataError as error:
        raise DataError(f"data.tokenizer: {error}") from error


def _policy(config: AnyConfig) -> str:
    """The name of the role that is trained and generates."""
    return "actor" if isinstance(config, PPOConfig) else "model"


def _check_vocabularies(config: AnyConfig, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that makes tokens which a model on this machine does not have."""
    sizes = {
        name: load_spec(role.path, head_of(config, name)).vocab_size
        for name, role in config.roles().items()
        if Path(role.path).exists()
    }
    compared: tuple[str, ...] = ()
    if isinstance(config, PPOConfig) and config.needs_full_kl:
        compared = ("actor", "reference")
    check_vocabularies(sizes, tokenizer.highest_id, compared)
    if "actor" in sizes:
        warn_of_undrawn(sizes["actor"], tokenizer.ids)
    policy = _policy(config)
    if policy in sizes and head_of(config, policy) == "lm":
        warn_of_other_end(end_token_ids(config.roles()[policy].path), tokenizer)


def _compare_prompts(split: str, held_out: Prompts, known: Mapping[str, Prompts]) -> None:
    """Warn of held-out prompts that occur in other data."""
    rows = [tuple(ids) for ids in held_out.token_ids]
    for other, prompts in known.items():
        others = {tuple(ids) for ids in prompts.token_ids}
        warn_of_shared_rows(f"data.{split}_files", rows, f"data.{other}_files", others)


def _rows(split: Split, present: _PresentInputs) -> list[Row]:
    files = present.files[split]
    warn_of_files_named_twice(f"data.{split}_files", files)
    return read_rows(files) if files else []


def _prompts(
    config: PPOConfig, split: Split, files: Sequence[str], tokenizer: Tokenizer
) -> PromptDataset:
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
    data: SupervisedDataSection, split: Split, present: _PresentInputs, tokenizer: Tokenizer
) -> list[SftExample]:
    rows = _rows(split, present)
    if not rows:
        return []
    examples = encode_sft(rows, tokenizer, max_length=data.max_length, overlong=data.overlong)
    tokens = [example.token_ids for example in examples]
    warn_of_unknown_tokens(tokens, tokenizer, f"data.{split}_files")
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
    pairs = encode_preferences(rows, tokenizer, max_length=data.max_length, overlong=data.overlong)
    sides = [*pairs.chosen_ids, *pairs.rejected_ids]
    warn_of_unknown_tokens(sides, tokenizer, "the preference pairs")
    return pairs


def _ppo_steps(config: PPOConfig, rows: int) -> int:
    """Training steps of the run; batches that dynamic sampling adds to a step do not count."""
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
    batch = config.data.batch_size
    if batch > rows:
        raise DataError(
            f"data.train_files hold {rows} {noun}, which is less than one batch of {batch}; give "
            "more, or lower data.batch_size"
        )
    return config.trainer.steps(rows, batch)
