"""The routers of one model while it is trained: their losses, and how evenly they load experts.

It knows routers and mini-batches. It does not know the model's own loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.config.sections import RouterSection
from mrlhf.models.router import Router, RouterLosses
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.packs import Pack


@dataclass(frozen=True)
class ExpertLoad:
    """The evenness of the experts' loads in a mini-batch; equal on every rank."""

    largest: float  # tokens of an expert over the mean of its layer; the largest of all layers
    # Of the distribution of a layer's tokens, over that of an even one; the smallest of all layers.
    entropy: float


class ExpertRouting:
    """All routers of this rank; every rank of the model calls each method together."""

    def __init__(
        self,
        chunks: Iterable[torch.nn.Module],
        groups: RoleGroups,
        section: RouterSection,
        device: torch.device,
    ) -> None:
        self._groups = groups
        self._section = section
        self._device = device
        self._routers: list[Router] = []
        for chunk in chunks:
            self._routers += [module for module in chunk.modules() if isinstance(module, Router)]

    def begin(self, packs: Sequence[Pack]) -> None:
        """Prepare the routers for a mini-batch, with these packs of this rank."""
        losses = None
        section = self._section
        if section.router_balance_coef or section.router_z_coef:
            rows = torch.tensor([sum(len(pack.rows) for pack in packs)], device=self._device)
            dist.all_reduce(rows, group=self._groups.dp)
            # The reduction of gradients divides by the number of replicas.
            replicas = self._groups.layout.dp * self._groups.layout.cp
            share = replicas / int(rows)
            losses = RouterLosses(section.router_balance_coef, section.router_z_coef, share)

        for router in self._routers:
            router.losses = losses
            router.load.zero_()

    def load(self) -> ExpertLoad:
        """Return the experts' load since the last `begin`."""
        worst = torch.full((2,), -math.inf, dtype=torch.float64, device=self._device)
        if self._routers:
            loads = torch.stack([router.load for router in self._routers])
            # Without sequence parallelism each tensor-parallel rank has counted all tokens, which
            # changes no ratio.
            dist.all_reduce(loads, group=self._groups.collection.tp_dp_cp)
            worst = torch.stack([_largest(loads), -_entropies(loads).min()])

        # Every pipeline stage has layers of its own.
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=self._groups.pp)
        largest, entropy = worst.tolist()
        return ExpertLoad(largest, -entropy)


def _largest(loads: Tensor) -> Tensor:
    """Return the largest load over the mean of its layer, of int64 loads [layers, experts]."""
    shares = loads.double()
    return (shares / shares.mean(dim=1, keepdim=True)).max()


def _entropies(loads: Tensor) -> Tensor:
    """Return the entropy of each layer's loads over the largest possible one, [layers]."""
    shares = loads.double()
    shares = shares / shares.sum(dim=1, keepdim=True)
    return torch.special.entr(shares).sum(dim=1) / math.log(loads.shape[1])
