"""Replays recorded experts in a pass over packs, and records the experts that routers choose.

A router asks for the experts of a pack's tokens in the forward pass, and again where that is
computed anew for the backward pass; the answer depends on the pack alone, so both are the same.
This file knows records and packs. It knows neither routers nor why a record is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.parallel.packs import Pack
from mrlhf.records import ExpertRecord

TokenSelector = Callable[[Tensor], Tensor]
"""Takes entries of all tokens of a pack, [tokens, ...]; returns those of a router's tokens."""


class PassRouting:
    """The experts that one pass over packs replays and records.

    `differing`, int64, counts how often a router of this rank chose another set of experts than
    `compared` has: pairs of a selected token and a mixture.
    """

    def __init__(
        self,
        device: torch.device,
        replayed: ExpertRecord | None = None,
        compared: ExpertRecord | None = None,
        kept: ExpertRecord | None = None,
    ) -> None:
        """Prepare a pass of the model on `device`.

        The experts of `replayed` replace the routers' choices, for the tokens that it has. The
        routers' own choices are compared with `compared`, and written into `kept.chosen`.
        """
        self.differing = torch.zeros((), dtype=torch.int64, device=device)
        self._replayed = replayed
        self._compared = compared
        self._kept = kept
        self._notes: list[tuple[Tensor, int, Tensor]] = []

    def of_pack(self, pack: Pack, owners: Tensor, position_ids: Tensor) -> PackRouting:
        """The routing of this rank's share of a pack.

        `owners` are the rows of the tokens, and `position_ids` their positions, int64 [tokens]; see
        `PackedSequences`.
        """
        replayed = compared = kept = None
        if self._replayed is not None:
            replayed = _TokenExperts.of(self._replayed, pack.rows, owners, position_ids)
        if self._compared is not None:
            compared = replayed
            if self._compared is not self._replayed:
                compared = _TokenExperts.of(self._compared, pack.rows, owners, position_ids)
        if self._kept is not None:
            kept = _places(self._kept, pack.rows, owners, position_ids)

        # The last token of a shared prompt is selected for several rows.
        places = pack.select.long()
        selections = torch.zeros(len(owners), dtype=torch.int64, device=owners.device)
        selections.index_add_(0, places, torch.ones_like(places))
        return PackRouting(self, replayed, compared, kept, selections)

    def note(self, places: Tensor, mixture: int, chosen: Tensor) -> None:
        """Keep choices, int64 [some, per_token], at `places` [some] of the record until `write`."""
        assert self._kept is not None
        self._notes.append((places, mixture, chosen.to(self._kept.chosen.dtype)))

    def write(self) -> None:
        """Write the choices of this rank into the record that is kept."""
        for places, mixture, chosen in self._notes:
            assert self._kept is not None
            self._kept.chosen[places.cpu(), mixture] = chosen.cpu()
        self._notes.clear()


@dataclass(frozen=True)
class PackRouting:
    """The routing of one pack in a pass; see `PassRouting`."""

    whole: PassRouting
    replayed: _TokenExperts | None  # the experts that its tokens replay, or None
    compared: _TokenExperts | None  # the experts that choices are compared with, or None
    # int64 [tokens], the place of each token in the record that is kept, -1 for none; or None.
    kept: Tensor | None
    selections: Tensor  # int64 [tokens], how often each is selected

    def note(self, mixture: int, chosen: Tensor, select: TokenSelector) -> None:
        """Compare and keep a router's own choice, int64 [some tokens, per_token].

        `mixture` is the number of the router's layer, of all mixtures in the model.
        """
        if self.compared is not None:
            recorded = select(self.compared.experts)[:, mixture].long()
            differs = recorded.sort(dim=-1).values != chosen.sort(dim=-1).values
            counts = select(self.compared.is_there * self.selections)
            self.whole.differing += (differs.any(dim=-1) * counts).sum()

        if self.kept is not None:
            places = select(self.kept)
            is_kept = places >= 0
            self.whole.note(places[is_kept], mixture, chosen[is_kept])

    def replaced(self, mixture: int, chosen: Tensor, select: TokenSelector) -> Tensor:
        """The experts that tokens go to: the replayed ones where there are any, else `chosen`."""
        if self.replayed is None:
            return chosen
        recorded = select(self.replayed.experts)[:, mixture].long()
        return torch.where(select(self.replayed.is_there)[:, None], recorded, chosen)


@dataclass(frozen=True)
class _TokenExperts:
    """The recorded experts of the tokens of a pack; where the model is."""

    experts: Tensor  # [tokens, mixtures, per_token], in the record's dtype; 0 without a record
    is_there: Tensor  # bool [tokens], the tokens of which there is a record

    @staticmethod
    def of(
        record: ExpertRecord, rows: Sequence[int], owners: Tensor, position_ids: Tensor
    ) -> _TokenExperts:
        """The experts of the tokens of the pack with these rows; see `PassRouting.of_pack`."""
        places = _places(record, rows, owners, position_ids).cpu()
        is_there = places >= 0
        experts = record.chosen.new_zeros(len(places), *record.chosen.shape[1:])
        experts[is_there] = record.chosen[places[is_there]]
        return _TokenExperts(experts.to(owners.device), is_there.to(owners.device))


def _places(
    record: ExpertRecord, rows: Sequence[int], owners: Tensor, position_ids: Tensor
) -> Tensor:
    """The place of each token of a pack in a record, int64 [tokens]; -1 where it has none."""
    index = torch.tensor(rows, dtype=torch.int64)
    # The owner of padding is one more than the last sequence.
    begins = torch.nn.functional.pad(record.begins[index], (0, 1)).to(owners.device)
    counts = torch.nn.functional.pad(record.counts[index], (0, 1)).to(owners.device)
    return torch.where(position_ids < counts[owners], begins[owners] + position_ids, -1)
