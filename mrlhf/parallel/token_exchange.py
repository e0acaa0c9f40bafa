"""Brings a row of numbers for each token from the ranks that computed them to those that use them.

Two models cut a batch in different ways, so the hidden states of one are on other ranks than the
tokens of the other. A token is known by its place in the flat tables of the batch. Who sends what
follows from the places of all ranks, and a row that is on its rank already does not move. This file
does not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.collectives import all_gather_ragged, connect, exchange

MESSAGE_BYTES = 32 << 20  # of one message; every rank sends one to each of its peers at a time


@dataclass(frozen=True)
class TokenRoutes:
    """The rows that one rank sends and receives, each int64, in the order in which they travel."""

    kept: tuple[Tensor, Tensor]  # rows that need not travel: among those held, among those wanted
    sends: dict[int, Tensor]  # by peer, rows among those held
    receives: dict[int, Tensor]  # by peer, rows among those wanted


def route_tokens(rank: int, held: Sequence[Tensor], wanted: Sequence[Tensor]) -> TokenRoutes:
    """The routes of `rank`, from the places of the tokens that each rank has and wants.

    A place may be on several ranks, which then take turns among those that want it. Every wanted
    place is held by some rank.
    """
    size = 1 + max((int(places.max()) for places in (*held, *wanted) if len(places)), default=0)
    copies = torch.zeros(size, dtype=torch.int64)
    for places in held:
        copies[places] += 1
    holders = torch.full((max(1, int(copies.max())), size), -1, dtype=torch.int64)
    copies.zero_()
    for holder, places in enumerate(held):
        holders[copies[places], places] = holder
        copies[places] += 1

    def sources(receiver: int) -> Tensor:
        """The rank from which the receiver gets each row that it wants."""
        places = wanted[receiver]
        turn = receiver % copies[places]  # a place that no rank holds is a division by 0
        own = (holders[:, places] == receiver).any(dim=0)
        return torch.where(own, receiver, holders[turn, places])

    rows = torch.full((size,), -1, dtype=torch.int64)
    rows[held[rank]] = torch.arange(len(held[rank]))
    mine = sources(rank)
    own = (mine == rank).nonzero()[:, 0]
    sends = {
        receiver: rows[places[sources(receiver) == rank]]
        for receiver, places in enumerate(wanted)
        if receiver != rank
    }
    senders = [sender for sender in mine.unique().tolist() if sender != rank]
    return TokenRoutes(
        kept=(rows[wanted[rank][own]], own),
        sends={peer: of_peer for peer, of_peer in sends.items() if len(of_peer)},
        receives={sender: (mine == sender).nonzero()[:, 0] for sender in senders},
    )


def bring_tokens(
    held: Tensor,
    held_places: Tensor,
    wanted_places: Tensor,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """The rows [wanted, width] of `wanted_places`, on the host; every rank of the group calls it.

    Args:
        held: [held, width], this rank's rows, on the host; the width and dtype of all ranks.
        held_places: int64 [held], each different.
        wanted_places: int64 [wanted].
        group: all ranks of the job.
        device: through which messages travel.
    """
    routes = route_tokens(
        group.rank(),
        all_gather_ragged(held_places, group),
        all_gather_ragged(wanted_places, group),
    )
    connect(group, device)
    result = held.new_empty((len(wanted_places), held.shape[1]))
    from_rows, to_rows = routes.kept
    result[to_rows] = held[from_rows]

    height = max(1, MESSAGE_BYTES // max(1, held.shape[1] * held.element_size()))
    longest = max(map(len, (*routes.sends.values(), *routes.receives.values())), default=0)
    for top in range(0, longest, height):
        part = slice(top, top + height)
        sends = [(peer, held[rows[part]].to(device)) for peer, rows in routes.sends.items()]
        receives = {
            peer: torch.empty((len(rows[part]), held.shape[1]), dtype=held.dtype, device=device)
            for peer, rows in routes.receives.items()
        }
        exchange(sends, list(receives.items()), group)
        for peer, rows in receives.items():
            result[routes.receives[peer][part]] = rows.cpu()
    return result
