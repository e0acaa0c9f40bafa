"""Seconds of each phase of a step, from the rates of a GPU and the work of the phase.

No overlap of computing and exchanging is counted, and all replicas have equal work. `passes` knows
what a rank computes. Each function returns seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from mrlhf.config.roots import AnyConfig, PPOConfig, PreferenceConfig
from mrlhf.config.sections import Dtype
from mrlhf.device import dtype_on
from mrlhf.models.attention_sizes import attention_kinds
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.pipeline_order import idle_share
from mrlhf.planning.gpus import STATED, Gpu
from mrlhf.planning.passes import Passes, Work
from mrlhf.preflight.batches import trained_models
from mrlhf.preflight.footprint import ENGINE, GENERATION, Footprint, Specs, update_of
from mrlhf.preflight.model_checks import cache_needs

_GRADIENT = 4  # bytes
# A gradient is zeroed, added to, read for the norm, and clipped: it goes through memory so often.
_GRADIENT_TOUCHED = 7


@dataclass(frozen=True)
class Lengths:
    """Mean lengths, in tokens."""

    prompt: float
    response: float

    @property
    def total(self) -> float:
        """Tokens of a prompt and its response."""
        return self.prompt + self.response

    @property
    def seen(self) -> float:
        """Tokens before a token of a response, in the mean."""
        return self.prompt + self.response / 2


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
        found["hand-over"] = _hand_over(config, sizes.sizes[ENGINE], gpu)
        left = room - sizes.total(GENERATION) + sizes.sample_bytes
        at_once = _at_once(config, left, sizes.sample_bytes, lengths)
        engine = _engine(config, specs["actor"], gpu)
        prompts = config.data.gen_batch_size / (world_size // config.rollout.tp)
        found[GENERATION] = _drawing(config, engine, prompts, lengths, at_once)
        if "judge_model" in specs:
            judge = _engine(config.of_judge(), specs["judge_model"], gpu)
            found["judging"] = _judging(config, sizes, judge, world_size, lengths, room)

    trained = trained_models(config)
    for name, role in config.roles().items():
        spec = specs[name]
        layout = ParallelLayout.for_world(name, world_size, AxisSizes.of(role))
        model = Passes(spec, layout, gpu, _itemsize(role.dtype, gpu))
        if isinstance(config, PPOConfig) and name != "judge_model":
            scoring = _passes(model, role.micro_batch_tokens, lengths, samples, 1)
            found["scoring"] = found.get("scoring", 0.0) + _scorings(config, name) * scoring
        if name in trained:
            mini_batches, epochs = _updates(config, name)
            work = (role.micro_batch_tokens, lengths, samples, mini_batches)
            found[update_of(name)] = epochs * (
                _passes(model, *work, backward=True, recomputes=role.recompute == "full")
                + mini_batches * _gradients(sizes, name, model)
            )
    moved = sum(_traffic(config, sizes, name) for name in config.roles())
    if isinstance(config, PPOConfig):
        moved += _traffic_of_earlier(config, sizes)
    if moved:
        found["offloading"] = moved / (1e9 * STATED.links * gpu.host_gb_s)
    return Estimate(found, samples * lengths.total, at_once)


def _traffic(config: AnyConfig, sizes: Footprint, name: str) -> float:
    """Bytes of a model that cross the link to the host in a step; gradients are not copied."""
    offload = config.roles()[name].offload
    moved = 0.0
    if "params" in offload:
        params = sizes.sizes[f"{name}/params"]
        # The reference and the reward model only come; the others come and go for each pass.
        phases: dict[str, float] = {"critic": 2, "model": 1}
        if isinstance(config, PPOConfig):
            phases["actor"] = 2 + _scorings(config, "actor")
        moved += 2 * phases[name] * params if name in phases else params

    trained = trained_models(config)
    if name in trained and trained[name][1].stream is not None:
        moved += 2 * sizes.sizes[f"{name}/optimizer"] * math.prod(_updates(config, name))
    elif "optimizer" in offload:
        moved += 2 * sizes.sizes[f"{name}/optimizer"]
    return moved


def _traffic_of_earlier(config: PPOConfig, sizes: Footprint) -> float:
    """The same of a teacher that is the actor of an earlier step, and of its average.

    The actor comes as often for the move as it would for a pass of its own.
    """
    section = config.teacher
    if section is None or config.earlier_actor is None or not section.offload:
        return 0.0
    params = sizes.sizes["teacher/params"]
    moves = 2 * (params + sizes.sizes.get("teacher/optimizer", 0)) / section.every
    return moves + (2 if config.distils_in == "loss" else 1) * params


def _scorings(config: PPOConfig, name: str) -> float:
    """How often a step passes its sequences through a model before the update."""
    if config.teacher is not None and name in config.teacher.models:
        return 1 / len(config.teacher.models)  # as if each had equally many rows
    if name != "actor":
        return 1
    is_reference = config.needs_reference and config.reference_is_policy
    is_only_pass = math.prod(_updates(config, name)) == 1 and not config.needs_old_logprobs_early
    is_spared = is_only_pass or config.algorithm.rollout_correction.bypass_mode
    return is_reference + config.teaches_itself + (not is_spared)


def _samples(config: AnyConfig) -> int:
    """Sequences of a step."""
    if isinstance(config, PPOConfig):
        return config.data.train_batch_size * config.rollout.n
    each = config.fewest_responses if isinstance(config, PreferenceConfig) else 1
    return config.data.batch_size * each


def _updates(config: AnyConfig, name: str) -> tuple[int, int]:
    """Mini-batches of a pass, and passes."""
    if not isinstance(config, PPOConfig):
        return 1, 1
    section = config.trained()[name]
    return config.data.train_batch_size // section.ppo_mini_batch_size, section.ppo_epochs


def _link(gpu: Gpu, ranks: int) -> float:
    """Bytes a second that each rank sends when `ranks` neighbours exchange."""
    inside = ranks <= gpu.per_machine
    return 1e9 * STATED.links * (gpu.link_gb_s if inside else gpu.network_gb_s)


@lru_cache(maxsize=4096)
def _passes(
    model: Passes,
    micro_batch_tokens: int,
    lengths: Lengths,
    samples: int,
    mini_batches: int,
    backward: bool = False,
    recomputes: bool = False,
) -> float:
    """Pass `samples` sequences of the mean length through a model, and back."""
    spec, layout, gpu, itemsize = model.spec, model.layout, model.gpu, model.itemsize
    tokens = samples * lengths.total / (layout.dp * layout.cp)
    of_mini_batch = max(1, math.ceil(tokens * layout.cp / mini_batches / micro_batch_tokens))
    packs = mini_batches * of_mini_batch
    outputs = tokens * lengths.response / lengths.total
    work = Work(tokens / packs, lengths.total, outputs / packs)
    computing = packs * (model.update(work, recomputes) if backward else model.forward(work))

    # Exchanges between the ranks of a layer, for the tokens that a rank sees in its layers.
    layers = spec.num_layers / layout.pp
    exchanges = 1 + backward * (1 + recomputes)
    kinds = attention_kinds(spec)
    kv = sum(share * sizes.keys_and_values for sizes, share in kinds) / layout.tp
    swapped = sum(share * sizes.swapped for sizes, share in kinds) / layout.tp
    states = 2 * spec.hidden_size * itemsize
    moved = [
        (layout.tp, layout.tp, states),  # attention
        (layout.etp, layout.etp, states),  # the MLP, whose experts may be split otherwise
        (layout.cp, layout.tp * layout.cp, (kv * layout.cp + swapped) * itemsize),
    ]
    exchanging = 0.0
    for size, span, nbytes in moved:
        exchanging += layers * tokens * nbytes * (size - 1) / size / _link(gpu, span)
    if spec.experts is not None and layout.ep > 1:
        copies = 2 * spec.experts.per_token * spec.hidden_size * itemsize
        # Sequence parallelism leaves each rank its share of the tokens.
        share = tokens / layout.tp * spec.experts.mixtures / layout.pp
        span = layout.ep * layout.etp
        outside = max(0.0, 1 - gpu.per_machine / span)
        inside = 1 - 1 / layout.ep - outside
        exchanging += share * copies * (inside / _link(gpu, 1) + outside / _link(gpu, span))
        # Rows are put in another order after the way there and before the way back.
        exchanging += gpu.memory_s(share * copies * 2)

    waiting = 2 * layers * gpu.latency_s * packs if layout.tp > 1 else 0.0
    busy = computing + exchanges * (exchanging + waiting)
    return busy / (1 - idle_share(of_mini_batch, layout.pp, layout.vpp))


def _itemsize(dtype: Dtype, gpu: Gpu) -> int:
    """Bytes of a weight."""
    return dtype_on(dtype, gpu.device).itemsize


def _gradients(sizes: Footprint, name: str, model: Passes) -> float:
    """Sum gradients over replicas, update, and gather weights, once."""
    gradients = sizes.sizes[f"{name}/grads"]
    states = sizes.sizes[f"{name}/optimizer"]
    layout, gpu, itemsize = model.layout, model.gpu, model.itemsize
    replicas = layout.dp * layout.cp
    moved = gradients * (1 + itemsize / _GRADIENT) * (replicas - 1) / replicas
    exchanging = moved / _link(gpu, layout.tp * replicas)

    # In float32 the weights are their own main weights, beside two moments.
    touched = gradients / replicas + 2 * states * (1.5 if itemsize == _GRADIENT else 1)
    return exchanging + gpu.memory_s(touched + _GRADIENT_TOUCHED * gradients)


def _hand_over(config: PPOConfig, missing: int, gpu: Gpu) -> float:
    """Move the bytes of weights that the engine lacks."""
    return missing / _link(gpu, AxisSizes.of(config.actor).ranks)


def _judging(
    config: PPOConfig, sizes: Footprint, engine: Passes, ranks: int, lengths: Lengths, room: int
) -> float:
    """Ask the judge about all responses of a step, or about all pairs in both orders.

    A message is taken to hold the prompt and what is judged, and an answer half of the most tokens.
    """
    own = config.of_judge()
    shown, others = (2, config.rollout.n - 1) if config.judge.compares else (1, 1)
    messages = config.data.gen_batch_size * config.rollout.n * others
    message = min(lengths.prompt + shown * lengths.response, own.data.max_prompt_length)
    asked = Lengths(message, own.data.max_response_length / 2)
    needs = cache_needs(own, engine.spec)
    left = room - sizes.total("passes of judge_model") + needs.least
    moving = _hand_over(own, sizes.sizes["judge engine/params"], engine.gpu)
    at_once = _at_once(own, left, needs.bytes, asked)
    return moving + _drawing(own, engine, messages / (ranks // own.rollout.tp), asked, at_once)


def _engine(config: PPOConfig, spec: ModelSpec, gpu: Gpu) -> Passes:
    """The passes of an engine."""
    tp = config.rollout.tp
    return Passes(spec, ParallelLayout(tp=tp, etp=tp), gpu, _itemsize(config.actor.dtype, gpu))


def _at_once(config: PPOConfig, left: int, sample_bytes: int, lengths: Lengths) -> int:
    """Responses that an engine draws together, in `left` bytes for a cache."""
    fit = int(left * config.data.max_length / (sample_bytes * lengths.total))
    return min(config.rollout.max_num_seqs, max(1, fit))


def _drawing(
    config: PPOConfig, engine: Passes, prompts: float, lengths: Lengths, at_once: int
) -> float:
    """Answer a replica's prompts."""
    own = math.ceil(prompts)
    rows = (own, own * config.rollout.n, at_once)
    longest = config.data.max_response_length
    return _generation(engine, *rows, lengths, longest, config.rollout.max_prefill_tokens)


@lru_cache(maxsize=4096)
def _generation(
    engine: Passes,
    prompts: int,
    samples: int,
    at_once: int,
    lengths: Lengths,
    longest: int,
    prefill_tokens: int,
) -> float:
    """Draw all samples: prompts once, then token after token, and a tail of the longest."""
    spec, gpu, tp = engine.spec, engine.gpu, engine.layout.tp
    batch = min(at_once, samples)
    steps = lengths.response * samples / batch
    tail = max(0.0, longest - lengths.response)
    tokens = prompts * lengths.prompt
    passes = math.ceil(tokens / prefill_tokens)
    work = Work(tokens / passes, lengths.prompt / 2, prompts / passes)
    seconds = passes * engine.engine(work)
    for count, rows in ((steps, batch), (tail, 1)):
        exchanging = 0.0
        if tp > 1:
            moved = rows * spec.hidden_size * engine.itemsize * 2 * (tp - 1) / tp
            # Assumed: each machine adds as much as an exchange inside one takes.
            latency = gpu.latency_s * math.ceil(tp / gpu.per_machine)
            exchanging = 2 * spec.num_layers * (latency + moved / _link(gpu, tp))
        seconds += count * (engine.engine(Work(rows, lengths.seen, rows)) + exchanging)
    return seconds
