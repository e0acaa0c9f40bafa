"""Parts of flat tensors, and what an engine has recorded of each token, kept in such tensors.

It knows neither the engine that records nor the passes that replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BITS = 32  # of a word


class Parts(NamedTuple):
    """Parts of a flat tensor, one part after the other."""

    begins: Tensor  # int64 [parts], where each part begins
    counts: Tensor  # int64 [parts], how many numbers each part has

    @property
    def places(self) -> Tensor:
        """The indices of the numbers of all parts, int64."""
        shifts = self.begins - (self.counts.cumsum(0) - self.counts)
        places = np.repeat(shifts.numpy(), self.counts.numpy())
        places += np.arange(len(places))
        return torch.from_numpy(places)

    def of(self, flat: Tensor) -> Tensor:
        """A copy of the numbers of all parts."""
        # NumPy repeats numbers and takes slices several times as fast as torch does.
        numbers = flat.numpy()
        ends = (self.begins + self.counts).tolist()
        slices = [numbers[begin:end] for begin, end in zip(self.begins.tolist(), ends, strict=True)]
        return torch.from_numpy(np.concatenate([numbers[:0], *slices]))

    def put(self, flat: Tensor, numbers: Tensor) -> None:
        """Write `numbers` [..., numbers of all parts] into the parts of `flat` [..., size]."""
        target = flat.numpy()
        source = numbers.numpy()
        done = 0
        for begin, count in zip(self.begins.tolist(), self.counts.tolist(), strict=True):
            target[..., begin : begin + count] = source[..., done : done + count]
            done += count

    @staticmethod
    def join(several: list[Parts]) -> Parts:
        """All parts of `several` (at least one), one after the other."""
        return Parts(*(torch.cat(column) for column in zip(*several, strict=True)))


@dataclass(frozen=True)
class ExpertRecord:
    """The experts that tokens were sent to, in every mixture of a model.

    Only the first tokens of a sequence have a record. The last token of a response never has one:
    no engine computes it, and nothing depends on its experts.
    """

    chosen: Tensor  # uint8 or int16 [positions, mixtures, per_token], the numbers of the experts
    begins: Tensor  # int64 [rows], where the positions of each sequence begin
    counts: Tensor  # int64 [rows], tokens of each sequence that have a record

    def of_rows(self, rows: Sequence[int] | range) -> ExpertRecord:
        """The records of the sequences `rows`, in that order, in the same memory."""
        index = torch.tensor(rows, dtype=torch.int64)
        return ExpertRecord(self.chosen, self.begins[index], self.counts[index])

    @staticmethod
    def join(parts: Sequence[ExpertRecord]) -> ExpertRecord:
        """The records of all parts, one part after the other, with nothing between."""
        chosen = [Parts(part.begins, part.counts).of(part.chosen) for part in parts]
        counts = torch.cat([part.counts for part in parts])
        return ExpertRecord(torch.cat(chosen), counts.cumsum(0) - counts, counts)


@dataclass(frozen=True)
class SamplingMasks:
    """The tokens that could be drawn at each place of some rows, where top-k or top-p cuts others.

    A place has the ids of these tokens, ascending, in a word each; or where that is no longer, a
    bit for each token of the vocabulary. If all could be drawn, there are no such words.

    Behind them a place may have the head of the distribution that its token was drawn from: the ids
    of the `head` likeliest tokens, and their log-probabilities, in the bits of float32.

    They are those of the policy that drew, as in https://arxiv.org/abs/2512.02556, section 3.1. A
    place at which it drew nothing has no words.
    """

    words: Tensor  # int32 [words]
    begins: Tensor  # int64 [rows], where the words of each row begin
    counts: Tensor  # int32 [rows, places], words of each place
    head: int = 0  # tokens of a head; 0: there are none

    def of_rows(self, rows: Sequence[int] | slice | Tensor) -> SamplingMasks:
        """Those of some rows, in that order, in the same memory."""
        if not isinstance(rows, (slice, Tensor)):
            rows = torch.tensor(rows, dtype=torch.int64)
        return replace(self, begins=self.begins[rows], counts=self.counts[rows])

    @staticmethod
    def none(shape: tuple[int, int]) -> SamplingMasks:
        """Rows and places at which all tokens could be drawn."""
        begins = torch.zeros(shape[0], dtype=torch.int64)
        return SamplingMasks(begins[:0].int(), begins, torch.zeros(shape, dtype=torch.int32))

    def by_place(self) -> SamplingMasks:
        """The same with a row for each place, row after row."""
        counts = self.counts.long()
        begins = self.begins[:, None] + counts.cumsum(dim=1) - counts
        return replace(self, begins=begins.flatten(), counts=self.counts.reshape(-1, 1))

    @staticmethod
    def join(parts: Sequence[SamplingMasks], counts: Tensor) -> SamplingMasks:
        """Those of all parts with nothing between; `counts` are theirs, as wide as all want."""
        words = [Parts(part.begins, part.counts.long().sum(dim=1)).of(part.words) for part in parts]
        in_rows = counts.long().sum(dim=1)
        head = max(part.head for part in parts)
        return SamplingMasks(torch.cat(words), in_rows.cumsum(0) - in_rows, counts, head)

    @property
    def cut_any(self) -> bool:
        """Whether there is a place at which not all tokens could be drawn."""
        return bool((self.counts > 2 * self.head).any())

    def heads(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The ids, int64 [rows, head], and log-probabilities, float32, of the likeliest tokens.

        Each row has one place; the log-probabilities of one without words are -inf.
        """
        counts = self.counts[:, 0].long()
        known = counts > 0
        ends = (self.begins + counts)[known]
        words = torch.zeros(len(counts), 2 * self.head, dtype=torch.int32)
        size = torch.full_like(ends, 2 * self.head)
        words[known] = Parts(ends - size, size).of(self.words).view(-1, 2 * self.head)
        ids, bits = words.to(device).split(self.head, dim=1)
        logprobs = bits.contiguous().view(torch.float32)
        return ids.long(), logprobs.masked_fill(~known.to(device)[:, None], -torch.inf)

    def excluded(self, columns: range, vocab_size: int, device: torch.device) -> Tensor:
        """Which of the tokens `columns` could not be drawn; bool [rows, columns] on the device.

        Each row has one place.
        """
        counts = (self.counts[:, 0].long() - 2 * self.head).clamp(min=0)
        whole = bit_words(vocab_size)
        excluded = (counts > 0).to(device)[:, None].repeat(1, len(columns))

        listed = ((counts > 0) & (counts < whole)).nonzero()[:, 0]
        ids = Parts(self.begins[listed], counts[listed]).of(self.words).long() - columns.start
        owners = listed.repeat_interleave(counts[listed])
        is_here = (ids >= 0) & (ids < len(columns))
        excluded[owners[is_here].to(device), ids[is_here].to(device)] = False

        rows = (counts == whole).nonzero()[:, 0]
        words = Parts(self.begins[rows], counts[rows]).of(self.words).view(-1, whole)
        octets = words.view(torch.uint8)[:, columns.start // 8 : -(-columns.stop // 8)].to(device)
        bits = octets[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1
        first = columns.start % 8
        excluded[rows.to(device)] = bits.flatten(1)[:, first : first + len(columns)] == 0
        return excluded


def bit_words(vocab_size: int) -> int:
    """The words that hold a bit for each token."""
    return -(-vocab_size // BITS)


def as_bits(kept: Tensor) -> Tensor:
    """A bit for each entry of `kept`, bool [rows, vocab], in uint8 [rows, 4 x words]."""
    missing = bit_words(kept.shape[1]) * BITS - kept.shape[1]
    octets = torch.nn.functional.pad(kept, (0, missing)).to(torch.uint8).unflatten(1, (-1, 8))
    places = torch.arange(8, dtype=torch.uint8, device=kept.device)
    return (octets << places).sum(dim=-1, dtype=torch.uint8)


def head_octets(ids: Tensor, logprobs: Tensor) -> Tensor:
    """The words of each row's head, uint8 [rows, 8 x head], from its two parts [rows, head]."""
    return torch.cat([ids.int(), logprobs.view(torch.int32)], dim=1).view(torch.uint8)


def as_words(octets: NDArray[np.uint8], head: int = 0) -> list[NDArray[np.int32]]:
    """The words by which `SamplingMasks` keeps each row of a record.

    A record has the result of `as_bits` if tokens are cut off, then that of `head_octets` if heads
    of `head` tokens are recorded.
    """
    record = np.ascontiguousarray(octets).view(np.int32)
    words, heads = np.split(record, [record.shape[1] - 2 * head], axis=1)
    masks = _mask_words(words)
    return [np.concatenate(pair) for pair in zip(masks, heads, strict=True)] if head else masks


def _mask_words(words: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """The words of each row's mask, from its bits."""
    # Few words of a row have a bit, so only these are taken apart.
    rows, columns = np.nonzero(words)
    of_words = np.unpackbits(words[rows, columns, None].view(np.uint8), axis=1, bitorder="little")
    places, offsets = np.nonzero(of_words)
    ids = (columns[places] * BITS + offsets).astype(np.int32)
    ends = np.bincount(rows[places], minlength=len(words)).cumsum()
    listed = np.split(ids, ends)[: len(words)]
    return [ids if len(ids) < len(own) else own for ids, own in zip(listed, words, strict=True)]
