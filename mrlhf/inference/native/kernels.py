"""The compiled functions of `decoding.cpp`, called on tensors.

Without a compiler `load` warns once, and the engine runs on torch's own operators. This file knows
shapes, and no model.
"""

from __future__ import annotations

from ctypes import CDLL
from functools import cache

import torch
from torch import Tensor

from mrlhf.host.library import SOURCES, SUFFIXES, functions_of, load_library, threads_for
from mrlhf.inference.native.operators import Layer, StepInputs, Tables

SOURCE = SOURCES / "decoding.cpp"
_COLUMNS = 128

# The arguments of each function in the order of decoding.cpp.
_SIGNATURES = {
    "add_rms_norm": "pppp ii fn",
    "rotate_store": "ppp f ppppppp iiiiii n",
    "attend": "pppp i ppp iiiiii fn",
    "logit_blocks": "p f ppp ii n",
    "pick": "p f pppppp ii n",
    "draw": "p f ppp ii n",
}


class Kernels:
    """The compiled functions for one dtype, and calls of those that draw tokens.

    All tensors are contiguous and on the host, and have this dtype if no other is stated.
    """

    def __init__(self, library: CDLL, dtype: torch.dtype) -> None:
        self.functions = functions_of(library, _SIGNATURES, dtype)

    def logit_blocks(self, logits: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Summarise each row of `scale` * logits [batch, vocab_shard] by blocks of 128 columns.

        Returns:
            The highest scaled logit of each block, float32 [batch, blocks]; the sum of exp(scaled
            logit - that highest) over each block, float32 [batch, blocks]; and the first column
            that has the highest scaled logit of the whole row, int64 [batch].
        """
        rows, columns = logits.shape
        blocks = -(-columns // _COLUMNS)
        highest, sums = torch.empty((2, rows, blocks), dtype=torch.float32)
        likeliest = torch.empty(rows, dtype=torch.int64)

        self.functions["logit_blocks"](
            logits.data_ptr(), scale, highest.data_ptr(), sums.data_ptr(), likeliest.data_ptr(),
            rows, columns, threads_for(logits.numel()),
        )  # fmt: skip
        return highest, sums, likeliest

    def pick(
        self,
        logits: Tensor,
        scale: float,
        highest: Tensor,
        sums: Tensor,
        tops: Tensor,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Find the column of each row at which the running sum of weights passes the row's target.

        The weight of a column is exp(scaled logit - top).

        Args:
            logits: [batch, vocab_shard].
            scale: every logit is multiplied by it.
            highest: the highest scaled logits that `logit_blocks` returned.
            sums: the sums that `logit_blocks` returned.
            tops: the row's highest scaled logit, over all ranks, float32 [batch].
            targets: float64 [batch]; a row with a negative target is skipped.

        Returns:
            The columns, int64 [batch], and their scaled logits, float32 [batch]. A row that is
            skipped, or in which no column has any weight, has column -1 and logit 0.
        """
        rows, columns = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        chosen = torch.empty(rows, dtype=torch.float32)
        self.functions["pick"](
            logits.data_ptr(), scale, highest.data_ptr(), sums.data_ptr(), tops.data_ptr(),
            targets.data_ptr(), tokens.data_ptr(), chosen.data_ptr(),
            rows, columns, threads_for(64 * rows),
        )  # fmt: skip
        return tokens, chosen

    def draw(self, logits: Tensor, scale: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token for each row of `scale` * logits [batch, vocab], of the whole vocabulary.

        `uniform`, float64 [batch], picks the token: a number in [0, 1), or a negative number for
        the likeliest token.

        Returns:
            The tokens, int64 [batch], and their log-probabilities, float32 [batch]: NaN where the
            logits are not finite.
        """
        rows, columns = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows, dtype=torch.float32)
        self.functions["draw"](
            logits.data_ptr(), scale, uniform.data_ptr(), tokens.data_ptr(), logprobs.data_ptr(),
            rows, columns, threads_for(logits.numel()),
        )  # fmt: skip
        return tokens, logprobs


class HostOperators:
    """`Operators` on compiled kernels of the model's dtype; tensors are contiguous, on the host."""

    def __init__(self, kernels: Kernels, eps: float, scale: float) -> None:
        self._functions = kernels.functions
        self._eps = eps
        self._scale = scale

    def add_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """See `Operators`."""
        out = torch.empty_like(hidden)
        tokens, size = hidden.shape
        addend = None if delta is None else delta.data_ptr()
        self._functions["add_rms_norm"](
            hidden.data_ptr(), addend, weight.data_ptr(), out.data_ptr(),
            tokens, size, self._eps, threads_for(hidden.numel()),
        )  # fmt: skip
        return out

    def rotate_store(
        self, qkv: Tensor, norms: Layer | None, tables: Tables, inputs: StepInputs, layer: Layer
    ) -> Tensor:
        """See `Operators`; keys are stored transposed within a block, for `attend`."""
        tokens, kv_heads, rows, dim = qkv.shape
        per_kv_head = rows - 2
        cosines, sines = tables
        keys, values = layer
        q_norm = k_norm = None
        if norms is not None:
            q_norm = norms[0].data_ptr()
            k_norm = norms[1].data_ptr()

        q = torch.empty((tokens, kv_heads * per_kv_head, dim), dtype=qkv.dtype, device=qkv.device)
        self._functions["rotate_store"](
            qkv.data_ptr(), q_norm, k_norm, self._eps, cosines.data_ptr(), sines.data_ptr(),
            inputs.positions.data_ptr(), inputs.cache_places.data_ptr(),
            q.data_ptr(), keys.data_ptr(), values.data_ptr(),
            tokens, kv_heads, per_kv_head, dim, 2 * cosines.shape[1], keys.shape[1],
            threads_for(qkv.numel()),
        )  # fmt: skip
        return q

    def attend(self, q: Tensor, layer: Layer, inputs: StepInputs, window: int | None) -> Tensor:
        """See `Operators`."""
        _, heads, dim = q.shape
        keys, values = layer
        _, block_size, kv_heads, _ = keys.shape

        out = torch.empty_like(q)
        self._functions["attend"](
            q.data_ptr(), keys.data_ptr(), values.data_ptr(),
            inputs.block_tables.data_ptr(), inputs.block_tables.stride(0),
            inputs.query_starts.data_ptr(), inputs.lengths.data_ptr(), out.data_ptr(),
            len(inputs.lengths), kv_heads, heads // kv_heads, dim, block_size, window or 0,
            self._scale, threads_for(64 * q.numel()),
        )  # fmt: skip
        return out


@cache
def load(dtype: torch.dtype) -> Kernels | None:
    """The kernels for `dtype`; None where this machine cannot compile them."""
    library = load_library(SOURCE, "the engine") if dtype in SUFFIXES else None
    return None if library is None else Kernels(library, dtype)
