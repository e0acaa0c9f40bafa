"""The tensors of the paged KV cache, and the number of blocks that fit the memory.

It does not know models, or which sequence has which block.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.device import send
from mrlhf.errors import EngineError
from mrlhf.host.pages import zero_pages
from mrlhf.inference.base import EngineLimits
from mrlhf.inference.native.operators import Layer
from mrlhf.inference.sizes import CacheShape, gpu_room
from mrlhf.parallel.job import processes_on_this_machine
from mrlhf.printable import size_text


class KVCache:
    """Keys and values in blocks; entries not yet written are zero or stale.

    Attributes:
        experts: the experts of each cached token, [blocks x block_size, mixtures, per_token]; None
            if they are not recorded.
        block_size: tokens in a block.
        slots: sequences that run at once.
    """

    def __init__(
        self,
        shape: CacheShape,
        blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: int = 0,
    ) -> None:
        """Take the memory, on a host when it is first written to; EngineError if there is none.

        Layers may have states of so many sequences as there are `slots`.
        """
        assert shape.itemsize == dtype.itemsize, f"{dtype} does not have {shape.itemsize} bytes"
        tokens = (shape.stores, blocks, shape.block_size)
        # In memory of its own, else what training takes later could lie in it, and hold all of it.
        pool = torch.cuda.MemPool() if device.type == "cuda" else None
        try:
            with nullcontext() if pool is None else torch.cuda.use_mem_pool(pool, device):
                pairs = [_zeros((*tokens, *heads), dtype, device) for heads in shape.heads]
                self.experts = _record(shape, blocks, device)
                self.states = _states(shape, slots, dtype, device)
        except (OSError, MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
            wanted = blocks * shape.block_bytes + slots * shape.state_bytes
            raise EngineError(
                f"no memory for a KV cache of {blocks} blocks = {size_text(wanted)}: lower "
                f"rollout.kv_cache_mb (on a CPU) or rollout.gpu_memory_utilization (on a GPU)"
            ) from error

        self._paged: list[Layer] = [
            (pair[0], pair[-1][..., : shape.values_in_keys]) for pair in pairs
        ]
        self.layers = shape.in_order(self._paged, self.states)
        self.blocks = blocks
        self.block_size = shape.block_size
        self.slots = slots
        self.state_bytes = slots * shape.state_bytes
        self.nbytes = blocks * shape.block_bytes + self.state_bytes
        self._pool = pool  # set last, so that it goes after the tensors

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, given as (from, to).

        No block is copied to twice, or copied both from and to.
        """
        if not pairs:
            return
        sources, targets = send(torch.tensor(pairs), self.layers[0][0].device).unbind(1)
        for keys, values in self._paged:
            keys[targets] = keys[sources]
            values[targets] = values[sources]  # again, if they are a part of the keys
        if self.experts is not None:
            in_blocks = self.experts.unflatten(0, (self.blocks, self.block_size))
            in_blocks[targets] = in_blocks[sources]

    def copy_states(self, pairs: list[tuple[int, int]]) -> None:
        """Copy the states of sequences, given as (from, to) slots, as `copy` does blocks."""
        if not pairs or not self.states:
            return
        sources, targets = send(torch.tensor(pairs), self.states[0][0].device).unbind(1)
        for store in self.states:
            for part in store:
                part[targets] = part[sources]


def _states(shape: CacheShape, slots: int, dtype: torch.dtype, device: torch.device) -> list[Layer]:
    """The states of each layer that has some."""
    if shape.states is None:
        return []
    states: list[Layer] = []
    for _ in range(sum(shape.states.layers)):
        window = _zeros((slots, *shape.states.window), dtype, device)
        states.append((window, _zeros((slots, *shape.states.state), torch.float32, device)))
    return states


def _record(shape: CacheShape, blocks: int, device: torch.device) -> Tensor | None:
    experts = shape.experts
    if experts is None:
        return None
    of_token = (experts.mixtures, experts.per_token)
    return _zeros((blocks * shape.block_size, *of_token), experts.record_dtype, device)


def blocks_for(
    limits: EngineLimits,
    block_size: int,
    block_bytes: int,
    device: torch.device,
    spare: int,
    weight_bytes: int = 0,
    state_bytes: int = 0,
) -> int:
    """Return the number of blocks: as many as could ever be used, or as fit the memory.

    No sequence uses the additional `spare` blocks. `block_bytes`, `weight_bytes` and `state_bytes`
    are sizes of a block, of the engine's weights and of the states of all sequences.

    Raises:
        EngineError: one sequence may need more.
    """
    per_sequence = -(-limits.max_length // block_size)
    room = max(0, _budget(limits, device, weight_bytes) - state_bytes)
    blocks = min(limits.max_num_seqs * per_sequence + spare, room // block_bytes)
    if blocks < per_sequence + spare:
        beside = f", beside {size_text(state_bytes)} for states" if state_bytes else ""
        key = "rollout.gpu_memory_utilization" if device.type == "cuda" else "rollout.kv_cache_mb"
        raise EngineError(
            f"the KV cache has room for {blocks * block_size} tokens ({size_text(room)}{beside}), "
            f"and one sequence may have {limits.max_length} tokens = "
            f"{size_text(per_sequence * block_bytes)}: raise {key}, or lower "
            f"data.max_prompt_length or data.max_response_length"
        )
    return blocks


def _budget(limits: EngineLimits, device: torch.device, weight_bytes: int) -> int:
    """Return the largest size of the cache, in bytes."""
    if limits.cache_bytes is not None:
        return limits.cache_bytes
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return gpu_room(limits.gpu_memory_utilization, weight_bytes, free, total, idle)
    return _free_host_bytes() // 2 // processes_on_this_machine()


def _free_host_bytes(root: Path = Path("/")) -> int:
    """Return the memory that programs could get now without swapping, in bytes."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))

    # A container or a batch job may have less than the host.
    cgroup = root / "sys/fs/cgroup"
    for limit, usage in (
        (cgroup / "memory.max", cgroup / "memory.current"),
        (cgroup / "memory/memory.limit_in_bytes", cgroup / "memory/memory.usage_in_bytes"),
    ):
        if limit.is_file() and usage.is_file() and (text := limit.read_text().strip()) != "max":
            free = min(free, int(text) - int(usage.read_text()))
    return max(0, free)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return zero_pages(shape, dtype)
