"""The checks before a run, and the dry run.

The dry run checks everything for a number of ranks that need not exist, the data and the user's
functions included. This file builds no process group or model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrlhf.config.methods import find_method
from mrlhf.config.roots import AnyConfig, PPOConfig
from mrlhf.device import cores, device_kind, gpu_memory_mb, host_memory_bytes
from mrlhf.errors import ConfigError, WeightError
from mrlhf.inference.checks import require_engine
from mrlhf.inputs.paths import (
    absent_paths,
    awaits_tokenizer,
    is_here,
    own_methods,
    require_paths,
    with_local_inputs,
    without,
)
from mrlhf.inputs.read import check_inputs
from mrlhf.metrics.trackers import check_trackers
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.models.freezing import parameter_counts
from mrlhf.models.published import published_model
from mrlhf.parallel.layout import AxisSizes
from mrlhf.preflight.batches import trained_models
from mrlhf.preflight.checks import check, check_generation
from mrlhf.preflight.memory_checks import check_memory, describe_phases, with_keys
from mrlhf.preflight.model_checks import check_models, of_shipped_sizes, without_weights
from mrlhf.preflight.output import check_output
from mrlhf.preflight.words import count, describe, describe_cache, describe_memory

_ON = {"cpu": "on a CPU", "cuda": "on a GPU"}
_MOST_RANKS = 10**6


def smallest_world(config: AnyConfig) -> int:
    """The fewest ranks that fit the layout of every role and a replica of the engine."""
    smallest = math.lcm(*(AxisSizes.of(role).smallest_world for role in config.roles().values()))
    if isinstance(config, PPOConfig) and AxisSizes.of(config.actor).shares_experts_across:
        return math.lcm(smallest, config.rollout.tp)
    return smallest


def check_ranks(option: str, ranks: int) -> None:
    """Refuse a number of ranks that no job has; the error names the `option` that gives it."""
    if not 1 <= ranks <= _MOST_RANKS:
        bound = "below 1" if ranks < 1 else f"above {_MOST_RANKS}"
        raise ConfigError(f"{option} {ranks} is {bound}")


@dataclass(frozen=True)
class DryRunResult:
    """The findings of a dry run."""

    missing: tuple[str, ...]  # names that this machine lacks, one line each
    text: str  # the whole report; it begins with what is missing


def dry_run(
    config: AnyConfig,
    world_size: int | None,
    foresee: Callable[[], str] | None = None,
    begun: Mapping[str, Any] | None = None,
) -> DryRunResult:
    """Check `config` for `world_size` ranks (None: the fewest that fit) and describe the run.

    Files that are missing on this machine are not checked; a model needs only its `config.json`.
    So of repositories that it names, data is taken, and of models all but the weights.

    Args:
        foresee: says what a start would do with the output directory.
        begun: the keys of the run that a start would go on with.

    Raises:
        ConfigError, DataError, RewardError: one line for each mistake.
    """
    if world_size is None:
        world_size = smallest_world(config)
    check_ranks("--world-size", world_size)
    check(config, world_size)
    config, taken, reasons = with_local_inputs(config, begun or {}, weights=False)
    check_output(config)
    # Several keys may name one repository, whose reason is then one line.
    why = dict.fromkeys(reasons.get(path.path) or without(path) for path in absent_paths(config))
    missing = (*why, *_missing_packages(config))
    config, on = _with_device(config, world_size)
    specs = check_models(config)
    check_memory(config, specs, world_size)
    if isinstance(config, PPOConfig):
        _check_user_methods(config)
    steps, episode = check_inputs(config)

    lines = [f"not found: {line}" for line in missing]
    lines += [f"{name}: {places[0]}" for name, places in taken.items()]
    lines += [f"not checked: the weights of {name}" for name in without_weights(config)]
    lines += of_shipped_sizes(config)
    if awaits_tokenizer(config):
        lines.append(f"not checked: the data, since {config.data.tokenizer} holds no tokenizer")
    fits = "what could be checked" if lines else "configuration"

    lines.append(describe(config, world_size, steps))
    if foresee is not None:
        lines.append(f"  {foresee()}")
    lines += describe_memory(config, specs, world_size, on)
    lines += describe_phases(config, specs, world_size, on)
    if isinstance(config, PPOConfig):
        lines += describe_cache(config, specs["rollout"], on)
    lines += episode
    lines.append(f"{fits} fits {count(world_size, 'rank')}")
    return DryRunResult(missing, "\n".join(lines))


def _with_device(config: AnyConfig, world_size: int) -> tuple[AnyConfig, str]:
    """The configuration with the device that a dry run describes, and that device in words.

    Where `auto` finds no GPU, GPUs are assumed for a run that is too large for this machine: it has
    more ranks than cores, or models that do not fit its memory in float32.
    """
    kind = device_kind(config.distributed.device)
    if kind == "cuda" or config.distributed.device == "cpu":
        return config, _ON[kind]
    is_large = world_size > cores() or _least_bytes(config, world_size) > host_memory_bytes()
    kind, other = ("cuda", "cpu") if is_large else ("cpu", "cuda")
    words = f"{_ON[kind]}, assumed; distributed.device={other} changes that"
    return with_keys(config, {"distributed.device": kind}), words


def _least_bytes(config: AnyConfig, world_size: int) -> int:
    """Bytes of all replicas together in float32, with gradients and states of what trains whole."""
    total = 0
    for name, role in config.roles().items():
        place = published_model(role.path)
        if place is not None and not (Path(role.path) / "config.json").is_file():
            role = role.model_copy(update={"path": str(place)})
        try:
            spec = spec_of_role(role, config.head_of(name))
        except (ConfigError, WeightError):
            continue  # other checks report that it is missing or wrong

        trained, every = parameter_counts(spec)
        replicas = world_size // AxisSizes.of(role).ranks
        total += 4 * replicas * every
        if name in trained_models(config):
            total += (4 * replicas + 8) * trained  # replicas share states
    return total


def _missing_packages(config: AnyConfig) -> Iterator[str]:
    """The optional packages that the run needs and this machine lacks, one line each."""
    try:
        check_trackers(config.trainer.trackers)
    except ConfigError as error:
        yield str(error)
    if isinstance(config, PPOConfig):
        try:
            require_engine(config.rollout.engine)
        except ConfigError as error:
            yield str(error)


def preflight(config: AnyConfig, world_size: int) -> str:
    """Check that `config` can run here on `world_size` ranks, and describe the run; see `check`."""
    check(config, world_size)
    check_output(config)
    check_trackers(config.trainer.trackers)
    require_paths(config)
    gpu_mb = gpu_memory_mb() if device_kind(config.distributed.device) == "cuda" else None
    check_memory(config, check_models(config, need_weights=True), world_size, gpu_mb)
    if isinstance(config, PPOConfig):
        _check_user_methods(config)
        require_engine(config.rollout.engine)
    return describe(config, world_size)


def check_policy(config: PPOConfig, world_size: int) -> None:
    """Check, before anything is built, that so many ranks can ask the policy; ConfigError."""
    check_generation(config, world_size)
    require_paths(config)
    check_models(config, need_weights=True)
    require_engine(config.rollout.engine)


def _check_user_methods(config: PPOConfig) -> None:
    """Find the user's own functions in the method, as far as their files are here."""
    problems = []
    for key, name in own_methods(config).items():
        try:
            if is_here(name):
                find_method(key, name, {})
        except ConfigError as error:
            problems.append(str(error))

    if problems:
        raise ConfigError("\n".join(problems))
