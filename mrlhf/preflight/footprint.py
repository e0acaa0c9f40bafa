"""The bytes of a run on the rank that has most, by owner and by phase.

Weights, gradients and optimizer states come from the shapes that a run is built of, activations
from `activations`. The buffers of NCCL and memory in pieces too small to use are not known here:
the caller leaves room for them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from mrlhf.config.roots import AnyConfig, PPOConfig
from mrlhf.config.sections import RoleSection
from mrlhf.device import device_kind, dtype_on
from mrlhf.inference.sizes import engine_ep
from mrlhf.models.families import Chunk
from mrlhf.models.lora import without_adapters
from mrlhf.models.parameters import engine_parts, part_pieces, pieces_at, weight_bytes
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout, ReplicaPlace
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.preflight.activations import Activations, most_bytes
from mrlhf.preflight.batches import role_work, trained_models
from mrlhf.preflight.model_bytes import merged_bytes, parts_of, training_bytes
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
    """Bytes of one rank, by owner, such as `actor/params` or `engine/cache`."""

    sizes: dict[str, int]  # on GPU or host: of all owners but those that one phase alone has
    held: dict[str, int]  # on the GPU: those that never leave it
    phases: dict[str, dict[str, int]]  # on the GPU: more of them while a phase lasts, by its name

    def total(self, phase: str) -> int:
        """The bytes while a phase lasts."""
        return sum(self.held.values()) + sum(self.phases[phase].values())

    def owned(self, phase: str) -> int:
        """The same without activations, which have no owner in a run."""
        of_phase = self.phases[phase].items()
        kept = sum(size for owner, size in of_phase if owner.endswith("/activations"))
        return self.total(phase) - kept

    def owners(self, phase: str) -> dict[str, int]:
        """The owners of a phase's bytes, the largest first."""
        every = self.held | self.phases[phase]
        return dict(sorted(every.items(), key=lambda item: -item[1]))

    @property
    def most(self) -> int:
        """The bytes in the phase that takes most."""
        return max(map(self.total, self.phases))


@dataclass(frozen=True)
class Footprint:
    """The bytes of a run, on one rank for each combination of stages that a rank can hold."""

    ranks: list[RankBytes]
    sample_bytes: int = 0  # of a response of full length in the KV cache; 0 without an engine

    def total(self, phase: str) -> int:
        """The bytes while a phase lasts, on the rank that has most then."""
        return max(rank.total(phase) for rank in self.ranks)

    def owned(self, phase: str) -> int:
        """The same without activations."""
        return max(rank.owned(phase) for rank in self.ranks)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each owner on the rank that has most of it, on GPU or host."""
        owners = self.ranks[0].sizes
        return {owner: max(rank.sizes[owner] for rank in self.ranks) for owner in owners}

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
        """The bytes that never leave the GPU of the fullest rank."""
        return self.fullest.held

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """The bytes that each phase adds to them."""
        return self.fullest.phases


def footprint(config: AnyConfig, specs: Specs, world_size: int) -> Footprint:
    """Add up a run whose layout fits `specs`, the models of `check_models`, and so many GPUs.

    In generation the KV cache counts with one response of full length; a run gives it what is left.
    """
    # Stages of a model are consecutive ranks, so the first rank of each part has other ones.
    parts = math.lcm(*(role.value_of("pp") for role in config.roles().values()))
    firsts = [part * world_size // parts for part in range(parts)]
    sample = cache_needs(config, specs["actor"]).bytes if isinstance(config, PPOConfig) else 0
    # No micro-batch is larger than all that a rank has of an optimizer step.
    works = role_work(config, world_size)
    most_tokens = {work.name: work.per_rank * work.longest for work in works}
    ranks = [_of_rank(config, specs, world_size, first, most_tokens) for first in firsts]
    return Footprint(ranks, sample)


@dataclass(frozen=True)
class _Share:
    """A rank's share of a model."""

    spec: ModelSpec
    layout: ParallelLayout
    stage: int
    itemsize: int  # bytes of a weight

    @property
    def parts(self) -> Counter[Chunk]:
        """The parts of the model, and how often the rank has each of them."""
        return parts_of(self.spec, self.layout, self.stage)

    def parameters(self, part: Chunk) -> dict[Any, int]:
        """Bytes of each parameter of a part, by the slices that it holds."""
        return _held(self.spec, part, self.layout.tp, self.layout.etp, self.itemsize)


def _of_rank(
    config: AnyConfig, specs: Specs, world_size: int, rank: int, most_tokens: Mapping[str, int]
) -> RankBytes:
    """The bytes of a rank, model by model and then those of the engine."""
    shares = {}
    for name, role in config.roles().items():
        layout = ParallelLayout.for_world(name, world_size, AxisSizes.of(role))
        itemsize = dtype_on(role.dtype, device_kind(config.distributed.device)).itemsize
        shares[name] = _Share(specs[name], layout, layout.coordinates(rank).pp, itemsize)

    found = RankBytes({}, {}, {})
    trained = trained_models(config)
    for name, role in config.roles().items():
        if name in trained:
            _add_trained(found, config, name, shares[name], most_tokens[name])
        elif isinstance(config, PPOConfig):
            model = (shares[name].spec, shares[name].layout, shares[name].itemsize)
            weights = training_bytes(*model, True, stage=shares[name].stage).weights
            own = {"params": weights}
            found.phases[f"passes of {name}"] = _add_owners(found, name, role, own)
        # DPO's reference has left before the policy is built, which takes more.

    if isinstance(config, PPOConfig):
        _add_generation(found, config, shares["actor"])
        for name in config.teacher.models if config.teacher and config.distils_in == "loss" else ():
            actor, teacher = shares["actor"], shares[name]
            rows = -(-actor.spec.vocab_size // actor.layout.tp)
            is_last = actor.stage == actor.layout.pp - 1
            nbytes = rows * teacher.spec.hidden_size * teacher.itemsize if is_last else 0
            found.phases[update_of("actor")][f"{name}_output/params"] = nbytes
        if config.earlier_actor is not None:
            _add_earlier(found, config, config.earlier_actor, shares["actor"])
        if "judge_model" in shares:
            judge = shares["judge_model"]
            found.sizes["judge engine/params"] = _engine_bytes(judge, "native", judge.layout.tp)
            found.phases["passes of judge_model"] |= {
                "judge engine/params": found.sizes["judge engine/params"],
                "judge engine/cache, at least": cache_needs(config.of_judge(), judge.spec).least,
            }
    return found


def _add_trained(
    found: RankBytes, config: AnyConfig, name: str, share: _Share, most_tokens: int
) -> None:
    """Add a model that is trained with at most `most_tokens` in a micro-batch."""
    role, optim = trained_models(config)[name]
    itemsize = share.itemsize
    states_of = (optim.splits_states, optim.name == "muon")
    sizes = training_bytes(share.spec, share.layout, itemsize, *states_of, share.stage)
    own = dict(zip(OWNERS, astuple(sizes), strict=True))

    device = device_kind(config.distributed.device)
    tokens = min(role.micro_batch_tokens, most_tokens)
    of_pack = (tokens, role.recompute, role.sequence_parallel, device)
    activations = Activations(share.spec, share.layout, share.stage, itemsize, *of_pack)
    added = {f"{name}/activations": most_bytes(activations)}

    if optim.stream is not None:
        states = own.pop("optimizer")
        found.sizes[f"{name}/optimizer"] = states
        # The most of a weight's main weights and moments that pass through the GPU together.
        largest = max(size for part in share.parts for size in share.parameters(part).values())
        added[f"{name}/optimizer, in parts"] = max(STREAMED_BYTES, 3 * 4 * (largest // itemsize))
        # Main weights are made on the GPU, once the gradients have left.
        start = {f"{name}/main weights": states // 3 if itemsize < 4 else 0}
        if "params" in role.offload:
            start[f"{name}/params"] = own["params"]
        found.phases[f"start of {name}"] = start
    found.phases[update_of(name)] = _add_owners(found, name, role, own) | added


def _add_owners(
    found: RankBytes, name: str, role: RoleSection, own: Mapping[str, int]
) -> dict[str, int]:
    """Add a model's bytes by owner, and return those that are on the GPU in its phase alone."""
    leaving: dict[str, int] = {}
    for owner, nbytes in own.items():
        found.sizes[f"{name}/{owner}"] = nbytes
        (leaving if owner in role.offload else found.held)[f"{name}/{owner}"] = nbytes
    return leaving


def _add_generation(found: RankBytes, config: PPOConfig, actor: _Share) -> None:
    """Add the engine, and what the reference adds to the actor's update."""
    rollout = config.rollout
    spec = actor.spec
    update = found.phases[update_of("actor")]
    generating = {owner: size for owner, size in update.items() if owner.endswith("/params")}
    if config.full_kl_in_loss:  # the reference's output layer is part of the loss
        update |= found.phases.get("passes of reference", {})

    engine = _engine_bytes(actor, rollout.engine, rollout.tp, rollout.ep)
    found.sizes[ENGINE] = engine
    if spec.lora is not None and rollout.lora == "merged":
        found.held[MERGED] = merged_bytes(spec, actor.layout, actor.itemsize, actor.stage)
    if spec.lora is not None and rollout.lora != "merged":
        found.held[ENGINE] = engine  # the base comes once
    else:
        generating[ENGINE] = engine
    least = cache_needs(config, spec).least
    found.phases[GENERATION] = generating | {"engine/cache, at least": least}


def _add_earlier(found: RankBytes, config: PPOConfig, role: RoleSection, share: _Share) -> None:
    """Add a teacher that is the actor of an earlier step, and its average in float32."""
    assert config.teacher is not None
    itemsizes = {"params": share.itemsize}
    if config.teacher.decay and share.itemsize < 4:
        itemsizes["optimizer"] = 4
    own = {}
    for owner, itemsize in itemsizes.items():
        sizes = training_bytes(share.spec, share.layout, itemsize, True, stage=share.stage)
        own[owner] = sizes.weights
    leaving = _add_owners(found, "teacher", role, own)

    update = found.phases[update_of("actor")]
    params = [f"{name}/params" for name in ("actor", "teacher")]
    of_actor = {owner: size for owner, size in update.items() if owner in params}
    found.phases["move of teacher"] = of_actor | leaving
    if config.distils_in == "loss":  # its output layer is part of the loss
        update |= {owner: size for owner, size in leaving.items() if owner in params}


def update_of(name: str) -> str:
    """The phase in which a model is trained."""
    return f"update of {name}"


@lru_cache(maxsize=4096)
def _engine_bytes(
    actor: _Share, kind: Literal["native", "vllm"], tp: int, wanted_ep: int | None = None
) -> int:
    """The engine's weights, adapters aside, that are not the actor's own tensors on its rank.

    A tensor with exactly the slices of one of the actor's shares its memory.
    """
    actor = replace(actor, spec=without_adapters(actor.spec))
    ep = engine_ep(kind, wanted_ep, tp, actor.layout.etp, actor.spec)
    choose = EngineLayout.closest if kind == "native" else EngineLayout.consecutive
    engine = choose(actor.layout, tp, ep)
    place = engine.place_in_replica(actor.layout.rank_at(pp=actor.stage))
    lacking = 0
    for part, times in engine_parts(actor.spec, place).items():
        lacking += times * sum(_needed(actor.spec, part, place, actor.itemsize).values())

    for part, times in actor.parts.items() if kind == "native" else ():
        needed = _needed(actor.spec, part, place, actor.itemsize)
        shared = needed.keys() & actor.parameters(part).keys()
        lacking -= times * sum(needed[keys] for keys in shared)
    return lacking


@lru_cache(maxsize=64)
def _held(spec: ModelSpec, part: Chunk, tp: int, etp: int, itemsize: int) -> dict[Any, int]:
    """The parameters of a part on the first rank of a stage: bytes, by their slices."""
    return _by_slices(part_pieces(spec, part, tp, etp), itemsize)


@lru_cache(maxsize=64)
def _needed(spec: ModelSpec, part: Chunk, place: ReplicaPlace, itemsize: int) -> dict[Any, int]:
    """The same of a rank of an engine's replica."""
    return _by_slices(pieces_at(spec, place, part), itemsize)


def _by_slices(pieces: Iterable[Piece], itemsize: int) -> dict[Any, int]:
    by_parameter: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_parameter.setdefault(piece.parameter, []).append(piece)
    return {
        tuple(piece.key for piece in own): sum(weight_bytes(piece, itemsize) for piece in own)
        for own in by_parameter.values()
    }
