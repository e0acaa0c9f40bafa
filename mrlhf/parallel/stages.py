"""Shares out the layers of a model over the stages of a pipeline.

A rank of a pipeline holds one virtual stage, or several with an interleaved schedule. This file is
arithmetic on ints. It knows no ranks outside the pipeline and no schedule.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stages:
    """The virtual stages of a pipeline.

    They are numbered from 0 in the order of the model. Virtual stage v of pipeline rank p has the
    number v * pp + p, as in megatron-core.
    """

    pp: int = 1  # ranks of the pipeline
    vpp: int = 1  # virtual stages of each rank
    # Layers of each virtual stage, in the order of the model; None: equal numbers, or one less at
    # both ends.
    pp_layers: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """The number of virtual stages over all ranks."""
        return self.pp * self.vpp

    def numbers_on(self, rank: int) -> range:
        """The numbers of the virtual stages of pipeline rank `rank`."""
        return range(rank, self.count, self.pp)

    def split(self, num_layers: int) -> tuple[int, ...] | None:
        """The layers of each virtual stage of a model; None if the model does not fit.

        If the layers alone do not divide, embedding and loss count as one layer each, so that the
        first and the last stage have one layer less than the others.
        """
        if self.pp_layers is not None:
            fits = len(self.pp_layers) == self.count and sum(self.pp_layers) == num_layers
            return self.pp_layers if fits else None
        if num_layers % self.count == 0:
            return (num_layers // self.count,) * self.count

        each, rest = divmod(num_layers + 2, self.count)
        if rest or each < 2:
            return None
        return (each - 1, *[each] * (self.count - 2), each - 1)

    def layers(self, number: int, num_layers: int) -> range:
        """The numbers of the layers of virtual stage `number`; the model fits."""
        counts = self.split(num_layers)
        assert counts is not None, f"{num_layers} layers do not fit {self}"
        begin = sum(counts[:number])
        return range(begin, begin + counts[number])
