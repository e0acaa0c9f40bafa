"""Tries layouts for a configuration, and keeps those that fit, the fastest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from mrlhf.config.roots import AnyConfig, PPOConfig, RewardModelConfig, SFTConfig
from mrlhf.errors import ConfigError
from mrlhf.inference.engine_sizes import engine_tp_problem
from mrlhf.models.parallel_sizes import ep_problem, pp_problem, tp_problem
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
_TOLD_APART = 1.05  # ratio of two times


@dataclass(frozen=True)
class Plan:
    """A layout of a run."""

    config: AnyConfig
    keys: dict[str, Any]  # what differs from the configuration that was given, by dotted name
    memory: Footprint
    time: Estimate


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    best: list[Plan]  # that fit, the fastest first
    # That would be faster than the best of these, the fastest first; if none fits, those that come
    # nearest.
    too_large: list[Plan]
    tried: int


def search(
    config: AnyConfig, specs: Specs, world_size: int, gpu: Gpu, lengths: Lengths, reserve: float
) -> Found:
    """Try layouts of the trained models and the engine on `world_size` GPUs.

    Frozen models keep what they have, or follow the policy if they inherit its sizes.

    Args:
        specs: the model of each role.
        reserve: 10⁹ bytes of each GPU that are left free.
    """
    room = int((gpu.memory_gb - reserve) * 1e9)
    plans = []
    for keys in _candidates(config, specs, world_size, gpu):
        for more in offloads(config):  # the cheapest first
            changed = with_keys(config, keys | more)
            sizes = footprint(changed, specs, world_size)
            if sizes.total(sizes.peak) <= room:
                break
        time = estimate(changed, specs, sizes, world_size, gpu, lengths, room)
        plans.append(Plan(changed, keys | more, sizes, time))

    plans.sort(key=_order)
    fitting = [plan for plan in plans if plan.memory.total(plan.memory.peak) <= room]
    best = _first(fitting, world_size)
    if best:
        faster = [plan for plan in plans if _order(plan) < _order(best[0])]
    else:
        faster = sorted(plans, key=lambda plan: plan.memory.total(plan.memory.peak))
    return Found(best, _first(faster, world_size), len(plans))


def _first(plans: Sequence[Plan], world_size: int) -> list[Plan]:
    """The first few that run, one of each layout, whatever its micro-batches."""
    kept: dict[tuple[Any, ...], Plan] = {}
    for plan in plans:
        layout = tuple(value for key, value in plan.keys.items() if _is_of_layout(key))
        if len(kept) < _SHOWN and layout not in kept and _runs(plan.config, world_size):
            kept[layout] = plan
    return list(kept.values())


def _is_of_layout(key: str) -> bool:
    return not key.endswith((".recompute", ".micro_batch_tokens", ".offload", ".stream"))


def _order(plan: Plan) -> tuple[int, int, float]:
    """The fastest first; of times that an estimate cannot tell apart, the simplest layout."""
    role = next(iter(plan.config.roles().values()))
    axes = sum(role.value_of(axis) > 1 for axis in ("tp", "cp", "pp", "vpp", "ep"))
    second = plan.time.step
    kinds = axes + (role.recompute == "full") + len(role.offload)
    return round(math.log(second, _TOLD_APART)), kinds, second


def _runs(config: AnyConfig, world_size: int) -> bool:
    """Whether a run's own checks take it."""
    try:
        check(config, world_size)
        check_models(config)
    except ConfigError:
        return False
    return True


def _candidates(
    config: AnyConfig, specs: Specs, world_size: int, gpu: Gpu
) -> Iterator[dict[str, Any]]:
    """Layouts that the models and so many ranks allow, as keys."""
    policy, *others = trained_models(config)
    if not isinstance(config, SFTConfig | RewardModelConfig):
        others.append("reference")
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
            for tp in _engine_sizes(config, specs[policy], layout, gpu):
                yield keys | {"rollout.tp": tp}


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
    sizes = AxisSizes(**{field.name: layout[field.name] for field in fields(AxisSizes)})
    problems = (
        sizes.problem("", world_size),
        tp_problem("", sizes.tp, spec),
        pp_problem("", sizes.stages, spec),
        ep_problem("", sizes, spec),
    )
    return not any(problems)


def _engine_sizes(
    config: PPOConfig, spec: ModelSpec, layout: dict[str, Any], gpu: Gpu
) -> Iterator[int]:
    """Tensor-parallel sizes of the engine, inside a machine."""
    ranks = layout["tp"] * layout["cp"] * layout["pp"]
    for tp in _POWERS[:4]:
        inside = tp <= gpu.per_machine and ranks % tp == 0
        if inside and engine_tp_problem(config.rollout.engine, tp, spec, ranks) is None:
            yield tp
