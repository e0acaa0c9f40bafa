"""Counts what a layer, a micro-batch and a decode step cost, on the simulated device.

Models of one and two layers, with few and many packs, tell apart what each layer of each pack
costs, what each pack costs beside its layers, and what is done once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import (
    DeepseekV3Config,
    GlmMoeDsaConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.engine_loop import requests_for
from mrlhf.batch import Experience, Prompts
from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.device import pick_device
from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.models.families import FAMILIES
from mrlhf.models.spec import Lora, ModelSpec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.roles.actor import Actor
from mrlhf.roles.policy_loss import PolicyLossSettings
from mrlhf.training.engine import ModelEngine
from mrlhf.weights.init import initialise
from tests.rollouts import make_rollout
from tests.simulated_device.counts import Counts
from tests.simulated_device.operators import UNPACKED
from tests.simulated_device.state import DEVICE

VOCABULARY = 1000
SEQUENCES = 8
LENGTH = 32  # of prompt and response together
FEW_PACKS = 2
MANY_PACKS = 4
LEFT_OUT = "some tokens never drawn"
SAMPLINGS = {
    "temperature 1": {"temperature": 1.0},
    "top-k and top-p": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "greedy": {"temperature": 0.0},
    LEFT_OUT: {"temperature": 1.0},
}

OPTIM = ActorOptimSection(lr=1e-6)
Figures = dict[str, float]


class Passes(NamedTuple):
    """What an evaluation and an update did."""

    forward: Counts
    update: Counts


def all_figures() -> Figures:
    """Every figure by the name that it has in the table."""
    return {**training(), **_mixture("experts", AxisSizes()), **decoding()}


def figures_of_two() -> Figures:
    """Of layouts of two ranks; the larger figure of the two."""
    dist.init_process_group("cpu:gloo,cuda:nccl")
    figures = {}
    pipeline = _passes(4, MANY_PACKS, sizes=AxisSizes(pp=2, vpp=2))
    for name, counts in pipeline._asdict().items():
        label = f"pipeline of 2 ranks, {name}: waits of {MANY_PACKS} micro-batches in all"
        figures[label] = float(counts.stops)
    figures |= _mixture("experts on 2 ranks", AxisSizes(ep=2))
    figures["experts of 2 replicas: matrices apart from the others"] = _apart(AxisSizes())
    for name in ("temperature 1", "greedy"):
        sampling = SamplingParams(max_tokens=6, seed=1, **SAMPLINGS[name])
        engines = (engine_of(layers, group=dist.group.WORLD) for layers in (1, 2))
        one, two = (_decode_step(engine, sampling).replayed for engine in engines)
        figures[f"decode on 2 ranks, {name}: kernels in the graph outside layers"] = 2.0 * one - two

    ours = torch.tensor(list(figures.values()), dtype=torch.float64, device="cpu")
    dist.all_reduce(ours, dist.ReduceOp.MAX)
    return dict(zip(figures, ours.tolist(), strict=True))


def _mixture(title: str, sizes: AxisSizes) -> Figures:
    """What a layer of experts makes the host wait; outside of layers it does not wait."""
    few, many = (_passes(1, packs, sizes, mixture=True) for packs in (FEW_PACKS, MANY_PACKS))
    figures = {}
    for name in Passes._fields:
        waits = getattr(many, name).stops - getattr(few, name).stops
        label = f"{title}, {name}: waits a layer and micro-batch"
        figures[label] = waits / (MANY_PACKS - FEW_PACKS)
    return figures


def _apart(sizes: AxisSizes) -> float:
    """How many matrices of experts do not lie right after the one of the expert before."""
    engine, _ = actor_of(FEW_PACKS, 2, sizes, mixture=True)
    engine.attach_optimizer(OPTIM, total_updates=100)
    parameters = {slot.piece.parameter: slot.parameter for slot in engine.slots}
    apart = 0
    for name, parameter in parameters.items():
        found = re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name)
        if found is not None and found[2] != "0":
            before = parameters[f"{found[1]}{int(found[2]) - 1}{found[3]}"]
            apart += before.data_ptr() + before.nbytes != parameter.data_ptr()
    return float(apart)


def lines() -> dict[str, Counts]:
    """What each line costs in passes over two packs with one layer, and in a decode step."""
    join()
    passes = _passes(1, FEW_PACKS)
    engines = engine_of(1), engine_of(1, never=(3, 5))
    steps = {}
    for name, sampling in SAMPLINGS.items():
        drawing = SamplingParams(max_tokens=6, seed=1, **sampling)
        steps[f"decode, {name}"] = _decode_step(engines[name == LEFT_OUT], drawing)
    return {**passes._asdict(), **steps}


def training() -> Figures:
    """Of log-probabilities and of the actor's update, in bfloat16, with GQA and tied embeddings."""
    join()
    found = {
        (layers, packs): _passes(layers, packs)
        for layers in (1, 2)
        for packs in (FEW_PACKS, MANY_PACKS)
    }
    figures = {}

    for name in Passes._fields:
        few, many = (
            {layers: getattr(found[layers, packs], name) for layers in (1, 2)}
            for packs in (FEW_PACKS, MANY_PACKS)
        )
        more = MANY_PACKS - FEW_PACKS
        both = (many[2].launched - many[1].launched) - (few[2].launched - few[1].launched)
        a_layer = both / more
        once = few[1].launched - FEW_PACKS * (many[1].launched - few[1].launched) / more
        figures[f"{name}: kernels a layer and micro-batch"] = a_layer
        figures[f"{name}: kernels a micro-batch outside layers"] = (
            many[1].launched - few[1].launched
        ) / more - a_layer
        figures[f"{name}: kernels once, with one layer"] = once
        figures[f"{name}: waits a micro-batch"] = (
            many[2].waits.total() - few[2].waits.total()
        ) / more
        unpinned = many[2].unpinned - few[2].unpinned
        figures[f"{name}: unpinned copies a micro-batch"] = unpinned / more
        figures[f"{name}: waits of {FEW_PACKS} micro-batches in all"] = few[2].stops

    return figures


def decoding() -> Figures:
    """Of a decode step in bfloat16, with CUDA graphs, by how tokens are drawn."""
    figures: Figures = {}
    in_graph: dict[str, list[int]] = {name: [] for name in SAMPLINGS}
    with_adapters = []
    apart: list[list[int]] = [[], []]  # of mixtures, of delta nets
    for layers in (1, 2):
        adapted = engine_of(layers, lora=Lora(rank=4, alpha=32.0))
        greedy = SamplingParams(max_tokens=6, seed=1, **SAMPLINGS["greedy"])
        with_adapters.append(_decode_step(adapted, greedy).replayed)
        for found, spec in zip(
            apart, (model_spec(layers, mixture=True), delta_spec(layers)), strict=True
        ):
            found.append(_decode_step(engine_of(layers, spec=spec), greedy).replayed)
        engines = engine_of(layers), engine_of(layers, never=(3, 5))
        for name, sampling in SAMPLINGS.items():
            engine = engines[name == LEFT_OUT]
            step = _decode_step(engine, SamplingParams(max_tokens=6, seed=1, **sampling))
            assert step.replays == 1, "the step was not replayed from a graph"
            figures[f"decode, {name}: kernels outside the graph"] = step.launched
            figures[f"decode, {name}: waits a step"] = step.stops
            figures[f"decode, {name}: unpinned copies a step"] = step.unpinned
            figures[f"decode, {name}: copies a step"] = step.copies.total()
            in_graph[name].append(step.replayed)

    for name, (one, two) in in_graph.items():
        figures[f"decode, {name}: kernels in the graph outside layers"] = 2 * one - two
    figures["decode: kernels a layer in the graph"] = two - one
    adapted_layer = with_adapters[1] - with_adapters[0]
    figures["decode: kernels a layer in the graph, with adapters"] = adapted_layer
    for name, (one, two) in zip(("experts", "delta nets"), apart, strict=True):
        figures[f"decode: kernels a layer of {name} in the graph"] = two - one
    figures["decode: query heads of a group read its keys apart (1: yes)"] = float(
        DEVICE.decoded[UNPACKED] > 0
    )

    return figures


def join() -> None:
    """Be the only rank of a job."""
    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)


def delta_spec(layers: int) -> ModelSpec:
    """A Qwen3.5 with so many delta nets, and one layer with attention."""
    return _spec(
        Qwen3_5TextConfig,
        num_hidden_layers=layers + 1,
        layer_types=["linear_attention"] * layers + ["full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=24,
    )


def latent_spec(layers: int, chosen: int | None = None) -> ModelSpec:
    """A DeepSeek-V3 without experts; if tokens are chosen, a GLM-5 whose layers share a choice."""
    kind: dict[str, Any] = {"kind": DeepseekV3Config, "first_k_dense_replace": layers}
    if chosen is not None:
        kind = {
            "kind": GlmMoeDsaConfig,
            "mlp_layer_types": ["dense"] * layers,
            "indexer_types": ["full", *["shared"] * (layers - 1)],
            "index_topk": chosen,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "q_lora_rank": 24,
        }
    return _spec(
        **kind,
        num_hidden_layers=layers,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_key_value_heads=4,
    )


def model_spec(layers: int, mixture: bool = False) -> ModelSpec:
    """A Qwen3 with GQA and tied embeddings, or a mixture of the same size."""
    kind = Qwen3MoeConfig if mixture else Qwen3Config
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return _spec(kind, num_hidden_layers=layers, **(experts if mixture else {}))


def _spec(kind: Any, **sizes: Any) -> ModelSpec:
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    config = kind(**{**defaults, **sizes})
    return FAMILIES[config.model_type].read_config(config.to_dict(), "lm")


def actor_of(
    packs: int,
    layers: int,
    sizes: AxisSizes | None = None,
    mixture: bool = False,
    offload: Sequence[str] = (),
) -> tuple[ModelEngine, Actor]:
    """A policy in bfloat16 without an optimizer; its micro-batches are so many `packs`."""
    layout = ParallelLayout.for_world("actor", dist.get_world_size(), sizes or AxisSizes())
    section = ActorSection(
        path="random",
        dtype="bfloat16",
        micro_batch_tokens=SEQUENCES * LENGTH // packs // layout.dp,
        ppo_epochs=1,
        loss_scale_factor=1.0,
        offload=list(offload),
    )
    return build_actor(section, model_spec(layers, mixture), layout)


def build_actor(
    section: ActorSection, spec: ModelSpec, layout: ParallelLayout
) -> tuple[ModelEngine, Actor]:
    """A policy with random weights, without an optimizer."""
    groups = GroupFactory(timeout_s=600.0).role_groups(layout)
    device = pick_device("auto", local_rank=dist.get_rank())
    engine = ModelEngine(section, spec, groups, device)
    engine.initialise(seed=1)
    return engine, Actor(engine, PolicyLossSettings.named("vanilla", section, None), 1.0)


def _passes(
    layers: int, packs: int, sizes: AxisSizes | None = None, mixture: bool = False
) -> Passes:
    engine, actor = actor_of(packs, layers, sizes, mixture)
    engine.attach_optimizer(OPTIM, total_updates=100)
    experience = example()
    rollout = experience.rollout
    cut = engine.cut(rollout.sequences(), "response")
    assert len(cut.packs) == packs, f"{len(cut.packs)} packs"
    actor.evaluate(rollout, cut)
    actor.update(experience, cut)  # what is made at first is made
    with DEVICE.counted() as forward:
        actor.evaluate(rollout, cut)
    with DEVICE.counted() as update:
        actor.update(experience, cut)
    return Passes(forward, update)


def example(
    sequences: int = SEQUENCES,
    length: int = LENGTH,
    prompt: int = LENGTH // 2,
    vocabulary: int = VOCABULARY,
) -> Experience:
    """Random sequences of full length with random advantages."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (sequences, length), generator=generator)
    prompts = Prompts(
        token_ids=ids[:, :prompt].tolist(),
        uid=list(range(sequences)),
        text=[""] * sequences,
        data_source=[""] * sequences,
        ground_truth=[""] * sequences,
        extra_info=[{} for _ in range(sequences)],
    )

    mask = torch.ones(sequences, length - prompt, dtype=torch.bool)
    logprobs = torch.full(mask.shape, -7.0)
    zeros = torch.zeros(mask.shape)
    rollout = make_rollout(prompts, [0] * sequences, ids[:, prompt:], mask, logprobs, mask[:, 0])

    return Experience(
        rollout=rollout,
        scores=torch.zeros(sequences),
        loss_mask=mask,
        old_logprobs=logprobs,
        ref_logprobs=None,
        token_rewards=zeros,
        values=None,
        advantages=torch.randn(mask.shape, generator=generator),
        returns=zeros,
    )


def engine_of(
    layers: int,
    never: tuple[int, ...] = (),
    lora: Lora | None = None,
    eager: bool = False,
    spec: ModelSpec | None = None,
    group: dist.ProcessGroup | None = None,
) -> NativeEngine:
    spec = replace(spec or model_spec(layers), lora=lora)
    limits = EngineLimits(
        max_num_seqs=8,
        max_length=600,
        max_prefill_tokens=64,
        cache_bytes=1 << 24,
        enforce_eager=eager,
    )
    engine = NativeEngine(spec, group, DEVICE.device, torch.bfloat16, limits, never=never)
    family = FAMILIES[spec.family]
    slots = engine.weight_slots()
    initialise(slots, family.tensor_shapes(spec), 1, 0.02)
    engine.commit(1)
    return engine


def _decode_step(engine: NativeEngine, sampling: SamplingParams) -> Counts:
    """The last step but one, which decodes all prompts and whose graph exists."""
    generator = torch.Generator().manual_seed(1)
    lengths = (3, 300, 5, 17)
    prompts = [
        torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]
    for _ in range(2):
        steps = []
        engine.submit(requests_for(prompts, list(range(len(prompts))), sampling, None))
        while engine.in_flight:
            with DEVICE.counted() as counts:
                engine.step()
            steps.append(counts)
            engine.collect()
    return steps[-2]
