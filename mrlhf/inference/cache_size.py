"""The sizes of one rank's KV cache: its KV heads, the tokens in a block, the bytes of a block.

Both engines and the checks before a run use it. It is arithmetic on a spec, without tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrlhf.models.spec import Experts, ModelSpec

# Tokens in a block if no other number is wanted, by engine and device.
_BLOCKS = {
    # Two vectors of 8 numbers: small enough to share prefixes, large enough for the kernel.
    ("native", "cpu"): 16,
    ("native", "cuda"): 256,  # the page of FlashAttention 2
    ("vllm", "cpu"): 32,
    ("vllm", "cuda"): 16,
}
_FREE_GPU_SHARE = 0.1  # of its memory


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The cache of one rank, without its number of blocks."""

    num_layers: int
    kv_heads: int  # on the rank
    head_dim: int
    itemsize: int  # bytes of a number
    block_size: int  # tokens in a block
    # the mixtures whose chosen experts are recorded; None records nothing
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
        """Return the cache of a model on one of `tp_size` ranks."""
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
        """Bytes of one token: its keys and values, and the record of its experts."""
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


def gpu_room(utilization: float, weights: int, free: int, total: int, idle: int = 0) -> int:
    """Return the bytes that an engine may still take of a GPU.

    As in vLLM, `utilization` is the share of the GPU for the engine: its weights, of which
    `weights` bytes are there already (shared or not), and all else. `idle` bytes are not free, but
    torch holds them for tensors to come, though not for the cache, whose memory is its own.
    """
    # Training's memory comes first: a tenth of the GPU stays free in any case, or less where
    # `utilization` is above 0.9.
    kept = int(total * min(1 - utilization, _FREE_GPU_SHARE)) - idle
    return max(0, min(int(total * utilization) - weights, free - max(0, kept)))


def kv_heads_on_rank(spec: ModelSpec, tp_size: int) -> int:
    """Return the KV heads on each of `tp_size` ranks; ranks share if there are more than heads."""
    return max(1, spec.num_kv_heads // tp_size)


def block_tokens(engine: str, device: str, wanted: int | None) -> int:
    """Return the tokens in a block of an engine on a device, `wanted` if it has such blocks."""
    default = _BLOCKS[engine, device]
    if (engine, device) == ("vllm", "cpu"):  # it has attention for multiples alone
        return -(-(wanted or default) // default) * default
    return wanted or default
