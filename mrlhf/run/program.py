"""The life of a launcher: parse, check, run, and turn an error into one line and an exit code.

It knows no algorithm and no check; the launcher hands both in.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

import torch.distributed as dist

from mrlhf.config import PPOConfig, RewardModelConfig, SFTConfig, parse_args
from mrlhf.device import is_first_process, read_launch
from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.log import configure_logging

logger = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", PPOConfig, SFTConfig, RewardModelConfig)

BAD_INPUT = 2
FAILED = 1


@dataclass(frozen=True)
class Program(Generic[ConfigT]):
    """What one launcher does.

    Attributes:
        root: the configuration that it reads.
        check: refuses, before anything is built, a configuration that cannot run on so many ranks;
            returns the run in words.
        dry_run: checks for a number of ranks that need not exist (None: the fewest that fit);
            returns the run in words.
        train: runs the job; every rank calls it.
    """

    root: type[ConfigT]
    check: Callable[[ConfigT, int], str]
    dry_run: Callable[[ConfigT, int | None], str]
    train: Callable[[ConfigT], None]


def main(program: Program[ConfigT], argv: Sequence[str]) -> int:
    """Run the program as the arguments say, and end the process; returns its exit code where there
    was nothing to run.

    A failing rank prints its own error and exits at once with a code other than 0; torchrun then
    ends the others.
    """
    try:
        config, dry = parse_args(program.root, argv)
        if dry is not None:
            sys.stdout.write(program.dry_run(config, dry.world_size) + "\n")
            return 0
        launch = read_launch()
        configure_logging(launch.rank)
        description = program.check(config, launch.world_size)
    except ConfigError as error:
        # Every rank sees the same arguments; one of them says what is wrong with them.
        if is_first_process():
            sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT
    logger.info("%s", description)
    try:
        program.train(config)
    except MrlhfError as error:
        logger.error("%s: %s", type(error).__name__, error)
        _leave(FAILED)
    except Exception:
        logger.exception("this rank failed")
        _leave(FAILED)
    gc.collect()  # what an engine shares with other processes is given back as it goes
    dist.barrier()
    dist.destroy_process_group()
    # Groups that are still referred to would go when the interpreter does, where gloo's threads now
    # and then abort.
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End the process at once: no destructor runs, and none waits for ranks that hang in a
    collective.
    """
    logging.shutdown()
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
