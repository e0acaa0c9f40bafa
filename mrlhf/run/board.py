"""The present state of a run, as readers of `status.json` and of the terminal see it.

This file does not know who reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mrlhf.parallel.phases import Phases
from mrlhf.run.alarms.watch import Alarm

State = Literal["starting", "training", "finished", "interrupted", "failed"]


@dataclass(frozen=True)
class ShownSample:
    """A response that people are shown: prompt, response and score in words."""

    kind: str  # "training" or "held-out"
    title: str  # for example "training step 10"
    text: str


@dataclass
class Board:
    """The present state of a run.

    The main thread writes and another thread reads, so each attribute is replaced as a whole.
    """

    # The present phase of this rank, and its progress.
    phases: Phases = field(default_factory=Phases)
    has_view: bool = False  # whether a view on the terminal shows the board
    state: State = "starting"
    message: str = ""  # why the run was interrupted or has failed
    step: int = 0  # the last training step that is complete
    steps: int | None = None  # training steps of the whole run; None while that is not known
    seconds_left: float | None = None  # estimated time until the last step is complete
    metrics: Mapping[str, float] = field(default_factory=dict)  # those of the last complete step
    # The metrics that people are shown, by label, over the latest steps; at least one value each.
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    alarms: Sequence[Alarm] = ()  # those that are on
    sample: ShownSample | None = None  # the latest one
    new_samples: list[ShownSample] = field(default_factory=list)  # those since the last report
    # Numbers of each response of the present step, by name.
    distributions: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def add_sample(self, sample: ShownSample) -> None:
        """Show a sample from now on."""
        self.sample = sample
        self.new_samples.append(sample)

    def clear_step(self) -> None:
        """Forget the samples and numbers of the step that has been reported."""
        self.new_samples = []
        self.distributions = {}
