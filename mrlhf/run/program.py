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
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist

from mrlhf.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig, parse_args
from mrlhf.config.arguments import DryRun
from mrlhf.config.roots import AnyConfig
from mrlhf.errors import ConfigError, HangError, Interrupted, MrlhfError
from mrlhf.job import (
    STORE_S,
    Launch,
    connect_before_start,
    read_launch,
    read_place,
    speaks_without_place,
)
from mrlhf.log import configure_logging, quiet_transformers
from mrlhf.printable import STANDARD_OUTPUT, show
from mrlhf.run.failures import (
    BAD_INPUT,
    FAILED,
    Failure,
    FailureReported,
    Failures,
    explain,
    log_failure,
    report_before_start,
    users_traceback,
)
from mrlhf.run.leaving import end_with_launcher, leave
from mrlhf.run.same_start import describe_start, require_same_start
from mrlhf.run.terminal import console_of_log

logger = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", PPOConfig, SFTConfig, RewardModelConfig, DPOConfig)

QUEUE_AGAIN = 75
NOT_FOUND = 3


class DryRunReport(Protocol):
    """The findings of a dry run."""

    @property
    def missing(self) -> Sequence[str]:
        """One line for each thing that the configuration names and this machine lacks."""

    @property
    def text(self) -> str:
        """The whole report."""


@dataclass(frozen=True)
class Program(Generic[ConfigT]):
    """One launcher."""

    root: type[ConfigT]  # the class of the configuration that it reads
    # Refuses a configuration that cannot run on this number of ranks, before anything is built;
    # returns a description of the run.
    check: Callable[[ConfigT, int], str]
    # Checks for a number of ranks that need not exist (None: the fewest that fit).
    dry_run: Callable[[ConfigT, int | None], DryRunReport]
    train: Callable[[ConfigT], None]  # runs the job; every rank calls it
    # Key and path of each file or directory that the run reads.
    inputs: Callable[[ConfigT], Sequence[tuple[str, str]]] = lambda config: ()


def main(program: Program[ConfigT], argv: Sequence[str]) -> int:
    """Run the program as the arguments say, and end the process.

    If a rank fails, it reports why, and all ranks end with the same exit code. If the run was
    interrupted, all ranks end with exit code 75, which asks a scheduler to queue the job again.

    Returns:
        The exit code after a dry run or bad input.
    """
    quiet_transformers()
    before: dist.Store | None = None
    try:
        config, dry, left_out = parse_args(program.root, argv)
        if dry is not None:
            found = program.dry_run(config, dry.world_size)
            if left_out:
                show(left_out)
            show(found.text)
            return _end_of_dry_run(found, dry)

        launch = read_launch()
        end_with_launcher()
        configure_logging(launch.rank, console_of_log(config.trainer.console))
        before = _compare(launch, config, program.inputs(config))
        if left_out:
            logger.info("%s", left_out)
        description = program.check(config, launch.world_size)
    except HangError as error:
        leave(report_before_start(launch, explain(error, launch.rank, True), log_failure).code)
    except MrlhfError as error:
        return _refuse(error)
    except FailureReported as reported:
        leave(reported.code)
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
    except FailureReported as reported:
        leave(reported.code)
    except HangError as error:  # the job's store does not answer, so each rank speaks for itself
        failure = explain(error, launch.rank, True)
        failure.leave_for_summary()
        leave(failure.code, failure.whole)
    except Exception as error:  # without a store in which the ranks agree on who says it
        leave(report_before_start(launch, explain(error, launch.rank, True), log_failure).code)

    gc.collect()  # an engine that is deleted gives back the memory it shares with other processes
    try:
        # A rank that ends earlier with another code than 0 would have the others killed.
        dist.barrier()
    except RuntimeError as error:
        leave(FAILED, f"another rank has not come to the end: {str(error).splitlines()[0]}")
    dist.destroy_process_group()
    del before  # of a store that rank 0 holds, whose end others would notice
    # A process group that is still referred to would be destroyed when the interpreter ends, and
    # gloo's threads sometimes abort then.
    leave(code)


def _end_of_dry_run(found: DryRunReport, dry: DryRun) -> int:
    """The exit code of a dry run; it is not 0 if something that a run needs was not checked."""
    count = len(found.missing)
    if dry.allow_missing or not count:
        return 0
    what = "1 thing was" if count == 1 else f"{count} things were"
    sys.stderr.write(
        f"error: {what} not found and so not checked, see 'not found' above; correct that, or add "
        "--allow-missing if another machine has it\n"
    )
    return NOT_FOUND


def _compare(
    launch: Launch, config: AnyConfig, inputs: Sequence[tuple[str, str]]
) -> dist.Store | None:
    """Refuse ranks that were not started alike; returns the store, which rank 0 must keep."""
    if launch.world_size == 1:
        return None
    timeout_s = max(STORE_S, config.distributed.timeout_s)
    failures = Failures(connect_before_start(timeout_s), launch.rank, launch.world_size)
    facts = describe_start(config, inputs)
    return require_same_start(launch, facts, timeout_s, failures.raise_if_reported)


def _refuse(error: MrlhfError) -> int:
    """Report bad input once for all ranks; returns the exit code."""
    line = f"error: {error}{users_traceback(error)}\n"
    try:
        launch = read_place()
    except ConfigError:
        if speaks_without_place():
            sys.stderr.write(line)
        return BAD_INPUT

    own = Failure(launch.rank, BAD_INPUT, str(error), time.time())
    report_before_start(launch, own, lambda _: sys.stderr.write(line))
    return BAD_INPUT
