"""What a pass over packs replays of the experts of tokens, and what it notes of routers' choices.

A router asks for the experts of a pack's tokens in the forward pass, and again where that is
computed anew for the backward pass; the answer depends on the pack alone, so both are the same.
This file knows records and packs. It knows neither routers nor why a record is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.batch import ExpertRecord
from mrlhf.parallel.packs import Pack

Part = Callable[[Tensor], Tensor]
"""Takes entries of all tokens of a pack, [tokens, ...]; returns those of a router's tokens."""


class PassRouting:
    """What one pass over packs replays and notes.

    Attributes:
        differing: int64, how often a router of this rank chose another set of experts than
            `compared` says: pairs of a selected token and a mixture.
    """

    def __init__(
        self,
        device: torch.device,
        replayed: ExpertRecord | None = None,
        compared: ExpertRecord | None = None,
        kept: ExpertRecord | None = None,
    ) -> None:
        """Note nothing yet.

        Args:
            device: where the model is.
            replayed: takes the place of what routers choose, for the tokens that it has.
            compared: what the routers' own choices are compared with.
            kept: whose `chosen` gets the routers' own choices, for the tokens that it has.
        """
        self.differing = torch.zeros((), dtype=torch.int64, device=device)
        self._replayed = replayed
        self._compared = compared
        self._kept = kept
        self._notes: list[tuple[Tensor, int, Tensor]] = []

    def of_pack(self, pack: Pack, owners: Tensor, position_ids: Tensor) -> PackRouting:
        """The part of a pack.

        Args:
            pack: what this rank holds of it.
            owners: int64 [tokens], which of the pack's sequences each token belongs to; as many as
                there are for padding.
            position_ids: int64 [tokens], from 0 in each sequence.
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

        is_selected = torch.zeros(len(owners), dtype=torch.bool, device=owners.device)
        is_selected[pack.select.long()] = True
        return PackRouting(self, replayed, compared, kept, is_selected)

    def note(self, places: Tensor, mixture: int, chosen: Tensor) -> None:
        """Keep choices until `write`.

        Args:
            places: int64 [some], where they go in the record that is kept.
            mixture: the number of the mixture.
            chosen: int64 [some, per_token].
        """
        assert self._kept is not None
        self._notes.append((places, mixture, chosen.to(self._kept.chosen.dtype)))

    def write(self) -> None:
        """Write what this rank has noted into the record that is kept."""
        for places, mixture, chosen in self._notes:
            assert self._kept is not None
            self._kept.chosen[places.cpu(), mixture] = chosen.cpu()
        self._notes.clear()


@dataclass(frozen=True)
class PackRouting:
    """The part of one pack in a pass; see `PassRouting`.

    Attributes:
        whole: the pass.
        replayed: what its tokens replay, or None.
        compared: what choices are compared with, or None.
        kept: int64 [tokens], where the choice of each token is kept, -1 for nowhere; or None.
        is_selected: bool [tokens].
    """

    whole: PassRouting
    replayed: _TokenExperts | None
    compared: _TokenExperts | None
    kept: Tensor | None
    is_selected: Tensor

    def note(self, mixture: int, chosen: Tensor, part: Part) -> None:
        """Note what a router has chosen by itself.

        Args:
            mixture: the number of the mixture, of all in the model.
            chosen: int64 [some tokens, per_token].
            part: gives the entries of these tokens.
        """
        if self.compared is not None:
            recorded = part(self.compared.experts)[:, mixture].long()
            differs = recorded.sort(dim=-1).values != chosen.sort(dim=-1).values
            counts = part(self.compared.is_there & self.is_selected)
            self.whole.differing += (differs.any(dim=-1) & counts).sum()

        if self.kept is not None:
            places = part(self.kept)
            is_kept = places >= 0
            self.whole.note(places[is_kept], mixture, chosen[is_kept])

    def replaced(self, mixture: int, chosen: Tensor, part: Part) -> Tensor:
        """The experts that tokens go to: the replayed ones where there are any, else `chosen`.

        Arguments as for `note`.
        """
        if self.replayed is None:
            return chosen
        recorded = part(self.replayed.experts)[:, mixture].long()
        return torch.where(part(self.replayed.is_there)[:, None], recorded, chosen)


@dataclass(frozen=True)
class _TokenExperts:
    """What a record says of the tokens of a pack; where the model is.

    Attributes:
        experts: [tokens, mixtures, per_token], in the record's dtype; 0 where there is no record.
        is_there: bool [tokens], the tokens of which there is a record.
    """

    experts: Tensor
    is_there: Tensor

    @staticmethod
    def of(
        record: ExpertRecord, rows: Sequence[int], owners: Tensor, position_ids: Tensor
    ) -> _TokenExperts:
        """Those of the tokens of the pack with these rows; see `PassRouting.of_pack`."""
        places = _places(record, rows, owners, position_ids).cpu()
        is_there = places >= 0
        experts = record.chosen.new_zeros(len(places), *record.chosen.shape[1:])
        experts[is_there] = record.chosen[places[is_there]]
        return _TokenExperts(experts.to(owners.device), is_there.to(owners.device))


def _places(
    record: ExpertRecord, rows: Sequence[int], owners: Tensor, position_ids: Tensor
) -> Tensor:
    """Where each token of a pack stands in a record, int64 [tokens]; -1 where it has none."""
    index = torch.tensor(rows, dtype=torch.int64)
    # The owner of padding is one more than the last sequence.
    begins = torch.nn.functional.pad(record.begins[index], (0, 1)).to(owners.device)
    counts = torch.nn.functional.pad(record.counts[index], (0, 1)).to(owners.device)
    return torch.where(position_ids < counts[owners], begins[owners] + position_ids, -1)
