"""One response from its first token until all ranks have it: its tokens, and who drew which.

It knows neither prompts nor engines.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from numpy.typing import NDArray

from mrlhf.batch import NO_VERSION, Episode
from mrlhf.inference.base import MaskWords, Sample


class TokenRun(NamedTuple):
    """Tokens one after the other that have one origin."""

    length: int
    version: int  # of the policy that drew them; `NO_VERSION` if an environment wrote them


@dataclass
class DrawnSample:
    """A response of one turn, or of several with what an environment said between them."""

    row: int  # its place in the batch
    # int32, all tokens after the prompt
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    # float32, of each token; 0 where nobody drew it
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    runs: list[TokenRun] = field(default_factory=list)  # their lengths add up to `length`
    ended: bool = False  # otherwise it goes on, perhaps with later weights
    stopped: bool = False  # whether it ended by itself; otherwise the length limit ended it
    # The experts of the first `recorded` tokens of prompt and response; as in `Sample`.
    recorded: int = 0
    experts: NDArray[Any] | None = field(default=None, compare=False, repr=False)
    episode: Episode | None = None  # None without an environment
    # Which tokens could be drawn at the place of each.
    masks: MaskWords = field(default_factory=lambda: MaskWords.none(0), repr=False)

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return len(self.token_ids)

    @property
    def has_failed(self) -> bool:
        """Whether it is an episode that could not go on."""
        return self.episode is not None and bool(self.episode.failure)

    def drawn_by(self, version: int) -> int:
        """How many tokens this version of the policy has drawn."""
        return sum(run.length for run in self.runs if run.version == version)

    def turns_ended_by(self, version: int) -> int:
        """How many turns of its episode end with a token that this version drew."""
        if self.episode is None:
            return 0
        run_ends = list(accumulate(run.length for run in self.runs))
        last = [self.runs[bisect_left(run_ends, end)] for end in self.episode.turns]
        return sum(run.version == version for run in last)

    def add_drawn(self, sample: Sample) -> None:
        """Append tokens that the engine drew."""
        tokens, logprobs = sample.arrays
        self.token_ids += tokens
        self.logprobs += logprobs
        self._add_masks(sample.masks or MaskWords.none(len(tokens)))
        self._add_run(len(tokens), sample.version)

    def add_read(self, tokens: list[int]) -> None:
        """Append tokens that the policy only reads."""
        if tokens:
            self.token_ids.extend(tokens)
            self.logprobs.extend([0.0] * len(tokens))
            self._add_masks(MaskWords.none(len(tokens)))
            self._add_run(len(tokens), NO_VERSION)

    def forget_record(self) -> None:
        """Drop the record of experts, which is not of the whole response, or is made again."""
        self.recorded = 0
        self.experts = None

    def exclude(self) -> None:
        """Let nobody have drawn any token, so that none of them trains."""
        self.logprobs = array("f", [0.0] * self.length)
        self.masks = MaskWords.none(self.length)
        self.runs = [TokenRun(self.length, NO_VERSION)] if self.length else []

    def _add_masks(self, masks: MaskWords) -> None:
        self.masks.words.extend(masks.words)
        self.masks.counts.extend(masks.counts)

    def _add_run(self, length: int, version: int) -> None:
        if self.runs and self.runs[-1].version == version:
            length += self.runs.pop().length
        self.runs.append(TokenRun(length, version))
