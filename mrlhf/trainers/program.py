"""The life of a launcher: parse, check, run, and turn an error into one line and an exit code.

It knows no algorithm; the launcher hands one in.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch.distributed as dist

from mrlhf.config import PPOConfig, RewardModelConfig, SFTConfig, check, check_models, describe, dry_run, parse_args
from mrlhf.config.installed import require_engine
from mrlhf.device import is_first_process, read_launch
from mrlhf.errors import ConfigError, MrlhfError
from mrlhf.log import configure_logging

logger = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", PPOConfig, SFTConfig, RewardModelConfig)

BAD_INPUT = 2
FAILED = 1


def main(root_class: type[ConfigT], train: Callable[[ConfigT], None], argv: Sequence[str]) -> int:
    """Run `train` as the arguments say, and end the process; returns its exit code where there was nothing to run.

    A failing rank prints its own error and exits at once with a code other than 0; torchrun then ends the others.
    """
    try:
        config, dry = parse_args(root_class, argv)
        if dry is not None:
            sys.stdout.write(dry_run(config, dry.world_size) + "\n")
            return 0
        launch = read_launch()
        configure_logging(launch.rank)
        check(config, launch.world_size)
        check_models(config)
        if isinstance(config, PPOConfig):
            require_engine(config.rollout.engine)
    except ConfigError as error:
        # Every rank sees the same arguments; one of them says what is wrong with them.
        if is_first_process():
            sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT
    logger.info("%s", describe(config, launch.world_size))
    try:
        train(config)
    except MrlhfError as error:
        logger.error("%s: %s", type(error).__name__, error)
        _leave(FAILED)
    except Exception:
        logger.exception("this rank failed")
        _leave(FAILED)
    gc.collect()  # what an engine shares with other processes is given back as it goes
    dist.barrier()
    dist.destroy_process_group()
    # Groups that are still referred to would go when the interpreter does, where gloo's threads now and then abort.
    _leave(0)


def _leave(code: int) -> NoReturn:
    """End the process at once: no destructor runs, and none waits for ranks that hang in a collective."""
    logging.shutdown()
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(code)
