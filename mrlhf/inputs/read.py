"""Reads all inputs of a run except its models, before any model is built: the tokenizer, the data
and the user's reward functions.

The trainers and `--dry-run` call the same functions. This file knows the keys of the inputs, and
the conditions between these. It does not know how a file is read, nor how its rows are used.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrlhf.batch import Prompts
from mrlhf.config.roots import (
    AnyConfig,
    AnySupervised,
    PPOConfig,
    PreferenceConfig,
    is_reward_model,
    section_of,
)
from mrlhf.data.prompts import OtherPrompts, PromptDataset
from mrlhf.data.tokenizer import Tokenizer, holds_vocabulary, load_tokenizer, load_vocabulary
from mrlhf.data.unknown import warn_of_lost_characters, warn_of_unknown_tokens
from mrlhf.episodes.read import (
    EnvironmentInputs,
    check_sources,
    draw_episodes,
    read_environments,
)
from mrlhf.errors import ConfigError, DataError, MrlhfError
from mrlhf.inputs.paths import absent_paths, awaits_tokenizer, has_tokenizer, present
from mrlhf.inputs.repeated import warn_of_files_named_twice, warn_of_shared_rows
from mrlhf.inputs.supervised import examples_and_held_out
from mrlhf.inputs.vocabulary import (
    Endings,
    check_tokens,
    check_vocabularies,
    find_endings,
    warn_of_ends,
    warn_of_undrawn,
)
from mrlhf.models.families import load_spec
from mrlhf.models.generation_config import end_token_ids, read_generation_config
from mrlhf.rewards.chat_judge import ChatJudge
from mrlhf.rewards.combine import RewardFunction
from mrlhf.rewards.judge import Judge
from mrlhf.rewards.rules import answer_rules
from mrlhf.workers.process import Limits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineInputs:
    """The inputs of an engine beside its model, to answer prompts."""

    tokenizer: Tokenizer
    endings: Endings
    environments: EnvironmentInputs | None  # None if each response is a single turn


@dataclass(frozen=True)
class PPOInputs(EngineInputs):
    """The inputs of a PPO run."""

    generation_config: str | None  # the text of the actor's file of that name, if it has one
    prompts: PromptDataset
    # The prompts of data.val_files as "val" and those of data.test_files as "test", if any.
    held_out: Mapping[str, Prompts]
    steps: int  # training steps of the run
    reward: RewardFunction  # users' functions are running
    judge: EngineInputs | None = None  # of the judge on the ranks, if there is one
    # Tokens of each training prompt and of its reference answer, if a reward model scores these.
    answered: Sequence[tuple[list[int], list[int]]] = ()
    # Tokens of the responses in each row, by uid, if a teacher teaches on these.
    given: Mapping[int, list[list[int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class RowInputs:
    """The inputs of a training on rows of a file."""

    tokenizer: Tokenizer
    # the text of the model's file of that name, if it has one; None too if it generates nothing
    generation_config: str | None
    examples: Any  # a list of `SftExample` or of `ScoredResponse`, or `PreferenceRows`
    held_out: Any  # the validation rows, of the same kind; an empty list without any
    steps: int  # training steps of the run


def read_ppo_inputs(config: PPOConfig) -> PPOInputs:
    """Read the inputs of a PPO run, whose paths exist; raises as `check_inputs`."""
    _warn_of_uncorrected(config)
    engine = read_engine_inputs(config)
    splits = read_prompts(config, engine)
    prompts, _ = splits.pop("train")
    answered: Sequence[tuple[list[int], list[int]]] = ()
    if config.reward_model is not None and config.reward_model.is_shifted:
        answered = prompts.answered(engine.tokenizer, config.data.max_response_length)
    given: dict[int, list[list[int]]] = {}
    if config.teacher is not None and config.algorithm.distillation.given_share:
        given = prompts.responses(engine.tokenizer, config.data.max_response_length)
    return PPOInputs(
        **vars(engine),
        generation_config=read_generation_config(config.actor.path),
        prompts=prompts,
        held_out={split: rows for split, (_, rows) in splits.items()},
        steps=_ppo_steps(config, len(prompts)),
        reward=load_rewards(config),
        judge=read_judge_inputs(config),
        answered=answered,
        given=given,
    )


def read_engine_inputs(config: PPOConfig) -> EngineInputs:
    """Read what an engine needs beside its model; raises as `check_inputs`."""
    end_tokens = end_token_ids(config.actor.path)
    tokenizer = _tokenizer(config).ending_with(end_tokens)
    stop = (config.rollout.stop, config.rollout.stop_token_ids)
    endings = find_endings(*stop, end_tokens, tokenizer)
    environments = read_environments(config, tokenizer, endings.token_ids)
    return EngineInputs(tokenizer, endings, environments)


def read_judge_inputs(config: PPOConfig) -> EngineInputs | None:
    """Read what the judge on the ranks needs beside its model, if there is one."""
    if "judge_model" not in config.roles():
        return None
    try:
        return read_engine_inputs(config.of_judge())
    except MrlhfError as error:
        words = str(error).removeprefix("data.tokenizer: ")
        raise type(error)(f"judge_model.path: {words}") from error


def read_prompts(
    config: PPOConfig, engine: EngineInputs
) -> dict[str, tuple[PromptDataset, Prompts]]:
    """The prompts by split, as data sets and whole; raises as `check_inputs`."""
    splits = _prompts_by_split(config, engine.tokenizer, engine.environments)
    check_sources(config, {name for _, every in splits.values() for name in every.data_source})
    if "train" in splits:
        _check_taught(config, set(splits["train"][1].data_source))
    return splits


def _check_taught(config: PPOConfig, sources: set[str]) -> None:
    """Refuse several teachers that do not have exactly the rows' data sources."""
    taught = {} if config.teacher is None else config.teacher.by_source
    if taught and taught.keys() != sources:
        named, there = (", ".join(map(repr, sorted(each))) for each in (taught, sources))
        raise ConfigError(
            f"teacher.several names the data sources {named}, and the rows of data.train_files are "
            f"of {there}; name each of the latter in one teacher, and no others"
        )


def read_row_inputs(config: AnySupervised) -> RowInputs:
    """Read the inputs of such a training, whose paths exist; raises as `check_inputs`."""
    tokenizer = _tokenizer(config)
    examples, held_out = examples_and_held_out(config, tokenizer, not config.data.val_files)
    steps = _supervised_steps(config, len(examples))
    generates = config.head_of("model") == "lm"
    generation_config = read_generation_config(config.model.path) if generates else None
    return RowInputs(tokenizer, generation_config, examples, held_out, steps)


def check_inputs(config: AnyConfig) -> tuple[int | None, list[str]]:
    """Check the inputs as a run would, except those that are not on this machine.

    Returns:
        The training steps of the run, None if an input is not here; and lines that show an episode.

    Raises:
        ConfigError, DataError, RewardError: an input cannot be used; one line.
    """
    if absent_paths(config) or awaits_tokenizer(config):
        _check_present_inputs(config)
        return None, []
    if isinstance(config, PPOConfig):
        inputs = read_ppo_inputs(config)
        inputs.reward.close()
        shown = []
        if inputs.environments is not None:
            every = inputs.prompts.batch(range(len(inputs.prompts)))
            shown = draw_episodes(inputs.environments, inputs.tokenizer, every)
        return inputs.steps, shown
    return read_row_inputs(config).steps, []


def _check_present_inputs(config: AnyConfig) -> None:
    """Check those inputs that are on this machine."""
    here = present(config)
    if has_tokenizer(config):
        if isinstance(here, PPOConfig):
            engine = read_engine_inputs(here)
            _prompts_by_split(here, engine.tokenizer, engine.environments)
        else:
            examples_and_held_out(here, _tokenizer(here), split=not config.data.val_files)

    if isinstance(here, PPOConfig):
        read_generation_config(here.actor.path)
        if here.reward.terms:
            load_rewards(here).close()


def _prompts_by_split(
    config: PPOConfig, tokenizer: Tokenizer, environments: EnvironmentInputs | None
) -> dict[str, tuple[PromptDataset, Prompts]]:
    """The prompts of "train", "val" and "test" as far as there are files, and all as one batch."""
    data = config.data
    files = {"train": data.train_files, "val": data.val_files, "test": data.test_files}
    splits: dict[str, tuple[PromptDataset, Prompts]] = {}
    for split, named in files.items():
        if not named:
            continue
        dataset, every = _prompts(config, split, named, tokenizer, environments)
        if split != "train":
            rows = _distinct(every, environments)
            for other, (_, known) in splits.items():
                others = _distinct(known, environments)
                warn_of_shared_rows(f"data.{split}_files", rows, f"data.{other}_files", others)
        splits[split] = (dataset, every)
    return splits


def _distinct(prompts: Prompts, environments: EnvironmentInputs | None) -> list[Hashable]:
    """The facts that tell rows apart: the prompt, and the row if an environment gets it."""

    def others(row: int) -> str:
        if environments is None or not environments.leads(prompts.data_source[row]):
            return ""
        return repr((prompts.ground_truth[row], prompts.extra_info[row]))

    return [(tuple(ids), others(row)) for row, ids in enumerate(prompts.token_ids)]


def load_rewards(config: PPOConfig) -> RewardFunction:
    """Load the terms of the reward and start users' functions; ConfigError or RewardError."""
    section = config.reward
    asks = "judge" in section.names and Judge(config.judge)  # refuses what it cannot read
    return RewardFunction(
        [(term.name, term.weight) for term in section.terms],
        limits=Limits(section.timeout_s, section.memory_mb),
        judge=ChatJudge(config.judge) if asks and config.judge.address else None,
    )


def _tokenizer(config: AnyConfig) -> Tokenizer:
    """The tokenizer with its template; it has no token that a model on this machine lacks."""
    try:
        data = config.data
        tokenizer = load_tokenizer(data.tokenizer, data.chat_template, data.date or "")
    except DataError as error:
        raise DataError(f"data.tokenizer: {error}") from error
    _check_vocabularies(config, tokenizer)
    return tokenizer


def _check_vocabularies(config: AnyConfig, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that makes tokens which a model on this machine does not have."""
    sizes = {
        name: load_spec(role.path, config.head_of(name)).vocab_size
        for name, role in config.roles().items()
        if Path(role.path).exists() and name != "judge_model"  # it has its own tokenizer
    }
    if config.loads_weights:
        _check_tokens(config, tokenizer)

    full_kl = isinstance(config, PPOConfig) and config.needs_full_kl
    check_vocabularies(sizes, tokenizer.highest_id, ("actor", "reference") if full_kl else ())
    for name, size in sizes.items():
        if section_of(name) == "teacher" and size < sizes.get("actor", 0):
            raise ConfigError(
                f"{name}'s vocab_size {size} is less than the actor's {sizes['actor']}, so it "
                "gives some tokens no probability; use a teacher that has all of them"
            )
    if "actor" in sizes:
        warn_of_undrawn(sizes["actor"], tokenizer.ids)
    policy = "actor" if isinstance(config, PPOConfig) else "model"
    if policy in sizes and config.head_of(policy) == "lm":
        ends = end_token_ids(config.roles()[policy].path)
        warn_of_ends(ends, tokenizer, draws=policy == "actor")


def _check_tokens(config: AnyConfig, tokenizer: Tokenizer) -> None:
    """Refuse models with another tokenizer than the run's, and a separator that this lacks."""
    model = config.reward_model if isinstance(config, PPOConfig) else None
    if model is not None and model.at is not None and not tokenizer.holding(model.at):
        raise ConfigError(
            f"reward_model.at {model.at!r} is in none of the {len(tokenizer.ids)} tokens of "
            "data.tokenizer; give a text that one of them holds whole"
        )
    tokens: dict[str, int] = {}
    for name, role in config.roles().items():
        if role.path == config.data.tokenizer or not holds_vocabulary(Path(role.path)):
            continue
        if name == "judge_model":
            continue
        try:
            own = load_vocabulary(role.path)
        except DataError as error:  # no run reads it
            logger.warning("%s: its tokens are not compared: %s", role.path, error)
            continue
        tokens = tokens or load_vocabulary(config.data.tokenizer)
        # A token that only pads is never read.
        pad = None if tokenizer.pad_id == tokenizer.eos_id else tokenizer.pad_id
        read = {token: number for token, number in tokens.items() if number != pad}
        check_tokens(read, own, f"{name}.path {role.path}", must_know=is_reward_model(name))


def _prompts(
    config: PPOConfig,
    split: str,
    files: Sequence[str],
    tokenizer: Tokenizer,
    environments: EnvironmentInputs | None,
) -> tuple[PromptDataset, Prompts]:
    warn_of_files_named_twice(f"data.{split}_files", files)
    rules = answer_rules(term.name for term in config.reward.terms)
    others: dict[str, OtherPrompts] = {}
    if split == "train":
        if config.reward_model is not None and config.reward_model.is_shifted:
            rules["reward_model.normalise reference"] = bool
        for role, section in config.own_prompts().items():
            others[role] = OtherPrompts.of(role, section, config.data.max_prompt_length)
    prompts = PromptDataset(
        files,
        tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        overlong=config.data.overlong_prompts,
        split=split,
        answer_rules=rules,
        tools_of=None if environments is None else environments.tools_of,
        adds_to_prompt=lambda source: environments is not None and environments.leads(source),
        others=others,
    )

    every = prompts.batch(range(len(prompts)))
    warn_of_unknown_tokens(every.token_ids, tokenizer, f"data.{split}_files")
    warn_of_lost_characters(every.text, every.token_ids, tokenizer, f"data.{split}_files")
    return prompts, every


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


def _supervised_steps(config: AnySupervised, rows: int) -> int:
    batch = config.data.batch_size
    noun = config.rows if isinstance(config, PreferenceConfig) else "rows"
    if batch > rows:
        raise DataError(
            f"data.train_files hold {rows} {noun}, which is less than one batch of {batch}; give "
            "more, or lower data.batch_size"
        )
    return config.trainer.steps(rows, batch)


def _warn_of_uncorrected(config: PPOConfig) -> None:
    """Warn if older versions draw tokens, and the loss takes them for the newest one's."""
    correction = config.algorithm.rollout_correction
    is_corrected = correction.bypass_mode or correction.rollout_is is not None
    if config.rollout.partial.is_on and not is_corrected:
        logger.warning(
            "rollout.partial.over %g lets older versions of the policy draw tokens, and nothing "
            "corrects for them; set algorithm.rollout_correction.rollout_is to token",
            config.rollout.partial.over,
        )
