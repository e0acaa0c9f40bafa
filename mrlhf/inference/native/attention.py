"""The attention of a layer, from the residual stream to this rank's share of the addition to it.

It knows flat tokens and blocks of the cache, and no schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.inference.native.linear import Linear
from mrlhf.inference.native.operators import Layer, Operators, StepInputs, Tables, add_and_normalise
from mrlhf.inference.native.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class AttentionWeights:
    """The attention of one layer on one rank; what the model does not have is None."""

    kv_heads: int  # of this rank
    heads_per_kv_head: int  # query heads
    head_dim: int
    norm: Tensor | None  # weight of the norm before attention, [hidden]
    qkv: Linear  # x -> for each KV head its q heads, then its k, then its v
    head_norms: tuple[Tensor, Tensor] | None  # of each head of q and of k, [head_dim] each
    # of all q and of all k of all ranks; this rank's part of the weights
    projection_norms: tuple[Tensor, Tensor] | None
    tables: Tables
    window: int | None  # how many tokens a token sees, itself included; None for all
    proj: Linear  # the output projection, without its bias


class Attention:
    """The attention of one layer; `eps` is added to the mean square in `projection_norms`."""

    def __init__(
        self,
        weights: AttentionWeights,
        operators: Operators,
        parallel: TensorParallel,
        eps: float,
    ) -> None:
        self._weights = weights
        self._operators = operators
        self._parallel = parallel
        self._eps = eps

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, inputs: StepInputs, store: Layer
    ) -> Tensor:
        """Add `delta` to `hidden` in place, and attend to the norm of the sum; the cache is filled.

        Returns:
            This rank's share, [tokens, hidden].
        """
        own = self._weights
        operators = self._operators
        shape = (len(hidden), own.kv_heads, own.heads_per_kv_head + 2, own.head_dim)

        qkv = own.qkv(add_and_normalise(operators, hidden, delta, own.norm)).view(shape)
        if own.projection_norms is not None:
            self._norm_projections(qkv, own.projection_norms)
        q = operators.rotate_store(qkv, own.head_norms, own.tables, inputs, store)
        return own.proj(operators.attend(q, store, inputs, own.window).flatten(1))

    def _norm_projections(self, qkv: Tensor, norms: tuple[Tensor, Tensor]) -> None:
        """Normalise, in place, q over the heads of all ranks together, and k in the same way.

        `qkv` is [tokens, kv_heads, heads per KV head + 2, head_dim]; `norms` are this rank's
        weights.
        """
        q = qkv[:, :, :-2]
        k = qkv[:, :, -2:-1]
        squares = [part.float().square().sum(dim=(1, 2, 3)) for part in (q, k)]
        sums = self._parallel.sum(torch.stack(squares, dim=-1))

        for part, weight, total in zip((q, k), norms, sums.unbind(-1), strict=True):
            mean = total / (part[0].numel() * self._parallel.size)
            scale = torch.rsqrt(mean + self._eps)[:, None, None, None]
            part.copy_(part.float() * scale * weight.float().view(part.shape[1:]))
