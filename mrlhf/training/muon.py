"""Muon: the matrices of hidden layers move by their orthogonalised momentum, all else by AdamW.

A matrix is orthogonalised whole, as in one process, although tensor-parallel ranks hold parts of
it. The ranks of all replicas share the work out: each gathers some of the matrices, orthogonalises
these, and hands the results back. This file knows parts of matrices and who holds the others; it
does not know layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.weights.shard import Piece, Slot

MOMENTUM = "momentum_buffer"
_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
# The update of a matrix then has the root mean square of AdamW's, and so the same learning rate.
_RMS_OF_ADAMW = 0.2


def orthogonalised(matrix: Tensor) -> Tensor:
    """Return a matrix [rows, columns] with its singular values brought near 1, in its format.

    These are five steps of the Newton-Schulz iteration, after which they are between 0.7 and 1.2
    or so, except for those that were tiny. Follows `torch.optim.Muon`, which rounds to bfloat16.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(_STEPS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


@dataclass(frozen=True)
class Holders:
    """The ranks that hold the same matrices as this one."""

    parts: dist.ProcessGroup  # those with the other parts of each, in order
    replicas: dist.ProcessGroup  # those with the same part


@dataclass(frozen=True)
class _Matrix:
    """This rank's part of a matrix."""

    piece: Piece
    main: Tensor  # the main weight, which may hold parts of other matrices too
    settings: Mapping[str, Any]  # the parameter group: `lr` and `weight_decay`

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns of the part."""
        return self.piece.shape(self.piece.start, self.piece.stop)

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return math.prod(self.shape)

    def of_gradient(self) -> Tensor:
        """Return this part of the gradient of the main weight."""
        assert self.main.grad is not None
        return Slot(self.piece, self.main.grad).load()

    def move(self, update: Tensor, parts: int) -> None:
        """Subtract an orthogonalised update, [numel], of a matrix in `parts` parts."""
        whole = list(self.shape)
        whole[self.piece.dim] *= parts
        rate = self.settings["lr"] * _RMS_OF_ADAMW * math.sqrt(max(whole))
        weight = Slot(self.piece, self.main).view(self.piece.start, self.piece.stop)
        weight.add_(update.view(self.shape).view_as(weight), alpha=-rate)


class Muon(torch.optim.AdamW):
    """Muon for some of the weights, and AdamW for the others.

    It follows `torch.optim.Muon` with Nesterov momentum and the learning rate of Moonlight (arXiv
    2502.16982), which is AdamW's. Products are in float32 on a host and in bfloat16 on a GPU.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        matrices: Sequence[tuple[Piece, Tensor]],
        holders: Holders,
        momentum: float,
    ) -> None:
        """Take over the parameter groups of an AdamW that has taken no step.

        Args:
            groups: with the settings of each.
            matrices: the parts of the matrices of hidden layers on this rank, each with the main
                weight that it lies in. They are in the same order on all holders.
            holders: the ranks with the same matrices.
            momentum: the decay of the mean of the gradients.
        """
        super().__init__(groups)
        self._holders = holders
        self._momentum = momentum
        settings = {id(main): group for group in self.param_groups for main in group["params"]}
        found = [
            _Matrix(piece, main, settings[id(main)])
            for piece, main in matrices
            if id(main) in settings
        ]
        self._matrix_mains = {id(matrix.main) for matrix in found}

        # Ranks that work at the same time get matrices of about the same size.
        found.sort(key=lambda matrix: -matrix.numel)
        self._rounds = [
            found[start : start + self._workers] for start in range(0, len(found), self._workers)
        ]

    def is_matrix(self, main: Tensor) -> bool:
        """Whether a main weight is made of matrices that are orthogonalised."""
        return id(main) in self._matrix_mains

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights; the gradients of the matrices are overwritten."""
        assert closure is None
        mains = [main for group in self.param_groups for main in group["params"]]
        with stepping(self, {id(main) for main in mains} - self._matrix_mains):
            super().step()

        for group in self.param_groups:
            for main in group["params"]:
                if id(main) in self._matrix_mains:
                    self._add_to_momentum(main)
                    main.mul_(1 - group["lr"] * group["weight_decay"])
        for matrices in self._rounds:
            self._move(matrices)

    @property
    def _workers(self) -> int:
        return self._holders.parts.size() * self._holders.replicas.size()

    def _add_to_momentum(self, main: Tensor) -> None:
        """Add the gradient to the momentum, and put what is orthogonalised into its place."""
        state = self.state[main]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(main)
        assert main.grad is not None
        state[MOMENTUM].lerp_(main.grad, 1 - self._momentum)
        main.grad.lerp_(state[MOMENTUM], self._momentum)

    def _move(self, matrices: Sequence[_Matrix]) -> None:
        """Orthogonalise at most one matrix on each holder, and move all of them."""
        parts, replicas = self._holders.parts, self._holders.replicas
        main = matrices[0].main
        dtype = torch.bfloat16 if main.is_cuda else torch.float32  # of products
        own = torch.empty(0, dtype=dtype, device=main.device)
        first = replicas.rank() * parts.size()
        if first < len(matrices):
            mine = matrices[first : first + parts.size()]
            own = self._orthogonalised_parts(mine, dtype)

        for replica in range(replicas.size()):
            moved = matrices[replica * parts.size() : (replica + 1) * parts.size()]
            sizes = [matrix.numel for matrix in moved]
            updates = own if replica == replicas.rank() else own.new_empty(sum(sizes))
            if moved and replicas.size() > 1:
                dist.broadcast(updates, group=replicas, group_src=replica)
            for matrix, update in zip(moved, updates.split(sizes), strict=True):
                matrix.move(update, parts.size())

    def _orthogonalised_parts(self, matrices: Sequence[_Matrix], dtype: torch.dtype) -> Tensor:
        """Orthogonalise at most one matrix a rank, and return this rank's parts of all."""
        group = self._holders.parts
        updates = [matrix.of_gradient().flatten() for matrix in matrices]
        flat = torch.cat(updates).to(dtype)

        sent = [matrix.numel for matrix in matrices]
        sent += [0] * (group.size() - len(sent))
        received = [sent[group.rank()]] * group.size()
        gathered = _all_to_all(flat, sent, received, group)
        if group.rank() < len(matrices):
            own = matrices[group.rank()]
            dim = own.piece.dim
            shares = gathered.view(group.size(), *own.shape)
            whole = orthogonalised(torch.cat(list(shares), dim))
            gathered = torch.cat([part.flatten() for part in whole.chunk(group.size(), dim)])
        return _all_to_all(gathered, received, sent, group)


@contextmanager
def stepping(inner: torch.optim.Optimizer, chosen: Collection[int]) -> Iterator[None]:
    """Let an optimizer know only some of its main weights, by their ids, as long as this lasts."""
    whole = [group["params"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["params"] = [main for main in group["params"] if id(main) in chosen]
    try:
        yield
    finally:
        for group, members in zip(inner.param_groups, whole, strict=True):
            group["params"] = members


def _all_to_all(
    flat: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send the n-th `sent` numbers to the n-th rank; returns what came, in order of the ranks."""
    if group.size() == 1:
        return flat
    result = flat.new_empty(sum(received))
    dist.all_to_all_single(result, flat, received, sent, group=group)
    return result
