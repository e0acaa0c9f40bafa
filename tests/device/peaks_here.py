"""The most activations of a whole update by layout, on the simulated device in bfloat16.

Each rank runs the forward and backward passes of one mini-batch, with as many micro-batches as a
pipeline needs to be full. What the device's allocator counts at its peak, beside what was there
before, stands beside the bytes of the plan for the stage of that rank.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron.core import parallel_state
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.models.families import FAMILIES
from mrlhf.models.spec import Lora, ModelSpec
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.schedule import Pipeline
from mrlhf.preflight.activations import Activations, most_bytes
from tests.device.measures import build_actor, example, join
from tests.simulated_device.state import DEVICE

LENGTH = 512  # tokens of a sequence, prompt and response together
PROMPT = 16  # few, as a plan takes all tokens of a micro-batch for those of responses


@dataclass(frozen=True)
class Case:
    """A layout and a model."""

    name: str
    ranks: int = 1
    sizes: dict[str, int] = field(default_factory=dict)
    sequences: int = 2  # of a micro-batch
    sequence_parallel: bool = False
    recompute: str = "none"
    model: str = "dense"
    lora: int = 0
    vocab: int = 4000


CASES = (
    Case("dense"),
    Case("recompute, 4 sequences", recompute="full", sequences=4),
    Case("adapters of rank 8", lora=8),
    Case("mixture", model="mixture"),
    Case("tp 2", 2, {"tp": 2}),
    Case("tp 2 with sequence_parallel", 2, {"tp": 2}, sequence_parallel=True),
    Case("pp 2", 2, {"pp": 2}),
    Case("pp 2, vpp 2, recompute", 2, {"pp": 2, "vpp": 2}, recompute="full"),
    Case("pp 2, recompute, vocabulary of 24,000", 2, {"pp": 2}, recompute="full", vocab=24000),
    Case("cp 2", 2, {"cp": 2}, sequences=4),
    Case("mixture, ep 2", 2, {"ep": 2}, model="mixture"),
    Case("mixture, tp 2", 2, {"tp": 2}, sequence_parallel=True, model="mixture"),
    Case("tp 2 with sequence_parallel, pp 2", 4, {"tp": 2, "pp": 2}, sequence_parallel=True),
    Case("pp 4, norms of heads", 4, {"pp": 4}, sequences=1, model="norms"),
)


def peaks(ranks: int) -> list[tuple[str, int, int, int]]:
    """For each case of so many ranks its name, this rank's stage, and the bytes of its peak.

    The bytes are those that were counted, and those of the plan.
    """
    DEVICE.memory.total = 1 << 30  # weights and states have to fit too
    if ranks == 1:
        join()
    else:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    return [_measure(case) for case in CASES if case.ranks == ranks]


def _measure(case: Case) -> tuple[str, int, int, int]:
    spec = _spec(case)
    layout = ParallelLayout.for_world("actor", case.ranks, AxisSizes(**case.sizes))
    section = ActorSection(
        path="random",
        dtype="bfloat16",
        recompute=case.recompute,
        sequence_parallel=case.sequence_parallel,
        micro_batch_tokens=case.sequences * LENGTH,
        ppo_epochs=1,
        loss_scale_factor=1.0,
        optim=ActorOptimSection(lr=1e-6),
        **case.sizes,
    )
    engine, actor = build_actor(section, spec, layout)
    engine.attach_optimizer(section.optim, total_updates=100)

    micro_batches = 2 * layout.pp if layout.vpp > 1 else layout.pp + 1
    experience = example(
        micro_batches * case.sequences * layout.dp, LENGTH, PROMPT, vocabulary=4000
    )
    cut = engine.cut(experience.rollout.sequences(), "response")
    assert len(cut.packs) == micro_batches, (case, len(cut.packs))
    gc.collect()  # the model of the case before
    parallel_state._GLOBAL_MEMORY_BUFFER.buffer.clear()  # those of other cases
    with _counted() as taken:
        actor.update(experience, cut)
    stage = engine.groups.coordinates.pp
    tokens = section.micro_batch_tokens
    keys = (tokens, section.recompute, section.sequence_parallel, "cuda")
    planned = most_bytes(Activations(spec, layout, stage, 2, *keys))
    return case.name, stage, taken[0], planned


@contextmanager
def _counted() -> Iterator[list[int]]:
    """The most bytes that forward and backward passes take beside what is there before."""
    taken = [0]
    original = Pipeline.forward_backward

    def forward_backward(*arguments: Any, **options: Any) -> Any:
        before = DEVICE.memory.allocated
        DEVICE.memory.reset_peak()
        results = original(*arguments, **options)
        taken[0] = max(taken[0], DEVICE.memory.peak - before)
        return results

    with mock.patch.object(Pipeline, "forward_backward", forward_backward):
        yield taken


def _spec(case: Case) -> ModelSpec:
    kinds: dict[str, Callable[..., Any]] = {
        "dense": LlamaConfig,
        "norms": Qwen3Config,
        "mixture": Qwen3MoeConfig,
    }
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }

    config = kinds[case.model](
        **(experts if case.model == "mixture" else {}),
        vocab_size=case.vocab,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )

    spec = FAMILIES[config.model_type].read_config(config.to_dict(), "lm")
    return replace(spec, lora=Lora(case.lora, alpha=32.0)) if case.lora else spec
