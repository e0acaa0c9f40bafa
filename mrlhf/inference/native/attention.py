"""The attention of a layer, from the residual stream to this rank's share of the addition to it.

It knows flat tokens and blocks of the cache, and no schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.inference.native.linear import Linear
from mrlhf.inference.native.operators import (
    Layer,
    StepInputs,
    Tables,
    add_norm,
    rotate_queries,
    rotate_store,
)
from mrlhf.inference.native.tensor_parallel import TensorParallel
from mrlhf.models.attention import attend


@dataclass(frozen=True)
class Attention:
    """The attention of one layer on one rank; what the model does not have is None."""

    parallel: TensorParallel
    eps: float  # added to the mean square in every norm
    scale: float  # of the products of queries and keys
    kv_heads: int  # of this rank
    norm: Tensor | None  # weight of the norm before attention, [hidden]
    qkv: Linear  # x -> for each KV head its q heads, then its k, then its v, if `has_keys`
    head_norms: tuple[Tensor, Tensor] | None  # of each head of q and of k, [head_dim] each
    # of all q and of all k of all ranks; this rank's part of the weights
    projection_norms: tuple[Tensor, Tensor] | None
    tables: Tables
    window: int | None  # how many tokens a token sees, itself included; None for all
    proj: Linear  # the output projection, without its bias
    sinks: Tensor | None  # [heads], of this rank
    cap: float | None  # of the products, see `attend`
    has_gate: bool  # whether `qkv` gives after each q head a gate of its output
    keys_are_values: bool  # whether `qkv` gives no v, which is k before its norm
    norms_values: bool  # whether v has a norm without a weight
    has_keys: bool  # else it reads those that another layer has stored

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, inputs: StepInputs, store: Layer
    ) -> Tensor:
        """Add `delta` to `hidden` in place; return this rank's share of attention to its norm."""
        head_dim = store[0].shape[-1]
        qkv = self.qkv(add_norm(hidden, delta, self.norm, self.eps))
        qkv = qkv.view(len(hidden), self.kv_heads, -1, head_dim)
        if self.keys_are_values:
            qkv = torch.cat([qkv, qkv[:, :, -1:]], dim=2)
        if self.norms_values:
            qkv[:, :, -1] = F.rms_norm(qkv[:, :, -1], (head_dim,), eps=self.eps)
        gate = None
        if self.has_gate:
            queries, keys_values = qkv.split([qkv.shape[2] - 2, 2], dim=2)
            query, gate = queries.unflatten(2, (-1, 2)).unbind(3)
            qkv = torch.cat([query, keys_values], dim=2)
        if self.projection_norms is not None:
            self._norm_projections(qkv, self.projection_norms)

        if self.has_keys:
            q = rotate_store(qkv, self.head_norms, self.eps, self.tables, inputs, store)
        else:
            q = rotate_queries(qkv, self.head_norms, self.eps, self.tables, inputs)
        context = attend(
            q, *store, inputs.mask, scale=self.scale, window=self.window, sinks=self.sinks,
            cap=self.cap,
        )  # fmt: skip
        return self.proj(context if gate is None else context * gate.flatten(1).sigmoid())

    def _norm_projections(self, qkv: Tensor, norms: tuple[Tensor, Tensor]) -> None:
        """Normalise, in place, q over the heads of all ranks together, and k in the same way.

        `qkv` is [tokens, kv_heads, heads per KV head + 2, head_dim]; `norms` are this rank's
        weights.
        """
        q = qkv[:, :, :-2]
        k = qkv[:, :, -2:-1]
        squares = [part.float().square().sum(dim=(1, 2, 3)) for part in (q, k)]
        sums = self.parallel.sum(torch.stack(squares, dim=-1))

        for part, weight, total in zip((q, k), norms, sums.unbind(-1), strict=True):
            mean = total / (part[0].numel() * self.parallel.size)
            scale = torch.rsqrt(mean + self.eps)[:, None, None, None]
            part.copy_(part.float() * scale * weight.float().view(part.shape[1:]))
