"""The life of a launcher: parse, check, run, and turn an error into one line and an exit code.

The launcher hands in the algorithm and the checks; this file knows neither.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.distributed as dist

from mrlhf.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig, parse_args
from mrlhf.errors import ConfigError, HangError, Interrupted, MrlhfError
from mrlhf.job import read_launch, read_place, speaks_without_place
from mrlhf.log import configure_logging, quiet_transformers
from mrlhf.printable import STANDARD_OUTPUT, show
from mrlhf.run.failures import (
    BAD_INPUT,
    FAILED,
    Failure,
    Told,
    explain,
    log_failure,
    tell_before_start,
    users_traceback,
)
from mrlhf.run.leaving import end_with_launcher, leave
from mrlhf.run.view import console_of_log

logger = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", PPOConfig, SFTConfig, RewardModelConfig, DPOConfig)

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

    If a rank fails, it says why, and all ranks end with the same exit code. If the run was
    interrupted, all ranks end with exit code 75, which asks a scheduler to queue the job again.

    Returns:
        The exit code, if there was nothing to run: after a dry run or bad input.
    """
    quiet_transformers()
    try:
        config, dry = parse_args(program.root, argv)
        if dry is not None:
            show(program.dry_run(config, dry.world_size))
            return 0

        launch = read_launch()
        end_with_launcher()
        configure_logging(launch.rank, console_of_log(config.trainer.console))
        description = program.check(config, launch.world_size)
    except MrlhfError as error:
        return _refuse(error)
    except OSError as error:
        if error.filename != STANDARD_OUTPUT:
            raise
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\n")
        return FAILED

    logger.info("%s", description)
    code = 0
    try:
        program.train(config)
    except Interrupted as interrupted:
        logger.info("stopped early: %s; start the same command again to go on", interrupted)
        code = QUEUE_AGAIN
    except Told as told:
        leave(told.code)
    except HangError as error:  # the job's store does not answer, so each rank speaks for itself
        failure = explain(error, launch.rank, True)
        failure.leave_for_summary()
        leave(failure.code, failure.whole)
    except Exception as error:  # without a store in which the ranks agree on who says it
        leave(tell_before_start(launch, explain(error, launch.rank, True), log_failure).code)

    gc.collect()  # an engine that is deleted gives back the memory it shares with other processes
    try:
        # A rank that ends earlier with another code than 0 would have the others killed.
        dist.barrier()
    except RuntimeError as error:
        leave(FAILED, f"another rank has not come to the end: {str(error).splitlines()[0]}")
    dist.destroy_process_group()
    # A process group that is still referred to would be destroyed when the interpreter ends, and
    # gloo's threads sometimes abort then.
    leave(code)


def _refuse(error: MrlhfError) -> int:
    """Say once for all ranks that the input is bad; returns the exit code."""
    line = f"error: {error}{users_traceback(error)}\n"
    try:
        launch = read_place()
    except ConfigError:
        if speaks_without_place():
            sys.stderr.write(line)
        return BAD_INPUT

    own = Failure(launch.rank, BAD_INPUT, str(error), time.time())
    tell_before_start(launch, own, lambda _: sys.stderr.write(line))
    return BAD_INPUT
