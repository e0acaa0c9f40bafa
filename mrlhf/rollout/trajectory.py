"""One response as a replica hands it to the others: its tokens, and who drew which of them.

It knows neither prompts nor engines.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from mrlhf.batch import NO_VERSION, Episode
from mrlhf.inference.base import Sample


class Run(NamedTuple):
    """Tokens one after the other that have one origin."""

    length: int
    version: int  # of the policy that drew them; `NO_VERSION` if an environment wrote them


@dataclass(frozen=True)
class Trajectory:
    """A response of one turn, or of several with what an environment said between them."""

    row: int  # its place in the batch
    token_ids: array[int]  # int32, all tokens after the prompt
    logprobs: array[float]  # float32, of each token; 0 where nobody drew it
    runs: tuple[Run, ...]  # their lengths add up to the number of tokens
    stopped: bool  # whether it ended by itself; otherwise the length limit ended it
    # The experts of the first `recorded` tokens of prompt and response; as in `Sample`.
    recorded: int = 0
    experts: NDArray[Any] | None = field(default=None, compare=False, repr=False)
    episode: Episode | None = None  # None without an environment

    @staticmethod
    def of(sample: Sample, row: int, recorded: int) -> Trajectory:
        """The response of a single turn."""
        tokens, logprobs = sample.arrays
        runs = (Run(len(tokens), sample.version),)
        return Trajectory(row, tokens, logprobs, runs, sample.stopped, recorded, sample.experts)


@dataclass
class GrowingTrajectory:
    """The tokens of a response while turn follows turn."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    runs: list[Run] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def add_drawn(self, sample: Sample) -> None:
        """Append what the engine drew."""
        tokens, logprobs = sample.arrays
        self.token_ids += tokens
        self.logprobs += logprobs
        self.runs.append(Run(len(tokens), sample.version))

    def add_told(self, tokens: list[int]) -> None:
        """Append what the model is told."""
        if tokens:
            self.token_ids.extend(tokens)
            self.logprobs.extend([0.0] * len(tokens))
            self.runs.append(Run(len(tokens), NO_VERSION))

    def untrained(self) -> None:
        """Let nobody have drawn any token, so that none of them trains."""
        self.logprobs = array("f", [0.0] * len(self))
        self.runs = [Run(len(self), NO_VERSION)] if len(self) else []
