"""The sizes of an engine that fit a model: its ranks, its shares of experts, its KV cache.

All engines and the checks before a run use it. It is arithmetic on a spec, without tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch

from mrlhf.host.products import float32_is_faster
from mrlhf.models.attention_sizes import attention_layers
from mrlhf.models.parallel_sizes import divisors, tp_problem
from mrlhf.models.spec import DeltaNet, Experts, ModelSpec

Store = TypeVar("Store")

VLLM_VOCABULARY_UNIT = 64

# Tokens in a block if no other number is wanted, by engine and device.
_BLOCKS = {
    # Two vectors of 8 numbers: small enough to share prefixes, large enough for the kernel.
    ("native", "cpu"): 16,
    ("native", "cuda"): 64,  # keys that a program of attention reads at a time
    ("vllm", "cpu"): 32,
    ("vllm", "cuda"): 16,
}
_FREE_GPU_SHARE = 0.1  # of its memory


@dataclass(frozen=True)
class StateShape:
    """What the delta nets of one rank keep of a sequence, in place of keys and values."""

    layers: tuple[bool, ...]  # which have it
    window: tuple[int, int]  # rows and channels that the convolution of a layer still sees
    state: tuple[int, int, int]  # value heads of a layer, and the shape of each one's in float32

    @classmethod
    def on_rank(cls, net: DeltaNet, tp_size: int) -> StateShape:
        """Return those on one of `tp_size` ranks."""
        window = (net.taps - 1, net.channels // tp_size)
        return cls(net.layers, window, (net.value_heads // tp_size, net.key_dim, net.value_dim))


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The cache of one rank, without its number of blocks."""

    # of each layer that caches keys and values: KV heads on the rank, and numbers stored of one
    heads: tuple[tuple[int, int], ...]
    itemsize: int  # bytes of a number
    block_size: int  # tokens in a block
    # the mixtures whose chosen experts are recorded; None records nothing
    experts: Experts | None = None
    # values are so many first numbers of the keys; None: they are stored beside them
    values_in_keys: int | None = None
    states: StateShape | None = None  # None if all layers have keys and values
    # for each layer the number of the one above that it reads; empty if each has its own
    reads: tuple[int, ...] = ()

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
        every = attention_layers(spec)
        layers = [sizes.cached for sizes in every if sizes.cached.heads and sizes.caches]
        owners = sorted(set(spec.key_layers))
        return cls(
            heads=tuple((some.on_rank(tp_size), some.key_dim + some.index_dim) for some in layers),
            itemsize=itemsize,
            block_size=block_size,
            experts=experts,
            values_in_keys=layers[0].values_in_keys if layers else None,
            states=None if spec.delta is None else StateShape.on_rank(spec.delta, tp_size),
            reads=tuple(map(owners.index, spec.key_layers)),
        )

    @property
    def stores(self) -> int:
        """Keys and values, or keys alone."""
        return 2 if self.values_in_keys is None else 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token: its keys and values, and the record of its experts."""
        numbers = sum(kv_heads * head_dim for kv_heads, head_dim in self.heads)
        return self.stores * numbers * self.itemsize + self.record_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of the record of one token's experts."""
        return 0 if self.experts is None else self.experts.record_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence, whatever its length."""
        if self.states is None:
            return 0
        of_layer = math.prod(self.states.window) * self.itemsize + 4 * math.prod(self.states.state)
        return sum(self.states.layers) * of_layer

    def in_order(self, paged: Sequence[Store], states: Sequence[Store]) -> list[Store]:
        """Return what each layer reads, from that of layers with keys and of those with states."""
        if self.reads:
            return [paged[number] for number in self.reads]
        if self.states is None:
            return list(paged)
        with_keys, with_states = iter(paged), iter(states)
        return [next(with_states if has else with_keys) for has in self.states.layers]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_size


def engine_tp_problem(
    engine: Literal["native", "vllm"],
    tp: int,
    spec: ModelSpec,
    ranks: int | None = None,
    ep: int | None = None,
) -> str | None:
    """Say in one line why an engine of `tp` ranks does not fit a model, and which sizes do.

    Args:
        tp: ranks of one replica.
        ranks: only divisors of it are named; None: any size.
        ep: the number of parts of a replica over which experts are shared out; None: any that fits.

    Returns:
        None if the size fits.
    """
    return tp_problem(
        "rollout.tp",
        tp,
        spec,
        whole_kv_heads=True,
        vocabulary=_vllm_misfit if engine == "vllm" else partial(_native_misfit, ep=ep),
        ranks=ranks,
    )


def engine_ep_problem(
    engine: Literal["native", "vllm"], ep: int, tp: int, spec: ModelSpec
) -> str | None:
    """Say in one line why experts cannot be shared out over `ep` parts of a replica, if so."""
    experts = spec.experts
    if experts is None:
        none = f"rollout.ep {ep} does not fit a model without experts; leave it out"
        return none if ep > 1 else None
    if engine == "vllm":
        split = f"rollout.ep {ep}: in vLLM each expert is split over all ranks; leave it out"
        return split if ep > 1 else None

    fits = [str(size) for size in divisors(tp) if _experts(spec, tp, size) is None]
    if tp % ep == 0 and str(ep) in fits:
        return None
    remedy = f"use one of {', '.join(fits)}" if fits else "use another rollout.tp"
    return (
        f"rollout.ep {ep} does not fit rollout.tp {tp} and the model's {experts.count} experts of "
        f"width {experts.ffn_size}; {remedy}"
    )


def engine_ep(
    engine: Literal["native", "vllm"], wanted: int | None, tp: int, actor_etp: int, spec: ModelSpec
) -> int:
    """Return the number of parts of a replica over which the experts of a layer are shared out.

    Args:
        engine: vLLM always splits each expert over all ranks of a replica.
        wanted: `rollout.ep`; None leaves it open.
        tp: ranks of one replica.
        actor_etp: over how many ranks training splits an expert.
    """
    if wanted is not None or spec.experts is None or engine == "vllm":
        return wanted or 1
    # Split over as many ranks as in training, experts can share their memory with it. Otherwise
    # all ranks of the replica split each expert, for equal work, or as many as possible.
    sizes = divisors(tp)
    if tp % actor_etp == 0:
        sizes.insert(0, tp // actor_etp)
    return next((size for size in sizes if _experts(spec, tp, size) is None), 1)


def vllm_vocabulary(rows: int) -> int:
    """Return the rows of an embedding in vLLM over all ranks, padding included."""
    return -(-rows // VLLM_VOCABULARY_UNIT) * VLLM_VOCABULARY_UNIT


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


def block_tokens(engine: str, device: str, wanted: int | None) -> int:
    """Return the tokens in a block of an engine on a device, `wanted` if it has such blocks."""
    default = _BLOCKS[engine, device]
    if (engine, device) == ("vllm", "cpu"):  # it has attention for multiples alone
        return -(-(wanted or default) // default) * default
    return wanted or default


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which weights of `dtype` are kept and multiplied."""
    # Many hosts multiply bfloat16 slower than float32. Widening the weights loses nothing.
    is_host_bfloat16 = device.type == "cpu" and dtype == torch.bfloat16
    return torch.float32 if is_host_bfloat16 and float32_is_faster() else dtype


def cache_dtype(engine: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which an engine keeps keys and values where weights have `dtype`."""
    return compute_dtype(dtype, device) if engine == "native" else dtype


def _vllm_misfit(spec: ModelSpec, tp: int) -> str | None:
    padded = vllm_vocabulary(spec.vocab_size)
    if padded % tp:
        return f"vocabulary {spec.vocab_size} (vLLM pads it to {padded} rows)"
    if spec.experts is not None and spec.experts.count < tp:
        return f"{spec.experts.count} experts (vLLM needs as many as ranks)"
    return _experts(spec, tp, ep=1)


def _native_misfit(spec: ModelSpec, tp: int, ep: int | None) -> str | None:
    rows = spec.padded_vocab(tp) // tp
    if (tp - 1) * rows < spec.vocab_size:
        return _experts(spec, tp, ep)
    return f"vocabulary {spec.vocab_size} (in parts of {rows}, the last rank would have none)"


def _experts(spec: ModelSpec, tp: int, ep: int | None) -> str | None:
    """Name in words the experts, if they do not divide over `ep` parts of `tp` ranks."""
    experts = spec.experts
    if experts is None:
        return None
    for size in divisors(tp) if ep is None else [ep]:
        divides = tp % size == 0 and experts.count % size == 0
        if divides and experts.ffn_size % (tp // size) == 0:
            return None
    return f"{experts.count} experts of width {experts.ffn_size}"
