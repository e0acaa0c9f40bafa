"""Tiny transformers models, and native engines that hold their weights, for the engine's tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from benchmarks.engine_loop import generate, requests_for
from mrlhf.inference.base import EngineLimits, InferenceEngine, Sample, SamplingParams
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.inference.sizes import CacheShape
from mrlhf.inference.stopping import Decode
from mrlhf.models.families import FAMILIES
from mrlhf.models.lora import A
from mrlhf.models.spec import Lora, ModelSpec
from mrlhf.weights.shard import Slot
from tests.models.features import feature_configs
from tests.models.mixtures import as_in_files, mixture_configs
from tests.oracle.plain_lora import ALPHA, PREFIX, RANK, adapt, factors_of, save_adapter

VOCABULARY = 131  # divides over no tensor-parallel size: the last rank pads
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = ("llama", "llama-tied-llama3-rope", "mistral-window", "qwen2-tied", "qwen3")


def hf_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """The model `name` with random weights, the same in every process."""
    configs = {
        "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
        "llama-tied-llama3-rope": lambda: transformers.LlamaConfig(
            **SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
        ),
        "mistral-window": lambda: transformers.MistralConfig(
            **SIZES, tie_word_embeddings=False, sliding_window=6, head_dim=20
        ),
        "qwen2-tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=False, head_dim=16),
    }
    if name in configs:
        config = configs[name]()
    else:
        four = {**SIZES, "num_hidden_layers": 4}
        config = (feature_configs(four) | mixture_configs(four))[name]

    return random_model(config, seed).to(dtype)


def random_model(config: transformers.PreTrainedConfig, seed: int = 0) -> Any:
    """A model with random float32 weights, the same in every process."""
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_gain = "norm" in key or key.endswith("scale")
        parameter.data = 1 + 0.2 * noise if is_gain else 0.12 * noise
    for key, buffer in model.named_buffers():
        if "correction" in key:
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
        if "layer_scalar" in key:
            buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
    return model


def adapted_model(name: str, directory: Path, targets: Sequence[str] | None = None) -> Any:
    """The model `name` with a random adapter, which is written into the new `directory`.

    `targets` are the ends of the names of the layers that have one; None: all that can.
    """
    model = hf_model(name)
    save_adapter(model, directory, torch.Generator().manual_seed(7), targets)
    adapt(model, directory)
    return model


def spec_of(model: Any) -> ModelSpec:
    spec = FAMILIES[model.config.model_type].read_config(model.config.to_dict(), "lm")
    layers = {name.removesuffix(A) for name in adapter_of(model) if name.endswith(A)}
    if not layers:
        return spec
    return replace(spec, lora=Lora(RANK, ALPHA, targets=frozenset(layers)))


def tensors_of(model: Any) -> dict[str, Tensor]:
    """The model's tensors as in its files, and those of its adapter."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        owner, _, parametrized = name.partition(".parametrizations.")
        if not parametrized:
            tensors[name] = tensor
        elif parametrized.endswith(".original"):
            tensors[f"{owner}.{parametrized.removesuffix('.original')}"] = tensor
    return as_in_files(tensors, model.config.model_type) | adapter_of(model)


def adapter_of(model: Any) -> dict[str, Tensor]:
    """The factors of the model's adapter; empty without one."""
    return {name.removeprefix(PREFIX): factor for name, factor in factors_of(model).items()}


def fill(slots: Iterable[Slot], model: Any) -> None:
    """Copy the model's tensors into the slots."""
    tensors = tensors_of(model)
    for slot in slots:
        piece = slot.piece
        slot.store(tensors[piece.name].narrow(piece.dim, piece.start, piece.stop - piece.start))


def empty_engine(
    model: Any,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
    decode: Decode | None = None,
    never: Sequence[int] = (),
    ep: int = 1,
    **limits: Any,
) -> NativeEngine:
    limits = {"max_num_seqs": 64, "max_length": 64, "max_prefill_tokens": 512, **limits}
    return NativeEngine(
        spec_of(model),
        group,
        torch.device("cpu"),
        dtype,
        EngineLimits(**limits),
        decode,
        never,
        ep,
    )


def make_engine(model: Any, group: dist.ProcessGroup | None = None, **changes: Any) -> NativeEngine:
    """An engine that holds the model's weights as version 1."""
    engine = empty_engine(model, group, **changes)
    fill(engine.weight_slots(), model)
    engine.commit(1)
    return engine


def answer(
    engine: InferenceEngine,
    prompts: Sequence[Sequence[int]],
    uids: Sequence[int],
    sampling: SamplingParams,
    samples: Sequence[range] | None = None,
) -> list[Sample]:
    """The samples of all prompts, by prompt, then by sample."""
    return generate(engine, requests_for(prompts, uids, sampling, samples)).samples


def make_prompts(count: int = 9) -> list[list[int]]:
    """Prompts of different lengths, 1 among them."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1 + 7 * i % 23 for i in range(count)]
    return [
        torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


PROMPTS = make_prompts()
UIDS = [100 + 3 * i for i in range(len(PROMPTS))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, seed=0)
SAMPLED = SamplingParams(
    n=3, temperature=0.8, max_tokens=14, seed=5, stop_token_ids=(7, 20, 33, 64, 101)
)


def tight(model, blocks: int, block_size: int = 4, **changes):
    """An engine whose cache has so many blocks."""
    spec = spec_of(model)
    shape = CacheShape.on_rank(spec, 1, 4, block_size, spec.experts)
    cache_bytes = blocks * shape.block_bytes
    return make_engine(model, block_size=block_size, cache_bytes=cache_bytes, **changes)


def assert_same(samples: list[Sample], others: list[Sample], tolerance: float = 1e-5) -> None:
    assert len(samples) == len(others)
    for one, other in zip(samples, others, strict=True):
        assert one.token_ids == other.token_ids and one.stopped == other.stopped
        assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)
