"""The five programs that train, each started by torchrun on every rank.

Usage: torchrun --no-python --nproc-per-node=N mrlhf-train-ppo --config FILE [--config FILE ...]
           [key.path=value ...] [--dry-run [--world-size N] [--allow-missing]]

The checks and the trainers are imported once the configuration has been read: the import takes
seconds, and neither --help nor a mistake in the configuration has to wait for it.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TypeVar

import torch.distributed as dist

from mrlhf.config import (
    CriticConfig,
    DPOConfig,
    PPOConfig,
    RewardModelConfig,
    SFTConfig,
    parse_args,
)
from mrlhf.config.arguments import Arguments, DryRun
from mrlhf.errors import ConfigError, HangError, Interrupted, MrlhfError
from mrlhf.log import configure_logging, quiet_transformers
from mrlhf.parallel.job import (
    STORE_S,
    Launch,
    connect_before_start,
    meet,
    one_of_each_machine_first,
    read_launch,
    read_place,
    speaks_without_place,
)
from mrlhf.printable import STANDARD_OUTPUT, show, wrapped
from mrlhf.run.failures import (
    BAD_INPUT,
    FAILED,
    QUEUE_AGAIN,
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
ConfigT = TypeVar("ConfigT", PPOConfig, SFTConfig, RewardModelConfig, CriticConfig, DPOConfig)

NOT_FOUND = 3


def _start(root: type[ConfigT], trainer: str) -> int:
    """Run `module.function` of the trainers, which is imported when the configuration is read."""

    def train(config: ConfigT) -> None:
        module, _, function = trainer.rpartition(".")
        getattr(import_module(f"mrlhf.trainers.{module}"), function)(config)

    return main(root, train, sys.argv[1:])


# The programs, each a function without arguments.
critic = partial(_start, CriticConfig, "critic.train_critic")
dpo = partial(_start, DPOConfig, "dpo.train_dpo")
ppo = partial(_start, PPOConfig, "ppo.run.train_ppo")
reward_model = partial(_start, RewardModelConfig, "reward_model.train_reward_model")
sft = partial(_start, SFTConfig, "sft.train_sft")


def main(
    root: type[ConfigT],
    train: Callable[[ConfigT], None],
    argv: Sequence[str],
    read: Callable[[type[ConfigT], Sequence[str]], Arguments[ConfigT]] = parse_args,
    check: Callable[[ConfigT, int], str] | None = None,
) -> int:
    """Read a configuration of class `root`, check it, run `train` on every rank, end the process.

    `check` says what is about to run on so many ranks; None: `preflight`.

    If a rank fails, it reports why, and all ranks end with the same exit code. If the run was
    interrupted, all ranks end with exit code 75, which asks a scheduler to queue the job again.

    Returns:
        The exit code after a dry run or bad input.
    """
    quiet_transformers()
    try:
        config, dry, left_out = read(root, argv)
        if dry is not None:
            return _dry_run(config, dry, left_out)

        launch = read_launch()
        end_with_launcher()
        configure_logging(launch.rank, console_of_log(config.trainer.console))
        before, day, config = _compare(launch, config)
        config = _on_day(config, day)
        if left_out:
            logger.info("%s", left_out)
        from mrlhf.preflight import preflight

        description = (check or preflight)(config, launch.world_size)
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
    code = _train(config, train, launch)
    dist.destroy_process_group()
    del before  # of a store that rank 0 holds, whose end others would notice
    # A process group that is still referred to would be destroyed when the interpreter ends, and
    # gloo's threads sometimes abort then.
    leave(code)


def _dry_run(config: ConfigT, dry: DryRun, left_out: str) -> int:
    """Report what a run would be; the exit code is not 0 if something it needs was not checked."""
    from mrlhf.preflight import dry_run
    from mrlhf.run.startup import begun_with, first_day_of, foresee

    config = _on_day(config, first_day_of(config))
    found = dry_run(config, dry.world_size, lambda: foresee(config), begun_with(config))
    if left_out:
        show(wrapped(left_out, sys.stdout))
    show(wrapped(found.text, sys.stdout))

    count = len(found.missing)
    if dry.allow_missing or not count:
        return 0
    what = "1 thing was" if count == 1 else f"{count} things were"
    sys.stderr.write(
        f"error: {what} not found and so not checked, see 'not found' above; correct that, or add "
        "--allow-missing if another machine has it\n"
    )
    return NOT_FOUND


def _train(config: ConfigT, train: Callable[[ConfigT], None], launch: Launch) -> int:
    """Train, and wait until all ranks have; returns the exit code, or ends a rank that fails."""
    code = 0
    try:
        train(config)
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
    return code


def _on_day(config: ConfigT, day: str) -> ConfigT:
    """The configuration with `data.date`: chat templates write that day, whenever a run goes on."""
    return config.model_copy(update={"data": config.data.model_copy(update={"date": day})})


def _compare(launch: Launch, config: ConfigT) -> tuple[dist.Store | None, str, ConfigT]:
    """Take the repositories that are named, and refuse ranks that were not started alike.

    Returns the store, which rank 0 must keep, the day of the run's first start by its clock, and
    the configuration with local paths.
    """
    from mrlhf.data.hub import repository_of
    from mrlhf.inputs.paths import input_paths, with_local_inputs
    from mrlhf.run.startup import begun_with, first_day_of

    def take(is_first: bool) -> tuple[ConfigT, dict[str, str]]:
        begun = begun_with(config)
        here, taken, reasons = with_local_inputs(config, begun, from_cache=not is_first)
        if reasons:
            raise ConfigError("\n".join(reasons.values()))
        for name, places in taken.items():
            logger.info("%s was taken from the Hub: %s", name, places[0])
        return here, {name: str(repository_of(places[0])) for name, places in taken.items()}

    if launch.world_size == 1:
        here, _ = take(True)
        return None, first_day_of(config), here
    timeout_s = max(STORE_S, config.distributed.timeout_s)
    before = connect_before_start(timeout_s)
    look = Failures(before, launch.rank, launch.world_size).raise_if_reported
    met = meet(before, launch, timeout_s, look)
    here, commits = one_of_each_machine_first(met, launch, take, look)
    paths = [path for path in input_paths(here) if path.key != "trainer.resume"]
    facts = describe_start(config, [(path.key, path.path) for path in paths])
    facts |= {f"the commit of {name}": commit for name, commit in commits.items()}
    to_all = partial(first_day_of, config)
    store, day = require_same_start(launch, facts, timeout_s, look, to_all)
    return store, day, here


def _refuse(error: MrlhfError) -> int:
    """Report bad input once for all ranks; returns the exit code."""
    line = wrapped(f"error: {error}{users_traceback(error)}\n", sys.stderr)
    try:
        launch = read_place()
    except ConfigError:
        if speaks_without_place():
            sys.stderr.write(line)
        return BAD_INPUT

    own = Failure(launch.rank, BAD_INPUT, str(error), time.time())
    report_before_start(launch, own, lambda _: sys.stderr.write(line))
    return BAD_INPUT
