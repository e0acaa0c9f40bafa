"""CUDA graphs of decode steps, one for each batch size: a step is one launch instead of hundreds.

A smaller batch is padded with tokens that write to a spare block. This file knows inputs and a
forward function, and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mrlhf.inference.native.operators import StepInputs
from mrlhf.parallel.masks import Paged

Forward = Callable[[StepInputs], Tensor]


def bucket_sizes(most: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, every 8 up to 64, and every 32 up to `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most, 32), most]
    return sorted({size for size in sizes if size <= most})


class DecodeGraphs:
    """Captures `forward` for a batch size when it is first needed, and replays it afterwards.

    The weights and the cache that `forward` reads must stay where they are.
    """

    def __init__(
        self, forward: Forward, most: int, table_width: int, spare_block: int, block_size: int
    ) -> None:
        """Take the largest batch `most`, and the blocks of the longest sequence, `table_width`.

        Padding writes to `spare_block`.
        """
        self._forward = forward
        self._sizes = bucket_sizes(most)
        self._width = table_width
        self._spare = spare_block
        self._block_size = block_size
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, StepInputs, Tensor]] = {}
        self._pool: Any = None  # torch's handle of the memory that all graphs share

    def run(self, inputs: StepInputs) -> Tensor:
        """Return the logits [batch, vocab_shard] of a step with one token of every sequence."""
        batch = len(inputs.tokens)
        size = next(size for size in self._sizes if size >= batch)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size, inputs)
        graph, static, logits = self._graphs[size]

        static.tokens[:batch] = inputs.tokens
        static.positions[:batch] = inputs.positions
        static.cache_places[:batch] = inputs.cache_places
        static.mask.lengths[:batch] = inputs.mask.lengths
        tables = inputs.mask.block_tables
        static.mask.block_tables[:batch, : tables.shape[1]] = tables
        self._fill_padding(static, batch)
        graph.replay()
        return logits[:batch]

    def _capture(
        self, size: int, like: StepInputs
    ) -> tuple[torch.cuda.CUDAGraph, StepInputs, Tensor]:
        """Record a step of `size` sequences on the device of `like`."""
        device = like.tokens.device
        static = StepInputs(
            tokens=torch.zeros(size, dtype=torch.int64, device=device),
            positions=torch.zeros(size, dtype=torch.int64, device=device),
            cache_places=torch.zeros(size, dtype=torch.int64, device=device),
            mask=Paged(
                query_edges=torch.arange(size + 1, dtype=torch.int32, device=device),
                lengths=torch.ones(size, dtype=torch.int32, device=device),
                block_tables=torch.zeros(size, self._width, dtype=torch.int32, device=device),
                most_queries=1,
                most_keys=self._width * self._block_size,
            ),
            last=torch.arange(size, dtype=torch.int64, device=device),
        )
        self._fill_padding(static, 0)

        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # libraries set themselves up outside of the capture
            for _ in range(2):
                self._forward(static)
        torch.cuda.current_stream(device).wait_stream(stream)

        graph = torch.cuda.CUDAGraph()
        # A thread that saves a checkpoint may wait for the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._forward(static)
        self._pool = graph.pool()
        return graph, static, logits

    def _fill_padding(self, static: StepInputs, batch: int) -> None:
        """Let every token from `batch` on write to the spare block and see only itself."""
        static.tokens[batch:] = 0
        static.positions[batch:] = 0
        static.mask.lengths[batch:] = 1
        static.cache_places[batch:] = self._spare * self._block_size
        static.mask.block_tables[batch:] = self._spare
