"""Builds the inference engine that the configuration names, and plans how weights get into it.

It runs nothing: neither generation nor the hand-over of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mrlhf.config.roots import PPOConfig
from mrlhf.episodes.environments.host import EnvironmentHost
from mrlhf.episodes.limits import TurnLimits
from mrlhf.episodes.replica import ReplicaEpisodes
from mrlhf.episodes.runner import EpisodeSampler
from mrlhf.inference.base import EngineLimits, InferenceEngine
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.inference.sizes import engine_ep
from mrlhf.inference.vllm.engine import VllmEngine, check_support
from mrlhf.inference.vllm.pieces import vllm_pieces
from mrlhf.inputs import EngineInputs
from mrlhf.inputs.vocabulary import ids_without_token
from mrlhf.models.lora import without_adapters
from mrlhf.models.parameters import carried_pieces, engine_pieces, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import EngineGroups
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.reshard.execute import Resharder, TransferOptions
from mrlhf.reshard.plan import Planner
from mrlhf.reshard.sides import sides_around
from mrlhf.rollout.drawing import Sampler
from mrlhf.rollout.generator import Generator
from mrlhf.rollout.hand_over import HandOver
from mrlhf.run.startup import Run
from mrlhf.training.engine import ModelEngine
from mrlhf.training.merging import MergedWeights
from mrlhf.weights.shard import Piece


@dataclass(frozen=True)
class _EngineKind:
    """The functions that differ between the kinds of inference engine before one is built."""

    engine: Callable[..., InferenceEngine]  # the constructor
    # Raises if the engine cannot serve this model, tensor-parallel size or device.
    check: Callable[[ModelSpec, int, torch.device], None]
    # Makes the replicas from the actor's layout, `rollout.tp`, and the number of parts of a replica
    # over which experts are shared out.
    layout: Callable[[ParallelLayout, int, int], EngineLayout]
    # Lists the named slices that a rank of a replica holds.
    pieces: Callable[[ModelSpec, EngineLayout, int, Set[str] | None], list[Piece]]


_BACKENDS = {
    "native": _EngineKind(
        NativeEngine, lambda spec, tp, device: None, EngineLayout.closest, engine_pieces
    ),
    "vllm": _EngineKind(VllmEngine, check_support, EngineLayout.consecutive, vllm_pieces),
}


def check_engine(config: PPOConfig, spec: ModelSpec, device: torch.device) -> None:
    """Raise ConfigError or WeightError if the engine cannot serve this actor or use this device."""
    _BACKENDS[config.rollout.engine].check(spec, config.rollout.tp, device)


def build_generator(
    config: PPOConfig, run: Run, actor: ModelEngine, inputs: EngineInputs
) -> Generator:
    """Build the replica on this rank, and plan how the actor's weights get into it.

    Every rank calls it, after the actor's optimizer has been attached, if it is trained.
    """
    rollout = config.rollout
    tokenizer = inputs.tokenizer
    backend = _BACKENDS[rollout.engine]
    training = actor.groups.layout
    ep = engine_ep(rollout.engine, rollout.ep, rollout.tp, training.etp, actor.spec)
    engines = backend.layout(training, rollout.tp, ep)
    engine_groups = run.factory.engine_groups(engines)

    merges = actor.spec.lora is not None and rollout.lora == "merged"
    merged = MergedWeights(actor) if merges else None
    spec = actor.spec if merged is None else without_adapters(actor.spec)
    engine = backend.engine(
        spec,
        engine_groups.tp,
        run.device.torch_device,
        actor.dtype,
        _limits(config),
        decode=tokenizer.decode,
        never=ids_without_token(actor.spec.vocab_size, tokenizer.ids),
        **({"ep": ep} if ep > 1 else {}),
    )

    hand_over = plan_hand_over(
        actor,
        engine,
        engine_groups,
        lambda rank, tensors: backend.pieces(spec, engines, rank, tensors),
        TransferOptions(rollout.reshard_bucket_mb << 20, rollout.verify_reshard),
        merged,
    )
    return Generator(
        engine,
        engine_groups,
        hand_over,
        config.seed,
        phases=run.phases,
        experts=actor.spec.experts if rollout.records else None,
        sampler=_sampler(config, run, engine_groups, inputs),
    )


def _sampler(config: PPOConfig, run: Run, groups: EngineGroups, inputs: EngineInputs) -> Sampler:
    """The sampler of single turns or of episodes; a replica's first rank has environments."""
    environments = inputs.environments
    if environments is None:
        return Sampler()

    rollout = config.rollout
    host = None
    if groups.tp_rank == 0:
        host = EnvironmentHost(environments.references, environments.limits)
    replica = ReplicaEpisodes(
        groups=groups,
        host=host,
        environments=environments,
        tokenizer=inputs.tokenizer,
        limits=TurnLimits(
            max_turns=rollout.max_turns,
            max_turn_tokens=rollout.max_turn_tokens,
            max_told_tokens=rollout.max_tool_tokens,
            max_prompt_tokens=config.data.max_prompt_length,
            max_response_tokens=config.data.max_response_length,
            on_parse_error=rollout.on_parse_error,
            on_tool_error=rollout.on_tool_error,
            on_rewrite="split" if rollout.on_rewrite == "split" else "keep",
        ),
    )
    return EpisodeSampler(replica, lambda: run.phases.stops.asked)


def plan_hand_over(
    actor: ModelEngine,
    engine: InferenceEngine,
    groups: EngineGroups,
    pieces: Callable[[int, Set[str] | None], list[Piece]],
    options: TransferOptions,
    merged: MergedWeights | None,
) -> HandOver:
    """Plan how this rank's part of the engine gets the actor's weights, merged ones if given.

    `pieces` lists the named slices of a rank of the engine, at least those of some tensors.
    """
    spec = actor.spec if merged is None else without_adapters(actor.spec)
    training = actor.groups.layout
    itemsize = actor.dtype.itemsize
    near = _ranks_by_machine(groups)

    def resharder(brings: Callable[[str], bool]) -> Resharder:
        def carried(pieces: list[Piece]) -> list[Piece]:
            return carried_pieces([piece for piece in pieces if brings(piece.name)], itemsize)

        sides = sides_around(
            dist.get_rank(),
            groups.layout,
            lambda rank: carried(role_pieces(spec, training, rank)),
            lambda rank: carried(pieces(rank, None)),
            lambda rank, tensors: carried(pieces(rank, tensors)),
        )
        planner = Planner(sides, itemsize, near.__getitem__)
        slots = actor.slots if merged is None else merged.slots
        return Resharder(planner, slots, engine, dist.get_rank(), options, groups.exchange)

    once = None
    if any(engine.keeps(tensor) for tensor in actor.tensor_shapes):
        once = resharder(engine.keeps)
    each_time = resharder(lambda tensor: not engine.keeps(tensor))
    return HandOver(actor.residency, each_time, once, merged)


def _ranks_by_machine(groups: EngineGroups) -> dict[int, list[int]]:
    """The ranks that exchange weights and are on the machine of each of them, ascending.

    If several ranks hold a slice, one on the same machine sends it.
    """
    ranks = sorted(dist.get_process_group_ranks(groups.exchange))
    machines: dict[str, list[int]] = {}
    for rank in ranks:
        machines.setdefault(groups.machines[rank], []).append(rank)
    return {rank: machines[groups.machines[rank]] for rank in ranks}


def _limits(config: PPOConfig) -> EngineLimits:
    rollout = config.rollout
    return EngineLimits(
        max_num_seqs=rollout.max_num_seqs,
        max_length=config.data.max_length,
        max_prefill_tokens=rollout.max_prefill_tokens,
        block_size=rollout.block_size,
        cache_bytes=None if rollout.kv_cache_mb is None else rollout.kv_cache_mb << 20,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
    )
