"""Where a run stands at the moment: what a reader of `status.json` or of the terminal is told.

The main thread writes on the board and another thread reads it, so each attribute is replaced as a
whole. This file does not know who reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mrlhf.metrics import CurrentPhase
from mrlhf.run.alarms.watch import Alarm
from mrlhf.terminal import Curve

State = Literal["starting", "training", "finished", "interrupted", "failed"]


@dataclass(frozen=True)
class ShownSample:
    """A response that people are shown.

    Attributes:
        kind: "training" or "held-out".
        title: which it is, such as "training step 10".
        text: prompt, response and score in words.
    """

    kind: str
    title: str
    text: str


@dataclass
class Board:
    """Where a run stands.

    Attributes:
        phase: the phase that this rank is in.
        has_view: whether a view on the terminal shows the board.
        state: of the run.
        message: why it was interrupted or has failed.
        step: the last training step that is complete.
        steps: training steps of the whole run; None while that is not known.
        seconds_left: until the last step is complete, as far as that can be estimated.
        metrics: of that step.
        curves: those metrics that people are shown, over the latest steps.
        alarms: those that are on.
        sample: the latest one.
        new_samples: those since the last report.
        distributions: numbers of each response of the present step, by name.
    """

    phase: CurrentPhase = field(default_factory=CurrentPhase)
    has_view: bool = False
    state: State = "starting"
    message: str = ""
    step: int = 0
    steps: int | None = None
    seconds_left: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    curves: Sequence[Curve] = ()
    alarms: Sequence[Alarm] = ()
    sample: ShownSample | None = None
    new_samples: list[ShownSample] = field(default_factory=list)
    distributions: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def add_sample(self, sample: ShownSample) -> None:
        """Show a sample from now on."""
        self.sample = sample
        self.new_samples.append(sample)

    def clear_step(self) -> None:
        """Forget what belongs to the step that has been reported."""
        self.new_samples = []
        self.distributions = {}
