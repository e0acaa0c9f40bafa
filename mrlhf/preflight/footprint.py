"""The bytes of a run on the rank that has most, by owner and by phase.

Weights, gradients and optimizer states come from the shapes that a run is built of, activations
from `activations`. The buffers of NCCL and memory in pieces too small to use are not known here:
the caller leaves room for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mrlhf.config.roots import AnyConfig, PPOConfig
from mrlhf.config.sections import RoleSection
from mrlhf.device import device_kind, dtype_on
from mrlhf.models.lora import without_adapters
from mrlhf.models.parameters import engine_pieces, keeps_float32, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.layout import MODEL_AXES, AxisSizes, ParallelLayout
from mrlhf.preflight.activations import Activations
from mrlhf.preflight.batches import role_work, trained_models
from mrlhf.preflight.model_bytes import merged_bytes, training_bytes
from mrlhf.preflight.model_checks import cache_needs
from mrlhf.training.residency import STREAMED_BYTES
from mrlhf.weights.shard import Piece

Specs = Mapping[str, ModelSpec]
GENERATION = "generation"
ENGINE = "engine/params"  # those that are not the actor's own tensors
MERGED = "merged/params"  # the actor's weights with its adapters added
OWNERS = ("params", "grads", "optimizer")  # of a model that is trained


@dataclass(frozen=True)
class RankBytes:
    """Bytes on one GPU, by owner, such as `actor/params` or `engine/cache`."""

    held: dict[str, int]  # those that never leave
    phases: dict[str, dict[str, int]]  # more of them while a phase lasts, by its name

    def total(self, phase: str) -> int:
        """The bytes while a phase lasts."""
        return sum(self.held.values()) + sum(self.phases[phase].values())

    def owned(self, phase: str) -> int:
        """The same without activations, which have no owner in a run."""
        of_phase = self.phases[phase].items()
        kept = sum(size for owner, size in of_phase if owner.endswith("/activations"))
        return self.total(phase) - kept

    def owners(self, phase: str) -> dict[str, int]:
        """What a phase consists of, the largest first."""
        every = self.held | self.phases[phase]
        return dict(sorted(every.items(), key=lambda item: -item[1]))

    @property
    def most(self) -> int:
        """The bytes in the phase that takes most."""
        return max(map(self.total, self.phases))


@dataclass(frozen=True)
class Footprint:
    """The bytes of a run on those of its ranks that differ: of each combination of stages one."""

    sizes: dict[str, int]  # by owner the most of any rank, wherever it is; not those of one phase
    ranks: list[RankBytes]
    sample_bytes: int = 0  # of a response of full length in the KV cache; 0 without an engine

    def total(self, phase: str) -> int:
        """The bytes while a phase lasts, on the rank that has most then."""
        return max(rank.total(phase) for rank in self.ranks)

    def owned(self, phase: str) -> int:
        """The same without activations."""
        return max(rank.owned(phase) for rank in self.ranks)

    @property
    def peak(self) -> str:
        """The phase that takes most."""
        return max(self.phases, key=self.total)

    @property
    def fullest(self) -> RankBytes:
        """The rank that has most in any phase."""
        return max(self.ranks, key=lambda rank: rank.most)

    @property
    def held(self) -> dict[str, int]:
        """What never leaves the fullest rank."""
        return self.fullest.held

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """What the fullest rank has besides in each phase."""
        return self.fullest.phases


def footprint(config: AnyConfig, specs: Specs, world_size: int) -> Footprint:
    """Add up a run whose layout fits `specs`, the models of `check_models`, and so many GPUs.

    In generation the KV cache counts with one response of full length; a run gives it what is left.
    """
    sizes: dict[str, int] = {}
    ranks = []
    # Stages of a model are consecutive ranks, so the first rank of each part has other ones.
    parts = math.lcm(*(role.value_of("pp") for role in config.roles().values()))
    for part in range(parts):
        own, rank = _of_rank(config, specs, world_size, part * world_size // parts)
        sizes |= {owner: max(size, sizes.get(owner, 0)) for owner, size in own.items()}
        ranks.append(rank)
    sample = cache_needs(config, specs["actor"]).bytes if isinstance(config, PPOConfig) else 0
    return Footprint(sizes, ranks, sample)


def _of_rank(
    config: AnyConfig, specs: Specs, world_size: int, rank: int
) -> tuple[dict[str, int], RankBytes]:
    """The bytes of all owners of a rank but those of one phase, and those on its GPU."""
    trained = trained_models(config)
    # No micro-batch is larger than all that a rank has of an optimizer step.
    most_tokens = {
        work.name: work.per_rank * work.longest for work in role_work(config, world_size)
    }
    sizes: dict[str, int] = {}
    held: dict[str, int] = {}
    leaving: dict[str, dict[str, int]] = {}  # what a role's passes bring, by role
    phases: dict[str, dict[str, int]] = {}
    for name, role in config.roles().items():
        if name not in trained and not isinstance(config, PPOConfig):
            continue  # DPO's reference has left before the policy is built, which takes more
        spec = specs[name]
        layout = ParallelLayout.for_world(name, world_size, AxisSizes.of(role))
        stage = layout.coordinates(rank).pp
        itemsize = _itemsize(config, role)
        if name in trained:
            optim = trained[name][1]
            states_of = (optim.splits_states, optim.name == "muon")
            bytes_of = training_bytes(spec, layout, itemsize, *states_of, stage)
            own = dict(zip(OWNERS, vars(bytes_of).values(), strict=True))
            phase = update_of(name)
            device = device_kind(config.distributed.device)
            tokens = min(role.micro_batch_tokens, most_tokens[name])
            filled = role.model_copy(update={"micro_batch_tokens": tokens})
            most = Activations(filled, spec, layout, stage, itemsize, device).most
            kept = {f"{name}/activations": most}
            if optim.stream is not None:
                states = own.pop("optimizer")
                sizes[f"{name}/optimizer"] = states
                kept[f"{name}/optimizer, in parts"] = _part_bytes(spec, layout, stage, itemsize)
                # Main weights are made on the GPU, once the gradients have left.
                mains = states // 3 if itemsize < 4 else 0
                phases[f"start of {name}"] = {f"{name}/main weights": mains}
        else:
            own = {"params": sum(_held(spec, _smallest(layout), itemsize)[stage].values())}
            phase, kept = f"passes of {name}", {}
        sizes |= {f"{name}/{owner}": nbytes for owner, nbytes in own.items()}
        held |= {f"{name}/{owner}": own[owner] for owner in own if owner not in role.offload}
        leaving[name] = {f"{name}/{owner}": own[owner] for owner in own if owner in role.offload}
        phases[phase] = leaving[name] | kept
        if f"start of {name}" in phases and "params" in role.offload:
            phases[f"start of {name}"][f"{name}/params"] = own["params"]

    if not isinstance(config, PPOConfig):
        return sizes, RankBytes(held, phases)
    if config.full_kl_in_loss:  # the reference's output layer is part of the loss
        phases[update_of("actor")] |= leaving.get("reference", {})
    spec = specs["actor"]
    layout = ParallelLayout.for_world("actor", world_size, AxisSizes.of(config.actor))
    stage = layout.coordinates(rank).pp
    rollout = config.rollout
    itemsize = _itemsize(config, config.actor)
    is_native = rollout.engine == "native"
    engine = _engine_bytes(
        without_adapters(spec), layout, stage, itemsize, is_native, rollout.tp, rollout.ep or 1
    )
    generating = {
        owner: size for owner, size in leaving["actor"].items() if owner.endswith("/params")
    }
    if spec.lora is not None and rollout.lora == "merged":
        held[MERGED] = merged_bytes(spec, layout, itemsize, stage)
    if spec.lora is not None and rollout.lora != "merged":
        held[ENGINE] = engine  # the base comes once
    else:
        generating[ENGINE] = engine
    sample = cache_needs(config, spec).bytes
    phases[GENERATION] = generating | {"engine/cache, at least": sample}
    return sizes | {ENGINE: engine}, RankBytes(held, phases)


def update_of(name: str) -> str:
    """The phase in which a model is trained."""
    return f"update of {name}"


def _itemsize(config: AnyConfig, role: RoleSection) -> int:
    """Bytes of a weight of a role."""
    return dtype_on(role.dtype, device_kind(config.distributed.device)).itemsize


def _part_bytes(spec: ModelSpec, layout: ParallelLayout, stage: int, itemsize: int) -> int:
    """The most of a weight's main weights and moments that pass through a GPU together."""
    weights = max(_held(spec, _smallest(layout), itemsize)[stage].values()) // itemsize
    return max(STREAMED_BYTES, 3 * 4 * weights)


@lru_cache(maxsize=4096)
def _engine_bytes(
    spec: ModelSpec,
    layout: ParallelLayout,
    stage: int,
    itemsize: int,
    native: bool,
    tp: int,
    ep: int,
) -> int:
    """The engine's weights that are not the actor's own tensors, on a rank of a stage.

    A tensor with exactly the slices of one of the actor's shares its memory.
    """
    choose = EngineLayout.closest if native else EngineLayout.consecutive
    engine = choose(layout, tp, ep)
    held = _held(spec, _smallest(layout), itemsize)[stage]
    place = engine.place_in_replica(layout.rank_at(pp=stage))
    needed = _needed(spec, place.tp, place.ep, place.tp_rank, itemsize)
    shared = needed.keys() & held.keys() if native else ()
    return sum(needed.values()) - sum(needed[keys] for keys in shared)


def _smallest(layout: ParallelLayout) -> ParallelLayout:
    """A layout with as few ranks as hold the same weights, which its first ranks do."""
    dp = math.lcm(layout.tp, layout.etp * layout.ep) // layout.tp
    return replace(layout, cp=1, dp=dp)


@lru_cache(maxsize=4096)
def _held(spec: ModelSpec, layout: ParallelLayout, itemsize: int) -> list[dict[Any, int]]:
    """The parameters of the first rank of each stage: bytes, by the slices that they hold."""
    ranks = [layout.rank_at(pp=stage) for stage in range(layout.pp)]
    return [_by_slices(role_pieces(spec, layout, rank), itemsize) for rank in ranks]


@lru_cache(maxsize=4096)
def _needed(spec: ModelSpec, tp: int, ep: int, tp_rank: int, itemsize: int) -> dict[Any, int]:
    """The same of a rank of an engine's replica."""
    replica = EngineLayout(tp, ParallelLayout(tp=tp, etp=tp), MODEL_AXES, ep)
    return _by_slices(engine_pieces(spec, replica, tp_rank), itemsize)


def _by_slices(pieces: Iterable[Piece], itemsize: int) -> dict[Any, int]:
    by_parameter: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_parameter.setdefault(piece.parameter, []).append(piece)
    return {
        tuple(piece.key for piece in own): _nbytes(own, itemsize) for own in by_parameter.values()
    }


def _nbytes(pieces: Iterable[Piece], itemsize: int) -> int:
    return sum(
        math.prod(piece.shape(piece.start, piece.stop))
        * (4 if keeps_float32(piece.parameter) else itemsize)
        for piece in pieces
    )
