"""Answers all prompts of a file with a policy, scores the answers, and writes them down.

A batch of prompts is drawn and scored as the validation of a run is, and then written, so that a
job goes on after the last whole batch of an interrupted one. Every batch begins with an empty
engine, so nothing in it depends on the batches before.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from mrlhf.batch import Prompts, Rollout
from mrlhf.config.roots import PPOConfig
from mrlhf.data.rows import read_rows, write_rows
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import ConfigError
from mrlhf.inputs import EngineInputs
from mrlhf.inputs.paths import input_paths
from mrlhf.inputs.read import load_rewards, read_engine_inputs, read_judge_inputs, read_prompts
from mrlhf.printable import show
from mrlhf.rewards.combine import RewardFunction
from mrlhf.rollout.scoring import Scorer, Scores
from mrlhf.run.same_start import describe_start
from mrlhf.run.startup import Run, start_without_directory
from mrlhf.trainers.policy import name_of_policy, open_policy
from mrlhf.trainers.ppo.dump import describe_sample
from mrlhf.trainers.ppo.held_out import STREAMS
from mrlhf.trainers.ppo.setup import build_judge, build_reward_model

logger = logging.getLogger(__name__)

_READ = ("seed", "trainer.resume", "actor.", "reward", "rollout.", "data.", "the c", "torch")


@dataclass(frozen=True)
class GenerationOptions:
    """The options beside the configuration."""

    out: Path
    greedy: bool
    batch: int  # prompts that are drawn, scored and written at once
    best: bool  # whether only the best sample of each prompt is wanted
    overwrite: bool

    @property
    def partial(self) -> Path:
        """The samples of an unfinished job, after a line that says on what they depend."""
        return self.out.with_name(f"{self.out.name}.partial")


def check_generation(options: GenerationOptions, config: PPOConfig, world_size: int) -> str:
    """Check the options, before anything is built; returns what will be done.

    Raises:
        ConfigError: one line for each mistake.
    """
    out = options.out
    if options.batch < 1:
        raise ConfigError(f"--batch {options.batch} is below 1")
    if options.greedy and config.rollout.n > 1:
        raise ConfigError(f"{config.rollout.n} answers of temperature 0 are alike; leave out --n")
    if options.best and not config.reward.terms:
        raise ConfigError("--best compares rewards, but reward.terms is empty; name terms there")

    if out.suffix != ".jsonl" or out.is_dir():
        raise ConfigError(f"--out {out} is not the name of a file that ends in .jsonl")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out {out}: {out.parent} is no directory that can be written")
    if out.exists() and not options.overwrite:
        raise ConfigError(f"--out {out} is there already; name another, or add --overwrite")
    _begun(options, _facts(options, config, world_size))
    return f"answering {config.data.val_files[0]} with {name_of_policy(config)}"


def generate(options: GenerationOptions, config: PPOConfig) -> None:
    """Answer the prompts; every rank calls it."""
    inputs = read_engine_inputs(config)
    _, prompts = read_prompts(config, inputs)["val"]
    reward = load_rewards(config) if config.reward.terms else None
    judge_inputs = read_judge_inputs(config)
    if reward is not None and reward.judge is not None:
        reward.judge.reach()
    with start_without_directory(config) as run:
        answer(options, config, run, inputs, prompts, reward, judge_inputs)
    if reward is not None:
        reward.close()


def answer(
    options: GenerationOptions,
    config: PPOConfig,
    run: Run,
    inputs: EngineInputs,
    prompts: Prompts,
    reward: RewardFunction | None,
    judge_inputs: EngineInputs | None = None,
) -> None:
    """Answer the prompts that have no answer yet; None as the reward scores nothing."""
    facts = _facts(options, config, run.world_size)
    lines = _begun(options, facts) or [json.dumps(facts).encode() + b"\n"]
    n = config.rollout.n
    whole = (len(lines) - 1) // n
    begun = whole if whole == len(prompts) else whole // options.batch * options.batch

    policy = open_policy(config, run, inputs)
    generator = policy.generator
    sampling = policy.sampling.without_records()
    sampling = sampling.greedy() if options.greedy else sampling
    scorer = None
    if reward is not None:
        model = build_reward_model(config, run, inputs.tokenizer)
        judge = build_judge(config, run, judge_inputs)
        scorer = Scorer(reward, inputs.tokenizer, model, policy.actor.groups, run.phases, judge)
    asked = [row.fields["prompt"] for row in read_rows(config.data.val_files)]
    if run.is_main_rank:
        options.partial.write_bytes(b"".join(lines[: 1 + begun * n]))

    seconds = 0.0
    tokens = 0
    for first in range(begun, len(prompts), options.batch):
        batch = prompts.select(range(first, min(first + options.batch, len(prompts))))
        began = time.perf_counter()
        generator.lengths.clear()
        generator.take_weights(version=0)
        rollout = generator.generate(batch, sampling, STREAMS["val"]).rollout
        generator.sleep()  # scoring may need the memory
        seconds += time.perf_counter() - began
        tokens += int(rollout.loss_mask.sum())

        rollout, scores = (rollout, None) if scorer is None else scorer.score(rollout)
        if run.is_main_rank:
            rows = _samples(rollout, scores, inputs.tokenizer, asked, n)
            with options.partial.open("a", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            logger.info("%d of %d prompts", first + len(batch), len(prompts))
    if run.is_main_rank:
        speed = {"seconds": round(seconds, 2), "tokens_per_s": round(tokens / (seconds or 1), 1)}
        _finish(options, config, speed if tokens else {})


def _facts(options: GenerationOptions, config: PPOConfig, world_size: int) -> dict[str, str]:
    """All on which the samples depend, by name."""
    every = describe_start(config, [(path.key, path.path) for path in input_paths(config)])
    facts = {name: fact for name, fact in every.items() if name.startswith(_READ)}
    facts.pop("data.date")
    own = {"--temperature 0": options.greedy, "--batch": options.batch, "ranks": world_size}
    return facts | {name: str(value) for name, value in own.items()}


def _begun(options: GenerationOptions, facts: Mapping[str, str]) -> list[bytes]:
    """The whole lines of the unfinished job that this one goes on with; none if it begins anew.

    Raises:
        ConfigError: there is an unfinished job of another kind, which may not be overwritten.
    """
    if not options.partial.exists():
        return []
    lines = [x for x in options.partial.read_bytes().splitlines(True) if x.endswith(b"\n")]
    try:
        stated = json.loads(lines[0]) if lines else facts
        names = [name for name in {**stated, **facts} if stated.get(name) != facts.get(name)]
    except (ValueError, TypeError, AttributeError):
        stated = {}
        names = ["another file"]

    if not names:
        return lines
    if options.overwrite:
        return []
    raise ConfigError(
        f"{options.partial} was begun with {names[0]} {stated.get(names[0])} and not "
        f"{facts.get(names[0])}; give the same command, another --out, or --overwrite"
    )


def _samples(
    rollout: Rollout,
    scores: Scores | None,
    tokenizer: Tokenizer,
    asked: Sequence[Any],
    n: int,
) -> list[dict[str, Any]]:
    """A row for each sample; `asked` has the prompts as the data has them, by uid."""
    rewards = None if scores is None else rollout.with_turn_rewards(scores.total).tolist()
    rows = []
    for index, length in enumerate(rollout.response_lengths):
        reward = None if rewards is None else rewards[index]
        terms = {} if scores is None else scores.terms
        row = describe_sample(rollout, index, tokenizer, reward, terms)
        finish = "stop" if row.pop("stopped") else "length"
        row |= {"prompt": asked[row["uid"]], "reward": row.pop("score"), "best": False}
        row["finish_reason"] = "failure" if row.get("failure") else finish
        if "tools" in row:  # fine-tuning would take them for schemas
            row["tool_calls"] = row.pop("tools")
        row["token_ids"] = rollout.response_ids[index, :length].tolist()
        row["logprobs"] = rollout.rollout_logprobs[index, :length].tolist()
        rows.append(row)

    for first in range(0, len(rows) if rewards else 0, n):
        max(rows[first : first + n], key=lambda row: row["reward"])["best"] = True
    return rows


def _finish(options: GenerationOptions, config: PPOConfig, speed: Mapping[str, float]) -> None:
    """Give the samples their name, and write and show a summary."""
    _, *lines = options.partial.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    summary: dict[str, Any] = {
        "model": name_of_policy(config),
        "adapter": config.actor.lora.path,
        "prompts": len(rows) // config.rollout.n,
        "n": config.rollout.n,
    }
    if config.reward.terms:
        summary["reward"] = fmean(row["reward"] for row in rows)
        for name in sorted({name for row in rows for name in row["terms"]}):
            numbers = [row["terms"][name] for row in rows if name in row["terms"]]
            summary[f"reward/{name}"] = fmean(numbers)
        summary["best_of_n"] = fmean(row["reward"] for row in rows if row["best"])
    summary["length"] = fmean(len(row["token_ids"]) for row in rows)
    summary["ended"] = fmean(row["finish_reason"] == "stop" for row in rows)
    summary |= speed

    write_rows(options.partial, [row for row in rows if row["best"] or not options.best])
    os.replace(options.partial, options.out)
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    beside = options.out.with_suffix(".summary.json")
    beside.write_text(text + "\n", encoding="utf-8")
    for name, value in summary.items():
        show(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    show(f"samples: {options.out}")
