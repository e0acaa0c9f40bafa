"""Decides when a checkpoint is due, which one is best, and which ones are deleted.

It decides from numbers. It does not know models or what a checkpoint holds.
"""

from __future__ import annotations

import difflib
import logging
import math
import shutil
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrlhf.checkpoint.manifest import checkpoint_name, with_manifest
from mrlhf.config.trainer import TrainerSection
from mrlhf.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass
class Best:
    """The best value so far of the metric by which a step is kept."""

    key: str  # the configuration key that names the metric
    metric: str | None  # None if nothing is kept for being best
    mode: str  # whether a high ("max") or a low value is best
    step: int | None = None  # the step that had the best value
    value: float = math.nan

    def check(self, measured: AbstractSet[str]) -> None:
        """Refuse, with a ConfigError, a metric that the run does not measure."""
        if self.metric is not None and self.metric not in measured:
            kind = self.metric.split("/")[0]
            alike = [name for name in measured if name.startswith(f"{kind}/")]
            near = difflib.get_close_matches(self.metric, sorted(alike or measured), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{self.key} is {self.metric}, which this run does not measure{hint}")

    def check_validation(self, measured: AbstractSet[str]) -> None:
        """Refuse a metric of the validation that a validation does not measure."""
        if self.metric is not None and self.metric.startswith(("val/", "val_sampled/")):
            self.check(measured)

    def is_improved_by(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether step `step` has the best value so far, which is then kept."""
        if self.metric is None or self.metric not in metrics:
            return False
        value = float(metrics[self.metric])
        if not math.isfinite(value):
            return False

        better = value > self.value if self.mode == "max" else value < self.value
        if self.step is None or better:
            self.step = step
            self.value = value
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        """The best value and its step."""
        return {"metric": self.metric, "step": self.step, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`; with another metric, begin anew."""
        if state["metric"] == self.metric:
            self.step = state["step"]
            self.value = state["value"]


def is_due(
    section: TrainerSection, step: int, last_step: int, seconds_since_last: float, improved: bool
) -> bool:
    """Whether a checkpoint is to be saved after step `step`.

    `seconds_since_last` counts from the last checkpoint, or from the start; `improved` says whether
    this step is the best so far.
    """
    if section.save_freq and (step % section.save_freq == 0 or step == last_step):
        return True
    if improved:
        return True
    minutes = section.save_every_minutes
    return minutes is not None and seconds_since_last >= 60 * minutes


def delete_old(directory: Path, max_to_keep: int | None, best_step: int | None) -> None:
    """Delete all but the newest `max_to_keep` checkpoints and the one of step `best_step`.

    A checkpoint of an unfinished step goes as soon as there is a newer one.
    """
    newest_first = with_manifest(directory)
    best = None if best_step is None else directory / checkpoint_name(best_step, False)
    kept = 0
    for number, path in enumerate(newest_first):
        if path == best:
            continue
        is_part = path.name != checkpoint_name(int(path.name.split("_")[1]), False)
        if number > 0 and is_part:
            delete(path)
            continue
        kept += 1
        if max_to_keep is not None and kept > max_to_keep:
            delete(path)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint, so that at no time a part of it looks whole."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.deleted")
    try:
        shutil.rmtree(hidden, ignore_errors=True)
        checkpoint.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        logger.warning("cannot delete the old checkpoint %s: %s", checkpoint, error)
