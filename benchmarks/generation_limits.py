"""What the machine allows a generation: the speed of its matrix products, its memory bandwidth.

Both are measured here, matrix products at the shape of decoding. `work` counts what a workload asks
of them. This file knows no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

_SECONDS = 0.5
_STREAM_BYTES = 2**28


def gemm_flops(
    config: PretrainedConfig,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
    clock: Callable[[], float],
) -> float:
    """Floating-point operations a second of [batch, hidden] x [hidden, intermediate].

    The weight is in the cache as far as it fits, since every call uses it.
    """
    x = torch.randn(batch, config.hidden_size, device=device).to(dtype)
    weight = torch.randn(config.intermediate_size, config.hidden_size, device=device).to(dtype)
    seconds = _fastest(lambda: torch.nn.functional.linear(x, weight), device, clock)
    return 2 * batch * weight.numel() / seconds


def read_bandwidth(device: torch.device, clock: Callable[[], float]) -> float:
    """Bytes a second of reading more than the caches hold.

    It is the speed of a sum or of a product with a vector, whichever is faster.
    """
    numbers = torch.ones(_STREAM_BYTES // 4 // 1024, 1024, dtype=torch.float32, device=device)
    vector = torch.ones(1024, dtype=torch.float32, device=device)
    reads: list[Callable[[], Tensor]] = [numbers.sum, lambda: numbers @ vector]
    return numbers.nbytes / min(_fastest(read, device, clock) for read in reads)


def work(
    config: PretrainedConfig,
    prompt_length: int,
    responses: Sequence[int],
    itemsize: int,
    samples: int = 1,
) -> tuple[float, float]:
    """Floating-point operations of one workload, and the bytes that it has to read.

    Each weight is read once a step, in which all responses advance together. The embedding is read
    as the output layer.

    Args:
        config: the model's configuration.
        prompt_length: tokens of each prompt.
        responses: tokens of each response.
        itemsize: bytes of a number.
        samples: responses to each prompt, which is computed once for all of them.
    """
    width = config.num_attention_heads * config.head_dim
    kv_width = config.num_key_value_heads * config.head_dim
    attention = 2 * width + 2 * kv_width
    computed, stored = _mlp_widths(config)
    body = config.num_hidden_layers * config.hidden_size * (attention + 3 * computed)
    weights = config.num_hidden_layers * config.hidden_size * (attention + 3 * stored)
    output = config.vocab_size * config.hidden_size

    operations = 0.0
    read = 0.0
    for length in responses:
        tokens = prompt_length + length - 1  # the last token is drawn and not computed
        seen = tokens * (tokens + 1) / 2
        spared = prompt_length * (1 - 1 / samples)
        operations += 2 * body * (tokens - spared) + 2 * output * length
        operations += 4 * config.num_hidden_layers * width * seen

        decoded = seen - prompt_length * (prompt_length + 1) / 2
        read += 2 * config.num_hidden_layers * kv_width * itemsize * decoded

    return operations, read + max(responses) * (weights + output) * itemsize


def _mlp_widths(config: PretrainedConfig) -> tuple[int, int]:
    """The width of the MLPs that a token goes through, and of those that all tokens together do.

    With so many tokens that each expert has some, all experts are read.
    """
    if not hasattr(config, "num_experts"):
        return config.intermediate_size, config.intermediate_size
    width = config.moe_intermediate_size
    return config.num_experts_per_tok * width, config.num_experts * width


def _fastest(call: Callable[[], Tensor], device: torch.device, clock: Callable[[], float]) -> float:
    """Seconds of the fastest of many calls."""
    end = time.perf_counter() + _SECONDS
    best = float("inf")
    while time.perf_counter() < end:
        began = clock()
        for _ in range(4):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (clock() - began) / 4)
    return best
