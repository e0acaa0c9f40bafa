"""CUDA graphs of decode steps, one for each batch size: a step is one launch instead of hundreds.

A smaller batch is padded with tokens that write to a spare block and slot. A graph keeps what it
draws, and the next one takes tokens from there before the host has seen them. This file knows
inputs and a function of them, and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mrlhf.inference.base import EngineLimits, SamplingParams
from mrlhf.inference.native.inputs import Pass, PassArrays, as_pass, packed, unpacked

Drawn = tuple[Tensor, ...]
"""Tokens, int64 [draws], and their log-probabilities, float32 [draws]; also a record of each
distribution, uint8 [draws, bytes], if one is asked for; see `as_words`."""


def bucket_sizes(most: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, every 8 up to 64, and every 32 up to `most`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most, 32), most]
    return sorted({size for size in sizes if size <= most})


class DecodeGraphs:
    """Captures a step when its batch size and way of drawing first occur, and then replays it.

    Graphs read weights and cache at the `places` where these lay at the capture.
    """

    def __init__(self, limits: EngineLimits, block_size: int, device: torch.device) -> None:
        self._sizes = bucket_sizes(limits.max_num_seqs)
        self._width = -(-limits.max_length // block_size)  # blocks of the longest sequence
        self._block_size = block_size
        self._device = device
        self._spare = 0
        self._most = limits.max_num_seqs
        # The tokens drawn last, then the inputs of the graph that runs: no row has more words.
        self._words = torch.zeros(self._most * (12 + self._width), dtype=torch.int64, device=device)
        self.places: tuple[int, ...] = ()
        # The graph of each batch size and way of drawing, and its results.
        self._graphs: dict[tuple[float, ...], tuple[torch.cuda.CUDAGraph, Drawn]] = {}
        self._pool: Any = None  # torch's handle of the memory that all graphs share

    def move_to(self, places: tuple[int, ...], spare_block: int) -> None:
        """Drop all graphs; new ones read what lies at `places`, and pad with `spare_block`."""
        self._graphs.clear()
        self._pool = None
        self.places = places
        self._spare = spare_block

    def keep(self, drawn: Drawn) -> None:
        """Let the next step take tokens from these."""
        self._words[: len(drawn[0])].copy_(drawn[0])

    def run(
        self,
        arrays: PassArrays,
        origins: NDArray[np.int64],
        sampling: SamplingParams,
        draw: Callable[[Pass], Drawn],
    ) -> Drawn:
        """Return what `draw`, which draws as `sampling` says, gives for a step that decodes.

        Tokens come from the places `origins` of what the pass before drew; at -1 from `arrays`.
        """
        batch = len(arrays.tokens)
        size = next(size for size in self._sizes if size >= batch)
        cut = (sampling.top_k, sampling.top_p, sampling.min_p)
        key = (size, sampling.temperature, *cut, sampling.record_masks, sampling.record_head)
        places = np.arange(self._most, self._most + size)  # of the arrays' tokens, which come first
        places[:batch][origins >= 0] = origins[origins >= 0]
        padded = self._padded(arrays, size)
        if key not in self._graphs:
            # Before a capture steps run, and states would go on more than once.
            elsewhere = padded._replace(slots=np.full(size, self._most))
            self._graphs[key] = self._capture((*elsewhere, places), draw)
        self._put((*padded, places))
        graph, drawn = self._graphs[key]

        graph.replay()
        return tuple(numbers[:batch] for numbers in drawn)

    def _put(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """Bring the inputs to where graphs read them; nothing waits."""
        words = packed(arrays)
        return self._words[self._most : self._most + len(words)].copy_(words, non_blocking=True)

    def _capture(
        self, arrays: Sequence[NDArray[Any]], draw: Callable[[Pass], Drawn]
    ) -> tuple[torch.cuda.CUDAGraph, Drawn]:
        _, *parts, places = unpacked(self._put(arrays), arrays)

        def step() -> Drawn:
            tokens = self._words.index_select(0, places)
            most_keys = self._width * self._block_size
            return draw(as_pass([tokens, *parts], most_queries=1, most_keys=most_keys))

        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):  # libraries set themselves up outside of the capture
            for _ in range(2):
                step()
        torch.cuda.current_stream(self._device).wait_stream(stream)

        graph = torch.cuda.CUDAGraph()
        # A thread that saves a checkpoint may wait for the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            drawn = step()
            self.keep(drawn)
        self._pool = graph.pool()
        return graph, drawn

    def _padded(self, arrays: PassArrays, size: int) -> PassArrays:
        """Add tokens that write to the spare block and slot, and see only themselves."""

        def longer(array: NDArray[Any], value: float, *width: int) -> NDArray[Any]:
            out = np.full((size, *width), value, dtype=array.dtype)
            out[tuple(map(slice, array.shape))] = array
            return out

        return PassArrays(
            tokens=longer(arrays.tokens, 0),
            positions=longer(arrays.positions, 0),
            cache_places=longer(arrays.cache_places, self._spare * self._block_size),
            last=np.arange(size),
            sources=np.arange(size),
            uniform=longer(arrays.uniform, 0.0),
            query_edges=np.arange(size + 1, dtype=np.int32),
            lengths=longer(arrays.lengths, 1),
            block_tables=longer(arrays.block_tables, self._spare, self._width),
            slots=longer(arrays.slots, self._most),
        )
