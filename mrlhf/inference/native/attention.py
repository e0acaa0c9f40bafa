"""The attention of a layer, from the residual stream to this rank's share of what is added to it.

`HostAttention` is one compiled call, for float32 on a host. `StepwiseAttention` calls the operators
and products of the layer one by one, on every device. They give the same numbers. This file knows
flat tokens and blocks of the cache, and no schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.inference.native.kernels import AttentionPart
from mrlhf.inference.native.linear import HostLinear, Linear
from mrlhf.inference.native.operators import (
    HostOperators,
    Layer,
    Operators,
    StepInputs,
    Tables,
    enter,
)
from mrlhf.inference.native.tensor_parallel import TensorParallel

Attention = Callable[[Tensor, Tensor | None, StepInputs, Layer], Tensor]
"""Adds the second tensor, if there is one, to the first in place, and returns the attention of the
norm of the sum: this rank's share of it, [tokens, hidden] all. Keys and values go to the layer's
cache."""


@dataclass(frozen=True)
class AttentionWeights:
    """The attention of one layer on one rank.

    Attributes:
        kv_heads: KV heads of this rank.
        heads_per_kv_head: query heads of each of them.
        head_dim: numbers of a head.
        norm: of what goes in, [hidden], where the model has one.
        qkv: x -> for each KV head its q heads, then its k, then its v.
        head_norms: of each head of q and of k, [head_dim] each, where the model has them.
        projection_norms: of the q of all heads of all ranks together, and of their k; this rank's
            part of the weights, where the model has them.
        tables: by what the layer rotates.
        window: how many tokens a token sees, itself included; None for all.
        proj: the product behind attention, without its bias.
    """

    kv_heads: int
    heads_per_kv_head: int
    head_dim: int
    norm: Tensor | None
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    projection_norms: tuple[Tensor, Tensor] | None
    tables: Tables
    window: int | None
    proj: Linear


class StepwiseAttention:
    """The attention of one layer, step by step."""

    def __init__(
        self,
        weights: AttentionWeights,
        operators: Operators,
        parallel: TensorParallel,
        eps: float,
    ) -> None:
        """Keep the parts; `eps` is added to the mean square in `projection_norms`."""
        self._weights = weights
        self._operators = operators
        self._parallel = parallel
        self._eps = eps

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, inputs: StepInputs, store: Layer
    ) -> Tensor:
        """This rank's share, as `Attention` says."""
        own = self._weights
        operators = self._operators
        shape = (len(hidden), own.kv_heads, own.heads_per_kv_head + 2, own.head_dim)

        qkv = own.qkv(enter(operators, hidden, delta, own.norm)).view(shape)
        if own.projection_norms is not None:
            self._norm_projections(qkv, own.projection_norms)
        q = operators.rotate_store(qkv, own.head_norms, own.tables, inputs, store)
        return own.proj(operators.attend(q, store, inputs, own.window).flatten(1))

    def _norm_projections(self, qkv: Tensor, norms: tuple[Tensor, Tensor]) -> None:
        """Normalise the q of all heads of all ranks together, and their k, in place.

        Args:
            qkv: [tokens, kv_heads, heads per KV head + 2, head_dim].
            norms: this rank's part of the weights.
        """
        q = qkv[:, :, :-2]
        k = qkv[:, :, -2:-1]
        squares = [part.float().square().sum(dim=(1, 2, 3)) for part in (q, k)]
        sums = self._parallel.sum(torch.stack(squares, dim=-1))

        for part, weight, total in zip((q, k), norms, sums.unbind(-1), strict=True):
            mean = total / (part[0].numel() * self._parallel.size)
            scale = torch.rsqrt(mean + self._eps)[:, None, None, None]
            part.copy_(part.float() * scale * weight.float().view(part.shape[1:]))


class HostAttention:
    """The attention of one layer in one compiled call, in float32.

    Between two calls Python and torch take the longer, the more of them the weights push out of the
    core's cache.
    """

    def __init__(
        self, weights: AttentionWeights, qkv: HostLinear, proj: HostLinear, operators: HostOperators
    ) -> None:
        """Write down where everything is.

        Args:
            weights: of the layer; without `projection_norms`, for which ranks exchange numbers.
            qkv: that of `weights`.
            proj: that of `weights`.
            operators: the model's constants and kernels.
        """
        assert weights.projection_norms is None
        self._kernels = operators.kernels
        self._weights = weights  # the memory that is pointed at lives as long
        q_norm = k_norm = None
        if weights.head_norms is not None:
            q_norm = weights.head_norms[0].data_ptr()
            k_norm = weights.head_norms[1].data_ptr()

        cosines, sines = weights.tables
        self._part = AttentionPart(
            norm=None if weights.norm is None else weights.norm.data_ptr(),
            qkv=qkv.product,
            q_norm=q_norm,
            k_norm=k_norm,
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            proj=proj.product,
            kv_heads=weights.kv_heads,
            heads_per_kv_head=weights.heads_per_kv_head,
            head_dim=weights.head_dim,
            rotary_dim=2 * cosines.shape[1],
            window=weights.window or 0,
            eps=operators.eps,
            scale=operators.scale,
        )

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, inputs: StepInputs, store: Layer
    ) -> Tensor:
        """This rank's share, as `Attention` says."""
        return self._kernels.attention(self._part, inputs.on_host, hidden, delta, store)


def make_attention(
    weights: AttentionWeights, operators: Operators, parallel: TensorParallel, eps: float
) -> Attention:
    """The fastest way that this machine has to compute the attention of a layer.

    Args:
        weights: of the layer.
        operators: the steps of a layer besides its matrix products.
        parallel: the ranks of the replica.
        eps: added to the mean square in every norm.
    """
    qkv = weights.qkv
    proj = weights.proj
    on_host = isinstance(operators, HostOperators) and operators.kernels.has_attention
    if not on_host or weights.projection_norms is not None:
        return StepwiseAttention(weights, operators, parallel, eps)

    assert isinstance(operators, HostOperators)
    if isinstance(qkv, HostLinear) and isinstance(proj, HostLinear):
        return HostAttention(weights, qkv, proj, operators)
    return StepwiseAttention(weights, operators, parallel, eps)
