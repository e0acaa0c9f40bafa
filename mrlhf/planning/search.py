"""Tries layouts for a configuration, and keeps those that fit, the fastest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from mrlhf.config.roots import AnyConfig, DPOConfig, PPOConfig
from mrlhf.config.sections import RoleSection
from mrlhf.device import dtype_on
from mrlhf.errors import ConfigError
from mrlhf.inference.sizes import engine_tp_problem
from mrlhf.models.freezing import parameter_counts
from mrlhf.models.parallel_sizes import cp_problem, ep_problem, pp_problem, tp_problem
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import AxisSizes
from mrlhf.planning.gpus import Gpu
from mrlhf.planning.seconds import Estimate, Lengths, estimate
from mrlhf.preflight.batches import longest_unit, trained_models
from mrlhf.preflight.checks import check
from mrlhf.preflight.footprint import Footprint, Specs, footprint
from mrlhf.preflight.memory_checks import offloads, with_keys
from mrlhf.preflight.model_checks import check_models

_POWERS = tuple(2**power for power in range(9))
_PACKS = (1, 2, 4, 8)  # sequences of full length in a micro-batch
_SHARE = 4096  # the fewest tokens of a sequence that a context-parallel rank should hold
_SHOWN = 5
# Ratio of two times; runs were 8.6 % from their estimates in the mean
# (docs/lab/2026-11-planning.md).
_TOLD_APART = 1.1
_MEMORY_STEP = 0.1  # of a GPU
_NOT_OF_LAYOUT = (".recompute", ".micro_batch_tokens", ".offload", ".stream")


@dataclass(frozen=True)
class Plan:
    """A layout of a run."""

    config: AnyConfig
    keys: dict[str, Any]  # what differs from the configuration that was given, by dotted name
    memory: Footprint
    time: Estimate

    @property
    def most(self) -> int:
        """The bytes in the phase that takes most, on the GPU that has most."""
        return self.memory.total(self.memory.peak)


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    own: Plan | str  # the layout that was given, or why it does not fit so many GPUs
    best: list[Plan]  # that fit, the fastest first
    # That would be faster than the best of these, the fastest first; if none fits, those that come
    # nearest.
    too_large: list[Plan]
    tried: int


def search(
    config: AnyConfig,
    specs: Specs,
    world_size: int,
    gpu: Gpu,
    lengths: Lengths,
    reserve: float,
    advance: Callable[[int, int], None] = lambda done, of: None,
) -> Found:
    """Try layouts of the trained models and the engine on `world_size` GPUs.

    Frozen models keep what they have, or follow the policy if they inherit its sizes.

    Args:
        specs: the model of each role.
        reserve: 10⁹ bytes of each GPU that are left free.
        advance: told how many layouts have been tried, and of how many.
    """
    room = int((gpu.memory_gb - reserve) * 1e9)

    def plan_of(keys: dict[str, Any], sizes: Footprint) -> Plan:
        changed = with_keys(config, keys)
        time = estimate(changed, specs, sizes, world_size, gpu, lengths, room)
        return Plan(changed, keys, sizes, time)

    fitting: list[Plan] = []
    too_large: list[Plan] = []
    choices = offloads(config)  # the cheapest first
    candidates = list(_candidates(config, specs, world_size, gpu, room))
    for number, keys in enumerate(candidates):
        advance(number, len(candidates))
        found = len(fitting)
        tried = with_keys(config, keys)
        for more in choices:
            sizes = footprint(with_keys(tried, more), specs, world_size)
            if sizes.total(sizes.peak) > room:
                continue
            plan = plan_of(keys | more, sizes)
            fitting.append(plan)
            # What leaves the GPUs makes room for the KV cache too.
            if not isinstance(config, PPOConfig) or (
                plan.time.decoded_at_once == config.rollout.max_num_seqs
            ):
                break
        if len(fitting) == found:
            too_large.append(plan_of(keys | more, sizes))

    fastest = min((plan.time.step for plan in fitting), default=0.0)
    fitting.sort(key=lambda plan: _order(plan, fastest, gpu))
    if fitting:
        too_large = [plan for plan in too_large if plan.time.step * _TOLD_APART < fastest]
    too_large.sort(key=lambda plan: plan.time.step if fitting else plan.most)
    problem = _problem(config, world_size)
    own = problem or plan_of({}, footprint(config, specs, world_size))
    first = _first(too_large, world_size)
    return Found(own, _first(fitting, world_size), first, len(candidates))


def on_one_rank(config: AnyConfig) -> AnyConfig:
    """The run with each trained model and the engine whole on a rank."""
    alone = {field.name: field.default for field in fields(AxisSizes)} | {
        "sequence_parallel": False
    }
    keys = {
        f"{name}.{key}": value for name in trained_models(config) for key, value in alone.items()
    }
    engine = {"rollout.tp": 1, "rollout.ep": 1} if isinstance(config, PPOConfig) else {}
    return with_keys(config, keys | engine)


def _first(plans: Sequence[Plan], world_size: int) -> list[Plan]:
    """The first few that run, one of each layout, whatever its micro-batches."""
    kept: dict[tuple[Any, ...], Plan] = {}
    for plan in plans:
        layout = tuple(
            value for key, value in plan.keys.items() if not key.endswith(_NOT_OF_LAYOUT)
        )
        if len(kept) == _SHOWN:
            break
        if layout not in kept and _problem(plan.config, world_size) is None:
            kept[layout] = plan
    return list(kept.values())


def _order(plan: Plan, fastest: float, gpu: Gpu) -> tuple[float, ...]:
    """Sorts plans: the fastest first; of equally fast ones, the one that offloads least.

    Then the one with least memory, and where that is about equal too, the simplest.
    """
    role = next(iter(plan.config.roles().values()))
    axes = sum(role.value_of(axis) > 1 for axis in ("tp", "cp", "pp", "vpp", "ep"))
    seconds = plan.time.step
    _, optim = next(iter(trained_models(plan.config).values()))
    offloaded = len(role.offload) + (optim.stream is not None)
    kinds = axes + (role.recompute == "full")
    steps = round(plan.most / (1e9 * gpu.memory_gb * _MEMORY_STEP))
    return int(math.log(seconds / fastest, _TOLD_APART)), offloaded, steps, kinds, seconds


def _problem(config: AnyConfig, world_size: int) -> str | None:
    """Why a run's own checks do not take it."""
    try:
        check(config, world_size)
        check_models(config)
    except ConfigError as error:
        return str(error)
    return None


def _candidates(
    config: AnyConfig, specs: Specs, world_size: int, gpu: Gpu, room: int
) -> Iterator[dict[str, Any]]:
    """Layouts that the models and so many ranks allow, as keys."""
    policy, *others = trained_models(config)
    if isinstance(config, PPOConfig | DPOConfig):
        others.append("reference")

    most = _engine_ranks(specs[policy], config.roles()[policy], world_size, gpu, room)
    shares = [size for size in _POWERS[:4] if size == 1 or config.data.max_length >= size * _SHARE]
    for layout in _layouts(specs[policy], world_size, gpu, shares):
        sections = [policy]
        for name in others:
            if _fits(layout, specs.get(name, specs[policy]), world_size):
                sections.append(name)

        longest = longest_unit(config, layout["cp"])
        for recompute, pack in product(("none", "full"), _PACKS):
            own = layout | {"recompute": recompute, "micro_batch_tokens": pack * longest}
            keys = {f"{name}.{key}": value for name in sections for key, value in own.items()}
            if not isinstance(config, PPOConfig):
                yield keys
                continue
            for tp in _engine_sizes(config, specs[policy], layout, world_size, most):
                yield keys | {"rollout.tp": tp}


def _engine_ranks(spec: ModelSpec, role: RoleSection, world_size: int, gpu: Gpu, room: int) -> int:
    """The most ranks of an engine: a machine's if that leaves room for the weights in training."""
    nbytes = parameter_counts(spec)[1] * dtype_on(role.dtype, gpu.device).itemsize
    fits = nbytes / gpu.per_machine + nbytes / world_size <= room
    return gpu.per_machine if fits else world_size


def _layouts(
    spec: ModelSpec, world_size: int, gpu: Gpu, shares: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Sizes of the axes of a trained model; `shares` are those of context parallelism."""
    experts = _POWERS if spec.experts is not None else (1,)
    for tp, pp, cp, ep in product(_POWERS[:4], _POWERS[:6], shares, experts):
        if tp * pp * cp > world_size or ep > world_size or tp > gpu.per_machine:
            continue
        for vpp in (1, 2) if pp > 1 else (1,):
            layout = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "vpp": vpp}
            layout |= {"etp": None, "pp_layers": None, "sequence_parallel": tp > 1}
            if _fits(layout, spec, world_size):
                yield layout


def _fits(layout: dict[str, Any], spec: ModelSpec, world_size: int) -> bool:
    sizes = _sizes_of(layout)
    problems = (
        sizes.problem("", world_size),
        tp_problem("", sizes.tp, spec),
        cp_problem("", sizes, spec),
        pp_problem("", sizes.stages, spec),
        ep_problem("", sizes, spec),
    )
    return not any(problems)


def _sizes_of(layout: dict[str, Any]) -> AxisSizes:
    return AxisSizes(**{field.name: layout[field.name] for field in fields(AxisSizes)})


def _engine_sizes(
    config: PPOConfig, spec: ModelSpec, layout: dict[str, Any], world_size: int, most: int
) -> Iterator[int]:
    """Tensor-parallel sizes of the engine, up to `most` ranks."""
    sizes = _sizes_of(layout)
    # A replica may lie across groups that share experts.
    ranks = world_size if sizes.shares_experts_across else sizes.ranks
    for tp in _POWERS:
        fits = tp <= most and ranks % tp == 0
        if fits and engine_tp_problem(config.rollout.engine, tp, spec, ranks) is None:
            yield tp
