"""Seconds of each phase of a step, from the rates of a GPU and the work of the phase.

An estimate to compare layouts by: no overlap of computing and exchanging is counted, all ranks have
equal work, and the shares in `gpus` are assumed. Each function returns seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrlhf.config.roots import AnyConfig, PPOConfig, PreferenceConfig
from mrlhf.config.sections import RoleSection
from mrlhf.models.flops import forward_flops
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.pipeline_order import idle_share
from mrlhf.planning.gpus import LATENCY_S, LINKS, MEMORY, PRODUCTS, Gpu
from mrlhf.preflight.batches import trained_models
from mrlhf.preflight.footprint import (
    ENGINE,
    GENERATION,
    Footprint,
    Specs,
    update_of,
)

_GRADIENT = 4  # bytes
ITEMSIZE = 2  # of bfloat16


@dataclass(frozen=True)
class Lengths:
    """Mean lengths, in tokens."""

    prompt: float
    response: float

    @property
    def total(self) -> float:
        """Of a prompt and its response."""
        return self.prompt + self.response


@dataclass(frozen=True)
class Estimate:
    """What a step may take."""

    seconds: dict[str, float]  # by phase
    tokens: float  # of all samples of the step
    decoded_at_once: int  # responses of a replica that fit the KV cache; 0 without an engine

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def estimate(
    config: AnyConfig,
    specs: Specs,
    sizes: Footprint,
    world_size: int,
    gpu: Gpu,
    lengths: Lengths,
    room: int,
) -> Estimate:
    """Estimate one step of a run whose memory is `sizes`, with `room` bytes of each GPU for it."""
    found: dict[str, float] = {}
    at_once = 0
    samples = _samples(config)
    if isinstance(config, PPOConfig):
        left = room - sizes.total(GENERATION) + sizes.sample_bytes
        at_once = int(left * config.data.max_length / (sizes.sample_bytes * lengths.total))
        at_once = min(config.rollout.max_num_seqs, max(1, at_once))
        found["hand-over"] = _hand_over(config, sizes, gpu)
        found[GENERATION] = _generation(config, specs["actor"], world_size, gpu, lengths, at_once)

    trained = trained_models(config)
    scores = isinstance(config, PPOConfig)
    for name, role in config.roles().items():
        spec = specs[name]
        layout = ParallelLayout.for_world(name, world_size, AxisSizes.of(role))
        if scores:
            found["scoring"] = found.get("scoring", 0.0) + _passes(
                role, spec, layout, gpu, lengths, samples, 1
            )
        if name in trained:
            mini_batches, epochs = _updates(config, name)
            found[update_of(name)] = epochs * (
                _passes(role, spec, layout, gpu, lengths, samples, mini_batches, backward=True)
                + mini_batches * _gradients(sizes, name, layout, gpu)
            )
    moved = sum(_traffic(config, sizes, name) for name in config.roles())
    if moved:
        found["offloading"] = moved / (1e9 * LINKS * gpu.host_gb_s)
    return Estimate(found, samples * lengths.total, at_once)


def _traffic(config: AnyConfig, sizes: Footprint, name: str) -> float:
    """Bytes of a model that cross the link to the host in a step; gradients are not copied."""
    offload = config.roles()[name].offload
    moved = 0.0
    if "params" in offload:
        params = sizes.sizes[f"{name}/params"]
        # The reference and the reward model only come; the others come and go for each pass.
        phases = {"actor": 3, "critic": 2, "model": 1}
        moved += 2 * phases[name] * params if name in phases else params
    trained = trained_models(config)
    if name in trained and trained[name][1].stream is not None:
        moved += 2 * sizes.sizes[f"{name}/optimizer"] * math.prod(_updates(config, name))
    elif "optimizer" in offload:
        moved += 2 * sizes.sizes[f"{name}/optimizer"]
    return moved


def _samples(config: AnyConfig) -> int:
    """Sequences of a step."""
    if isinstance(config, PPOConfig):
        return config.data.train_batch_size * config.rollout.n
    return config.data.batch_size * (2 if isinstance(config, PreferenceConfig) else 1)


def _updates(config: AnyConfig, name: str) -> tuple[int, int]:
    """Mini-batches of a pass, and passes."""
    if not isinstance(config, PPOConfig):
        return 1, 1
    section = config.trained()[name]
    return config.data.train_batch_size // section.ppo_mini_batch_size, section.ppo_epochs


def _link(gpu: Gpu, ranks: int) -> float:
    """Bytes a second of each of so many neighbouring ranks that exchange."""
    inside = ranks <= gpu.per_machine
    return 1e9 * LINKS * (gpu.link_gb_s if inside else gpu.network_gb_s)


def _passes(
    role: RoleSection,
    spec: ModelSpec,
    layout: ParallelLayout,
    gpu: Gpu,
    lengths: Lengths,
    samples: int,
    mini_batches: int,
    backward: bool = False,
) -> float:
    """Pass `samples` sequences of the mean length through a model, and back."""
    passes = 1 + backward * (2 + (role.recompute == "full"))
    flops = passes * samples * forward_flops(spec, round(lengths.total), round(lengths.response))
    computing = flops / layout.world_size / (1e12 * PRODUCTS * gpu.tflops)

    # Exchanges between the ranks of a layer, for the tokens that a rank sees in its layers.
    tokens = samples * lengths.total / (layout.dp * layout.cp)
    layers = spec.num_layers / layout.pp
    exchanges = 1 + backward * (1 + (role.recompute == "full"))
    kv = 2 * spec.num_kv_heads * spec.head_dim / layout.tp
    bytes_of = {
        (layout.tp, layout.tp): 4 * spec.hidden_size * ITEMSIZE,
        (layout.cp, layout.tp * layout.cp): kv * layout.cp * ITEMSIZE,
    }
    exchanging = 0.0
    for (size, span), nbytes in bytes_of.items():
        exchanging += layers * tokens * nbytes * (size - 1) / size / _link(gpu, span)
    if spec.experts is not None and layout.ep > 1:
        copies = 2 * spec.experts.per_token * spec.hidden_size * ITEMSIZE
        # Sequence parallelism leaves each rank its share of the tokens.
        share = tokens / layout.tp * spec.experts.mixtures / layout.pp
        span = layout.ep * layout.etp
        exchanging += share * copies * (layout.ep - 1) / layout.ep / _link(gpu, span)

    of_mini_batch = max(1, tokens * layout.cp / mini_batches / role.micro_batch_tokens)
    busy = computing + exchanges * exchanging
    return busy / (1 - idle_share(of_mini_batch, layout.pp, layout.vpp))


def _gradients(sizes: Footprint, name: str, layout: ParallelLayout, gpu: Gpu) -> float:
    """Sum gradients over replicas, update, and gather weights, once."""
    gradients = sizes.sizes[f"{name}/grads"]
    replicas = layout.dp * layout.cp
    moved = gradients * (1 + ITEMSIZE / _GRADIENT) * (replicas - 1) / replicas
    touched = gradients + 2 * sizes.sizes[f"{name}/optimizer"]
    updating = touched / (1e9 * MEMORY * gpu.memory_gb_s)
    return moved / _link(gpu, layout.tp * replicas) + updating


def _hand_over(config: PPOConfig, sizes: Footprint, gpu: Gpu) -> float:
    span = AxisSizes.of(config.actor).ranks
    return sizes.sizes[ENGINE] / _link(gpu, span)


def _generation(
    config: PPOConfig,
    spec: ModelSpec,
    world_size: int,
    gpu: Gpu,
    lengths: Lengths,
    at_once: int,
) -> float:
    """Draw all samples: prompts once, then token after token, and a tail of the longest."""
    tp = config.rollout.tp
    replicas = world_size // tp
    prompts = math.ceil(config.data.gen_batch_size / replicas)
    samples = prompts * config.rollout.n
    rate = 1e12 * PRODUCTS * gpu.tflops * tp
    memory = 1e9 * MEMORY * gpu.memory_gb_s

    prefill = prompts * forward_flops(spec, round(lengths.prompt), 1) / rate
    batch = min(at_once, samples)
    steps = lengths.response * samples / batch
    tail = max(0.0, config.data.max_response_length - lengths.response)

    seconds = 0.0
    kv_token = 2 * spec.num_layers * max(1, spec.num_kv_heads // tp) * spec.head_dim * ITEMSIZE
    for count, rows in ((steps, batch), (tail, 1)):
        read = _read_weights(spec, rows) * ITEMSIZE / tp
        read += rows * kv_token * (lengths.prompt + lengths.response / 2)
        computing = rows * forward_flops(spec, 1, 1) / rate
        exchanging = 0.0
        if tp > 1:
            moved = rows * spec.hidden_size * ITEMSIZE * 2 * (tp - 1) / tp
            exchanging = 2 * spec.num_layers * (LATENCY_S + moved / _link(gpu, tp))
        seconds += count * (max(read / memory, computing) + exchanging)
    return prefill + seconds


def _read_weights(spec: ModelSpec, rows: int) -> float:
    """The weights that a decode step of so many tokens reads."""
    dense = forward_flops(spec, 1, 1) / 2
    if spec.experts is None:
        return dense
    experts = spec.experts
    one = 3 * spec.hidden_size * experts.ffn_size * experts.mixtures
    read = experts.count * (1 - (1 - experts.per_token / experts.count) ** rows)
    return dense + (read - experts.per_token) * one
