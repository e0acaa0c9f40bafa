"""The compiled functions of `kernels.cpp`, called on tensors.

Without a compiler `load` warns once, and the engine runs on torch's own operators. This file knows
shapes, and no model.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.compiled.library import SUFFIXES, functions_of, load_library, threads_for
from mrlhf.inference.native.linear import Product

SOURCE = Path(__file__).with_name("kernels.cpp")
_COLUMNS = 128

# The arguments of each function in the order of kernels.cpp.
_SIGNATURES = {
    "add_rms_norm": "pppp ii fn",
    "gated": "pp ii n",
    "rotate_store": "ppp f ppppppp iiiiii n",
    "attend": "pppp i ppp iiiiii fn",
    "logit_blocks": "p f ppp ii n",
    "pick": "p f pppppp ii n",
    "draw": "p f ppp ii n",
}
_ATTENTION = {"attention": "pppppp i p n"}


class Pass(ctypes.Structure):
    """The tokens of a pass for compiled code; see `StepInputs` for what they mean."""

    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("cache_places", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("sequences", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
    )


class AttentionPart(ctypes.Structure):
    """The attention of one layer for compiled code; see `AttentionWeights` for what they mean."""

    _fields_ = (
        ("norm", ctypes.c_void_p),
        ("qkv", Product),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("proj", Product),
        ("kv_heads", ctypes.c_int64),
        ("heads_per_kv_head", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class Kernels:
    """The compiled functions for one dtype.

    All tensors are contiguous and on the host; those without a stated dtype have that of the
    kernels.

    Attributes:
        has_attention: whether `attention` can be called: in float32.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        """Find the functions for `dtype` in the library."""
        functions = functions_of(library, _SIGNATURES, dtype)
        self._add_rms_norm = functions["add_rms_norm"]
        self._gated = functions["gated"]
        self._rotate_store = functions["rotate_store"]
        self._attend = functions["attend"]
        self._logit_blocks = functions["logit_blocks"]
        self._pick = functions["pick"]
        self._draw = functions["draw"]
        self.has_attention = dtype == torch.float32
        if self.has_attention:
            self._attention = functions_of(library, _ATTENTION, dtype)["attention"]

    def attention(
        self,
        part: AttentionPart,
        tokens: Pass,
        hidden: Tensor,
        delta: Tensor | None,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Add `delta` to `hidden` in place, and return the attention of the norm of the sum.

        One call does what `add_rms_norm`, `rotate_store`, `attend` and the products between them
        do, with the same numbers.

        Args:
            part: the weights of the layer.
            tokens: the tokens of the pass.
            hidden: [tokens, hidden].
            delta: [tokens, hidden]; None adds nothing.
            cache: keys and values, [blocks, block_size, kv_heads, head_dim] each.

        Returns:
            [tokens, hidden].
        """
        keys, values = cache
        out = torch.empty_like(hidden)
        addend = None if delta is None else delta.data_ptr()
        self._attention(
            ctypes.addressof(part), ctypes.addressof(tokens), hidden.data_ptr(), addend,
            keys.data_ptr(), values.data_ptr(), keys.shape[1], out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def add_rms_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """Add `delta` to `hidden` in place, and return the RMSNorm of the sum.

        Args:
            hidden: [tokens, hidden].
            delta: [tokens, hidden]; None adds nothing.
            weight: the norm's weight, [hidden].
            eps: added to the mean square.

        Returns:
            [tokens, hidden].
        """
        out = torch.empty_like(hidden)
        tokens, size = hidden.shape
        threads = threads_for(hidden.numel())
        addend = None if delta is None else delta.data_ptr()
        self._add_rms_norm(
            hidden.data_ptr(), addend, weight.data_ptr(), out.data_ptr(), tokens, size, eps, threads
        )
        return out

    def gated(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up.

        Args:
            gate_up: [tokens, 2 * ffn], all gate columns before all up columns.

        Returns:
            [tokens, ffn].
        """
        tokens = gate_up.shape[0]
        size = gate_up.shape[1] // 2
        out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        self._gated(gate_up.data_ptr(), out.data_ptr(), tokens, size, threads_for(gate_up.numel()))
        return out

    def rotate_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        tables: tuple[Tensor, Tensor],
        positions: Tensor,
        cache_places: Tensor,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Rotate q and k, and write k and v into the cache.

        Args:
            qkv: [tokens, kv_heads, heads per KV head + 2, head_dim]: for each KV head its q heads,
                then its k, then its v.
            norms: the weights of the q norm and of the k norm, [head_dim] each; None where the
                model has no such norms.
            eps: added to the mean square in those norms.
            tables: cosines and sines, float32 [positions, rotary_dim / 2] each; only the first
                `rotary_dim` dimensions of a head are rotated.
            positions: the position of each token in its sequence, int64 [tokens].
            cache_places: where each token's k and v go: block number x block_size + place in the
                block, int64 [tokens].
            cache: keys and values, [blocks, block_size, kv_heads, head_dim] each. Within a block
                the keys are stored transposed, so only `attend` can read them.

        Returns:
            Rotated q, [tokens, heads, head_dim].
        """
        tokens, kv_heads, rows, dim = qkv.shape
        per_kv_head = rows - 2
        cosines, sines = tables
        keys, values = cache
        q_norm = k_norm = None
        if norms is not None:
            q_norm = norms[0].data_ptr()
            k_norm = norms[1].data_ptr()

        q = torch.empty((tokens, kv_heads * per_kv_head, dim), dtype=qkv.dtype, device=qkv.device)
        self._rotate_store(
            qkv.data_ptr(), q_norm, k_norm, eps,
            cosines.data_ptr(), sines.data_ptr(), positions.data_ptr(), cache_places.data_ptr(),
            q.data_ptr(), keys.data_ptr(), values.data_ptr(),
            tokens, kv_heads, per_kv_head, dim, 2 * cosines.shape[1], keys.shape[1],
            threads_for(qkv.numel()),
        )  # fmt: skip
        return q

    def attend(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        block_tables: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """Causal attention: the queries of each sequence see the sequence's cached tokens.

        Args:
            q: the queries of the last tokens of each sequence, [tokens, heads, head_dim], sequence
                after sequence.
            cache: keys and values, [blocks, block_size, kv_heads, head_dim] each. They include
                those of the tokens in `q`.
            block_tables: the blocks of each sequence in order, int32 [sequences, blocks].
            query_starts: where each sequence begins in `q`, int32 [sequences + 1].
            lengths: how many tokens of each sequence are cached, int32 [sequences].
            window: how many tokens a token sees, itself included; None for all.
            scale: products of queries and keys are multiplied by it.

        Returns:
            The weighted values, shaped as `q`.
        """
        _, heads, dim = q.shape
        keys, values = cache
        _, block_size, kv_heads, _ = keys.shape

        out = torch.empty_like(q)
        self._attend(
            q.data_ptr(), keys.data_ptr(), values.data_ptr(),
            block_tables.data_ptr(), block_tables.stride(0),
            query_starts.data_ptr(), lengths.data_ptr(), out.data_ptr(),
            len(lengths), kv_heads, heads // kv_heads, dim, block_size, window or 0,
            scale, threads_for(64 * q.numel()),
        )  # fmt: skip
        return out

    def logit_blocks(self, logits: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Summarise each row of logits by blocks of 128 columns, in one pass.

        Args:
            logits: [batch, vocab_shard].
            scale: every logit is multiplied by it.

        Returns:
            The highest scaled logit of each block, float32 [batch, blocks]; the sum of exp(scaled
            logit - that highest) over each block, float32 [batch, blocks]; and the first column
            that has the highest scaled logit of the whole row, int64 [batch].
        """
        rows, columns = logits.shape
        blocks = -(-columns // _COLUMNS)
        highest, sums = torch.empty((2, rows, blocks), dtype=torch.float32)
        likeliest = torch.empty(rows, dtype=torch.int64)

        self._logit_blocks(
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
        self._pick(
            logits.data_ptr(), scale, highest.data_ptr(), sums.data_ptr(), tops.data_ptr(),
            targets.data_ptr(), tokens.data_ptr(), chosen.data_ptr(),
            rows, columns, threads_for(64 * rows),
        )  # fmt: skip
        return tokens, chosen

    def draw(self, logits: Tensor, scale: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token for each row, from logits of the whole vocabulary on this rank.

        Args:
            logits: [batch, vocab].
            scale: every logit is multiplied by it.
            uniform: the number that picks the token, in [0, 1), float64 [batch]; a negative number
                takes the likeliest token.

        Returns:
            The tokens, int64 [batch], and their log-probabilities, float32 [batch]: NaN where the
            logits are not finite.
        """
        rows, columns = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows, dtype=torch.float32)
        self._draw(
            logits.data_ptr(), scale, uniform.data_ptr(), tokens.data_ptr(), logprobs.data_ptr(),
            rows, columns, threads_for(logits.numel()),
        )  # fmt: skip
        return tokens, logprobs


@cache
def load(dtype: torch.dtype) -> Kernels | None:
    """The kernels for `dtype`; None where this machine cannot compile them."""
    library = load_library(SOURCE, "the engine") if dtype in SUFFIXES else None
    return None if library is None else Kernels(library, dtype)
