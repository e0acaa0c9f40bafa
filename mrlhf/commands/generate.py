"""Answers a file of prompts with a policy, scores the answers, and writes them as JSON lines.

Usage: mrlhf generate [-n RANKS] --model DIR --prompts FILE --out FILE [--n N] [--temperature T]
           [--config FILE ...] [key.path=value ...]

It measures a checkpoint without training: with a run's configuration the numbers are those of the
run's validation.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mrlhf.commands.endings import OneLineParser
from mrlhf.config import PPOConfig
from mrlhf.config.arguments import Arguments
from mrlhf.version import add_version_option

# Options that set keys of the configuration.
_KEYS = (
    ("--n", "rollout.n", "samples of each prompt"),
    ("--temperature", "rollout.temperature", "0: one answer of the likeliest tokens"),
    ("--top-p", "rollout.top_p", "sample from the likeliest tokens of this probability"),
    ("--top-k", "rollout.top_k", "sample from so many likeliest tokens"),
    ("--max-response-length", "data.max_response_length", "most tokens of a response"),
    ("--seed", "seed", "of the samples"),
    ("--dtype", "actor.dtype", "auto, float32 or bfloat16"),
)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneLineParser(
        description="Answer prompts with a policy, and write prompt, response, tokens, "
        "log-probabilities and scores of each sample as a JSON line, and a summary beside them.",
        epilog="mrlhf generate -n 4 ... starts 4 ranks. The same command goes on where an "
        "interrupted one has stopped. Exit code 0: done, 2: bad input.",
        allow_abbrev=False,
    )
    add_version_option(parser)

    prompts = "jsonl or parquet, as data.val_files; .txt: one prompt a line, blank lines skipped"
    at_once = "prompts that are written at once (128)"
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="model, run, checkpoint or adapter")
    add("--prompts", required=True, metavar="FILE", help=prompts)
    add("--out", required=True, type=Path, metavar="FILE", help="a file that ends in .jsonl")
    for option, key, does in _KEYS:
        add(option, dest=key, metavar="X", help=f"{does} ({key})")
    add("--best", action="store_true", help="write the best of n samples alone")
    add("--batch", type=int, default=128, metavar="N", help=at_once)
    add("--overwrite", action="store_true", help="replace what is at --out")
    add("--config", action="append", metavar="FILE", help="reward.terms, layout and other keys")
    add("overrides", nargs="*", metavar="key.path=value", help="set a key")
    return parser.parse_intermixed_args(arguments)


def main() -> int:
    """Generate on every rank; 0 when done, 2 on bad input."""
    options = parse(sys.argv[1:])
    from mrlhf.commands.train import main as run_on_ranks
    from mrlhf.parallel.job import launch_alone
    from mrlhf.preflight import check_policy
    from mrlhf.trainers.generation import GenerationOptions, check_generation, generate
    from mrlhf.trainers.policy import policy_config

    launch_alone()
    given = {key: vars(options)[key] for _, key, _ in _KEYS}
    greedy = re.fullmatch(r"0+\.?0*", given["rollout.temperature"] or "") is not None
    if greedy:
        given |= {"rollout.temperature": None, "rollout.n": given["rollout.n"] or 1}
    asked = GenerationOptions(options.out, greedy, options.batch, options.best, options.overwrite)

    def read(root: type[PPOConfig], argv: Sequence[str]) -> Arguments[PPOConfig]:
        keys = [f"{key}={value}" for key, value in given.items() if value is not None]
        keys.append(f"data.val_files=[{json.dumps(options.prompts)}]")
        return policy_config(options.model, options.config, [*argv, *keys]), None, ""

    def check(config: PPOConfig, world_size: int) -> str:
        said = check_generation(asked, config, world_size)
        check_policy(config, world_size)
        return said

    actions = (read, check)
    return run_on_ranks(PPOConfig, partial(generate, asked), options.overrides, *actions)
