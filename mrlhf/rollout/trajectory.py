"""One response as a replica hands it to the others: its tokens, and who drew which of them.

It knows neither prompts nor engines.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from numpy.typing import NDArray

from mrlhf.batch import NO_VERSION, Episode
from mrlhf.inference.base import Sample


class Run(NamedTuple):
    """Tokens one after the other that have one origin."""

    length: int
    version: int  # of the policy that drew them; `NO_VERSION` if an environment wrote them


def turns_ended_by(version: int, runs: Sequence[Run], ends: Sequence[int]) -> int:
    """How many of the turns, which end after so many tokens, have their last token of a version."""
    places = list(accumulate(run.length for run in runs))
    return sum(runs[bisect_left(places, end)].version == version for end in ends)


@dataclass(frozen=True)
class Trajectory:
    """A response of one turn, or of several with what an environment said between them."""

    row: int  # its place in the batch
    token_ids: array[int]  # int32, all tokens after the prompt
    logprobs: array[float]  # float32, of each token; 0 where nobody drew it
    runs: tuple[Run, ...]  # their lengths add up to the number of tokens
    ended: bool = False  # otherwise it goes on with later weights
    stopped: bool = False  # whether it ended by itself; otherwise the length limit ended it
    # The experts of the first `recorded` tokens of prompt and response; as in `Sample`.
    recorded: int = 0
    experts: NDArray[Any] | None = field(default=None, compare=False, repr=False)
    episode: Episode | None = None  # None without an environment

    @property
    def has_failed(self) -> bool:
        """Whether it is an episode that could not go on."""
        return self.episode is not None and bool(self.episode.failure)


@dataclass
class GrowingTrajectory:
    """The tokens of a response while it grows."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    runs: list[Run] = field(default_factory=list)

    @staticmethod
    def of(begun: Trajectory) -> GrowingTrajectory:
        """The tokens of a response that has not ended."""
        return GrowingTrajectory(begun.token_ids[:], begun.logprobs[:], list(begun.runs))

    def __len__(self) -> int:
        return len(self.token_ids)

    def drawn_by(self, version: int) -> int:
        """How many tokens this version of the policy has drawn."""
        return sum(run.length for run in self.runs if run.version == version)

    def add_drawn(self, sample: Sample) -> None:
        """Append what the engine drew."""
        tokens, logprobs = sample.arrays
        self.token_ids += tokens
        self.logprobs += logprobs
        self._add_run(len(tokens), sample.version)

    def add_told(self, tokens: list[int]) -> None:
        """Append what the model is told."""
        if tokens:
            self.token_ids.extend(tokens)
            self.logprobs.extend([0.0] * len(tokens))
            self._add_run(len(tokens), NO_VERSION)

    def untrained(self) -> None:
        """Let nobody have drawn any token, so that none of them trains."""
        self.logprobs = array("f", [0.0] * len(self))
        self.runs = [Run(len(self), NO_VERSION)] if len(self) else []

    def _add_run(self, length: int, version: int) -> None:
        if self.runs and self.runs[-1].version == version:
            length += self.runs.pop().length
        self.runs.append(Run(length, version))
