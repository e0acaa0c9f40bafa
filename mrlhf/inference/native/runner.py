"""Runs passes through the model with one version of the weights on one cache, and draws tokens.

On a GPU decode steps run as CUDA graphs. This file does not know which rows take part in a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrlhf.device import send
from mrlhf.inference.base import SamplingParams
from mrlhf.inference.native.blocks import BlockManager
from mrlhf.inference.native.graphs import DecodeGraphs, Drawn
from mrlhf.inference.native.inputs import Pass, PassArrays, on_device
from mrlhf.inference.native.kv_cache import KVCache
from mrlhf.inference.native.model import Decoder
from mrlhf.inference.native.sampler import TokenSampler
from mrlhf.inference.native.state_slots import StateSlots
from mrlhf.inference.native.tensor_parallel import TensorParallel

_WARM_UP_LENGTH = 1024  # so many keys are read in parts


class Runner:
    """Runs passes until the weights change or the cache is freed."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        parallel: TensorParallel,
        sampler: TokenSampler,
        graphs: DecodeGraphs | None,
        weights: Sequence[Tensor],
    ) -> None:
        """Agree on the number of blocks of the unused cache; all ranks of the replica call it.

        `graphs`, if steps are captured, may be those of an earlier version of the weights: they
        are kept if `weights` and cache lie where they lay then.
        """
        self.cache = cache
        self.captures = graphs is not None
        self._decoder = decoder
        self._sampler = sampler
        self._device = cache.layers[0][0].device
        self._graphs = graphs

        # Padding of captured steps writes to a block and a slot of its own, the last ones.
        spare = int(graphs is not None)
        blocks = parallel.least(cache.blocks) - spare
        # A state goes on with the next token; what it held of a prefix is lost.
        has_states = bool(cache.states)
        self.manager = BlockManager(blocks, cache.block_size, shares=not has_states)
        self.slots = StateSlots(cache.slots - spare, self.manager, keeps=has_states)
        if graphs is not None:
            stored = [part for store in cache.layers for part in store]
            experts = [] if cache.experts is None else [cache.experts]
            tensors = (*weights, *stored, *experts)
            places = (blocks, cache.blocks, *(tensor.data_ptr() for tensor in tensors))
            # A rank that captures exchanges more than one that replays.
            if not parallel.least(places == graphs.places):
                graphs.move_to(places, spare_block=blocks)

    def run(
        self, arrays: PassArrays, origins: NDArray[np.int64] | None, sampling: SamplingParams
    ) -> Drawn | None:
        """Run a pass, and draw the tokens that it asks for; None if these are none.

        A captured step has `origins`: the place of each of its tokens among those that the pass
        before drew, or -1 if it is in `arrays`.
        """
        if self._graphs is not None and origins is not None:
            draw = partial(self._draw, sampling=sampling)
            return self._graphs.run(arrays, origins, sampling, draw)

        step = on_device(arrays, self._device)
        if not len(arrays.sources):
            self._decoder.forward(step[0], self.cache.layers, self.cache.experts)
            return None
        drawn = self._draw(step, sampling)
        if self._graphs is not None:
            self._graphs.keep(drawn)
        return drawn

    def warm_up(self) -> None:
        """Let kernels be compiled, by a prompt and a step that decodes; no row may have a block."""
        size = self.cache.block_size
        blocks = min(self.cache.blocks, -(-_WARM_UP_LENGTH // size))
        for count in (2, 1):
            arrays = PassArrays(
                tokens=np.zeros(count, dtype=np.int64),
                positions=np.arange(count),
                cache_places=np.arange(count),
                last=np.array([count - 1]),
                sources=np.array([0]),
                uniform=np.zeros(1),
                query_edges=np.array([0, count], dtype=np.int32),
                lengths=np.array([blocks * size], dtype=np.int32),
                block_tables=np.zeros((1, blocks), dtype=np.int32),
                slots=np.zeros(1, dtype=np.int64),
            )
            sampling = SamplingParams(temperature=1.0, max_tokens=1, seed=0)
            self._draw(on_device(arrays, self._device), sampling)

    def send(self, values: NDArray[np.generic]) -> Tensor:
        """Copy a host array to the device; nothing waits."""
        return send(torch.from_numpy(values), self._device)

    def _draw(self, step: Pass, sampling: SamplingParams) -> Drawn:
        inputs, sources, uniform = step
        logits = self._decoder.forward(inputs, self.cache.layers, self.cache.experts)
        if len(sources) > len(logits):
            logits = logits[sources]
        return self._sampler.draw(logits, self._decoder.vocab_start, uniform, sampling)
