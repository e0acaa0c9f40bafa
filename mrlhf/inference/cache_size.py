"""The sizes of one rank's KV cache: its KV heads, the tokens in a block, the bytes of a block.

Both engines use it, and so do the checks before a run. It is arithmetic on a model's spec, and
knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrlhf.models.spec import Experts, ModelSpec

# The native engine's block on a CPU: two vectors of 8 numbers. It is small enough to share
# prefixes, and large enough for the attention kernel.
NATIVE_CPU_BLOCK = 16
NATIVE_GPU_BLOCK = 256  # the page of FlashAttention 2
_VLLM_CPU_BLOCK = 32
_KEPT_FREE = 0.1  # share of a GPU
_VLLM_GPU_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The cache of one rank, whatever its number of blocks.

    Attributes:
        num_layers: transformer layers.
        kv_heads: key and value heads on the rank.
        head_dim: width of one head.
        itemsize: bytes of a number.
        block_size: tokens in a block.
        experts: the mixtures whose choice of experts is recorded beside the keys and values; None:
            nothing is.
    """

    num_layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    block_size: int
    experts: Experts | None = None

    @classmethod
    def on_rank(
        cls,
        spec: ModelSpec,
        tp_size: int,
        itemsize: int,
        block_size: int,
        experts: Experts | None = None,
    ) -> CacheShape:
        """The cache of a model on one of `tp_size` ranks."""
        return cls(
            num_layers=spec.num_layers,
            kv_heads=kv_heads_on_rank(spec, tp_size),
            head_dim=spec.head_dim,
            itemsize=itemsize,
            block_size=block_size,
            experts=experts,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes: its keys and values, and the record of its experts."""
        pairs = 2 * self.num_layers * self.kv_heads * self.head_dim * self.itemsize
        return pairs + self.record_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of the record of one token's experts."""
        return 0 if self.experts is None else self.experts.record_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_size


def gpu_room(utilization: float, weights: int, free: int, total: int) -> int:
    """Bytes that an engine may still take of a GPU.

    As in vLLM, `utilization` is the share of the GPU for the engine's weights and what it takes
    besides. What training holds comes first: a tenth of the GPU stays free in any case, or less
    where `utilization` is above 0.9.

    Args:
        utilization: rollout.gpu_memory_utilization.
        weights: bytes of the engine's weights that are on the GPU already, shared or not.
        free: bytes that are free now.
        total: bytes of the GPU.
    """
    kept = total * min(1 - utilization, _KEPT_FREE)
    return max(0, min(int(total * utilization) - weights, free - int(kept)))


def kv_heads_on_rank(spec: ModelSpec, tp_size: int) -> int:
    """The KV heads on each of `tp_size` ranks; if there are more ranks than heads, ranks share."""
    return max(1, spec.num_kv_heads // tp_size)


def vllm_cpu_block(wanted: int | None) -> int:
    """Tokens in a block of vLLM's on a CPU: `wanted`, rounded up to what its attention can do."""
    return -(-(wanted or _VLLM_CPU_BLOCK) // _VLLM_CPU_BLOCK) * _VLLM_CPU_BLOCK


def vllm_gpu_block(wanted: int | None) -> int:
    """Tokens in a block of vLLM's on a GPU."""
    return wanted or _VLLM_GPU_BLOCK
