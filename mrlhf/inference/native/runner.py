"""Runs passes through the model with one version of the weights on one cache.

On a GPU decode steps run as CUDA graphs. This file does not know which rows take part in a pass, or
how tokens are drawn.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrlhf.device import send
from mrlhf.inference.base import EngineLimits
from mrlhf.inference.native.blocks import BlockManager
from mrlhf.inference.native.graphs import DecodeGraphs
from mrlhf.inference.native.kv_cache import KVCache
from mrlhf.inference.native.model import Decoder
from mrlhf.inference.native.operators import StepInputs
from mrlhf.inference.native.tensor_parallel import TensorParallel


class Runner:
    """Runs passes until the weights change or the cache is freed.

    The logits' first column is for the token id `vocab_start`.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        parallel: TensorParallel,
        limits: EngineLimits,
        device: torch.device,
    ) -> None:
        """Agree on the number of blocks of the unused cache; all ranks of the replica call it."""
        self.cache = cache
        self.vocab_start = decoder.vocab_start
        self._decoder = decoder
        self._device = device
        self._graphs: DecodeGraphs | None = None

        captures = device.type == "cuda" and not limits.enforce_eager
        # Padding of captured steps writes to a block of its own.
        blocks = parallel.least(cache.blocks) - captures
        self.manager = BlockManager(blocks, cache.block_size)
        if captures:
            self._graphs = DecodeGraphs(
                lambda inputs: decoder.forward(inputs, cache.layers, cache.experts),
                limits.max_num_seqs,
                -(-limits.max_length // cache.block_size),
                blocks,
                cache.block_size,
            )

    def run(self, inputs: StepInputs) -> Tensor:
        """Return the logits [rows, vocab_shard] after the tokens `inputs.last`."""
        one_token_each = inputs.mask.most_queries == 1 and len(inputs.last) == len(inputs.tokens)
        if self._graphs is not None and one_token_each:
            return self._graphs.run(inputs)
        return self._decoder.forward(inputs, self.cache.layers, self.cache.experts)

    def send(self, values: NDArray[np.generic]) -> Tensor:
        """Copy a host array to the device; nothing waits."""
        return send(torch.from_numpy(values), self._device)
