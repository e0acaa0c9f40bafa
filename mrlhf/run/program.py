"""The life of a launcher: parse, check, run, and turn an error into one line and an exit code.

The launcher hands in the algorithm and the checks; this file knows neither.
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
from mrlhf.errors import ConfigError, Interrupted, MrlhfError
from mrlhf.log import configure_logging

logger = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", PPOConfig, SFTConfig, RewardModelConfig)

BAD_INPUT = 2
FAILED = 1
QUEUE_AGAIN = 75


@dataclass(frozen=True)
class Program(Generic[ConfigT]):
    """What one launcher does.

    Attributes:
        root: the class of the configuration that it reads.
        check: refuses a configuration that cannot run on this number of ranks, before anything is
            built; returns a description of the run.
        dry_run: checks for a number of ranks that need not exist (None: the fewest that fit);
            returns a description of the run.
        train: runs the job; every rank calls it.
    """

    root: type[ConfigT]
    check: Callable[[ConfigT, int], str]
    dry_run: Callable[[ConfigT, int | None], str]
    train: Callable[[ConfigT], None]


def main(program: Program[ConfigT], argv: Sequence[str]) -> int:
    """Run the program as the arguments say, and end the process.

    A rank that fails prints its own error and exits at once with a code other than 0; torchrun then
    ends the others. If the run was interrupted, all ranks end with exit code 75, which asks a
    scheduler to queue the job again.

    Returns:
        The exit code, if there was nothing to run: after a dry run or bad input.
    """
    try:
        config, dry = parse_args(program.root, argv)
        if dry is not None:
            sys.stdout.write(program.dry_run(config, dry.world_size) + "\n")
            return 0

        launch = read_launch()
        configure_logging(launch.rank)
        description = program.check(config, launch.world_size)
    except MrlhfError as error:
        # Every rank sees the same mistake; one rank reports it.
        if is_first_process():
            sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT

    logger.info("%s", description)
    code = 0
    try:
        program.train(config)
    except Interrupted as interrupted:
        logger.info("stopped early: %s; start the same command again to go on", interrupted)
        code = QUEUE_AGAIN
    except MrlhfError as error:
        logger.error("%s: %s", type(error).__name__, error)
        # Starting again would not help where the input is wrong.
        _leave(BAD_INPUT if isinstance(error, ConfigError) else FAILED)
    except Exception:
        logger.exception("this rank failed")
        _leave(FAILED)

    gc.collect()  # an engine that is deleted gives back the memory it shares with other processes
    dist.barrier()  # a rank that ends earlier with another code than 0 would have the others killed
    dist.destroy_process_group()
    # A process group that is still referred to would be destroyed when the interpreter ends, and
    # gloo's threads sometimes abort then.
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process at once.

    No destructor runs, since one might wait for ranks that hang in a collective.
    """
    logging.shutdown()
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
