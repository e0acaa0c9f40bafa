"""Hands the metrics of a run to trackers: TensorBoard, Weights & Biases, trackio.

A tracker's package is imported only if the configuration names it. This file does not know the
names of metrics.
"""

from __future__ import annotations

import html
import importlib.util
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from mrlhf.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tracked:
    """One step for the trackers."""

    step: int
    numbers: Mapping[str, float]  # the metrics that are finite numbers
    texts: Mapping[str, str] = field(default_factory=dict)  # samples in words, by title
    # Numbers of each response, by name.
    distributions: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrackedRun:
    """The run for the trackers."""

    output_dir: Path  # the trackers' files stand there if the tracker allows it
    project: str
    name: str
    config: Mapping[str, Any]
    # The first step that a resumed run tracks again; None for a new run.
    first_step: int | None = None


class Tracker(Protocol):
    """One tracker."""

    def write(self, tracked: Tracked) -> None:
        """Track a step."""

    def close(self) -> None:
        """Finish."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that is not installed, and name the command that installs it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trainer.trackers names {name}, which is not installed: pip install {name}, or "
                "leave it out"
            )


class Trackers:
    """All trackers of a run. One that fails is given up, and training continues."""

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        """Open the trackers; ConfigError if that is not possible."""
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            try:
                self._trackers[name] = _TRACKERS[name](run)
            except Exception as error:  # each package has errors of its own
                self.close()
                reason = " ".join(str(error).split())
                raise ConfigError(
                    f"trainer.trackers: {name} cannot be opened: {type(error).__name__}: {reason}; "
                    "mend that, or leave it out"
                ) from error

    def write(self, tracked: Tracked) -> None:
        """Send a step to all trackers."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.write(tracked)
            except Exception as error:
                logger.error("%s gets no more numbers, since writing failed: %s", name, error)
                del self._trackers[name]

    def close(self) -> None:
        """Close all trackers."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:
                logger.error("%s could not be closed: %s", name, error)
        self._trackers = {}


def finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The metrics that are finite numbers."""
    return {
        name: value for name, value in metrics.items() if value is not None and math.isfinite(value)
    }


class _TensorBoard:
    """Event files in the folder `tensorboard` of the output directory."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.output_dir / "tensorboard"), purge_step=run.first_step)

    def write(self, tracked: Tracked) -> None:
        for name, value in tracked.numbers.items():
            self._writer.add_scalar(name, value, tracked.step)
        for title, text in tracked.texts.items():
            # TensorBoard reads Markdown, in which an indented block is shown as it is.
            block = "".join(f"    {line}\n" for line in text.splitlines())
            self._writer.add_text(title, block, tracked.step)
        for name, values in tracked.distributions.items():
            self._writer.add_histogram(name, torch.tensor(values), tracked.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the output directory."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            dir=str(run.output_dir),
            config=dict(run.config),
            settings=wandb.Settings(console="off"),  # it would take the terminal from the view
        )

    def write(self, tracked: Tracked) -> None:
        row: dict[str, Any] = dict(tracked.numbers)
        for title, text in tracked.texts.items():
            row[title] = self._wandb.Html(f"<pre>{html.escape(text)}</pre>")
        for name, values in tracked.distributions.items():
            row[name] = self._wandb.Histogram(values)
        self._run.log(row, step=tracked.step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A run of trackio, in its own folder on this machine (TRACKIO_DIR)."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio = trackio
        self._run = trackio.init(project=run.project, name=run.name, config=dict(run.config))

    def write(self, tracked: Tracked) -> None:
        row: dict[str, Any] = dict(tracked.numbers)
        for title, text in tracked.texts.items():
            row[title] = self._trackio.Table(columns=["samples"], data=[[text]])
        self._run.log(row, step=tracked.step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}
