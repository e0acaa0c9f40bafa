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
from mrlhf.models.spec import ModelSpec


@dataclass(frozen=True)
class Attention:
    """The attention of one layer on one rank; what the model does not have is None."""

    spec: ModelSpec  # with the heads of this layer
    parallel: TensorParallel
    kv_heads: int  # of this rank
    norm: Tensor | None  # weight of the norm before attention, [hidden]
    # x -> for each KV head its q heads, each with its gate behind it, then its k, then its v, if
    # they are there
    qkv: Linear
    # of q and of k, [head_dim] each, or this rank's part of those of all heads together
    norms: tuple[Tensor, Tensor] | None
    tables: Tables
    window: int | None  # how many tokens a token sees, itself included; None for all
    proj: Linear  # the output projection, without its bias
    sinks: Tensor | None  # [heads], of this rank

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, inputs: StepInputs, store: Layer
    ) -> Tensor:
        """Add `delta` to `hidden` in place; return this rank's share of attention to its norm."""
        spec = self.spec
        qkv = self.qkv(add_norm(hidden, delta, self.norm, spec.norm_eps))
        qkv = qkv.view(len(hidden), self.kv_heads, -1, spec.head_dim)
        if spec.keys_are_values and spec.has_keys:
            qkv = torch.cat([qkv, qkv[:, :, -1:]], dim=2)
        if spec.norms_values and spec.has_keys:
            qkv[:, :, -1] = F.rms_norm(qkv[:, :, -1], (spec.head_dim,), eps=spec.norm_eps)
        gate = None
        if spec.output_gate:
            queries, keys_values = qkv.split([qkv.shape[2] - 2, 2], dim=2)
            query, gate = queries.unflatten(2, (-1, 2)).unbind(3)
            qkv = torch.cat([query, keys_values], dim=2)
        head_norms = self.norms
        if self.norms is not None and spec.qk_norm == "projection":
            self._norm_projections(qkv, self.norms)
            head_norms = None

        if spec.has_keys:
            q = rotate_store(qkv, head_norms, spec.norm_eps, self.tables, inputs, store)
        else:  # it reads those that another layer has stored
            q = rotate_queries(qkv, head_norms, spec.norm_eps, self.tables, inputs)
        context = attend(
            q, *store, inputs.mask, scale=spec.attention_scale, window=self.window,
            sinks=self.sinks, cap=spec.attention_cap,
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
            scale = torch.rsqrt(mean + self.spec.norm_eps)[:, None, None, None]
            part.copy_(part.float() * scale * weight.float().view(part.shape[1:]))
