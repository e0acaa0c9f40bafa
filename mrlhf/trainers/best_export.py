"""Exports the model of the best step so far, next to the model with which the run ends.

It decides by one metric. It does not know what the metric means, nor how a model is exported.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.checkpoint.retention import Best
from mrlhf.errors import CheckpointError

logger = logging.getLogger(__name__)


class BestExport:
    """The best model so far, as a Hugging Face checkpoint; every rank calls it together."""

    def __init__(
        self,
        best: Best,
        export: Callable[[Path], None],
        directory: Path,
        world: dist.ProcessGroup,
    ) -> None:
        """Export nothing yet.

        `export` writes the model as it is now into `directory`, and replaces a worse one there. If
        `best` names no metric, nothing is exported.
        """
        self._best = best
        self._export = export
        self._directory = directory
        self._world = world

    def check(self, measured: AbstractSet[str]) -> None:
        """Raise a ConfigError, naming the nearest metric, if the run does not measure this one."""
        self._best.check(measured)

    def check_validation(self, measured: AbstractSet[str]) -> None:
        """Raise a ConfigError if it is a metric of the validation that is not measured there."""
        self._best.check_validation(measured)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Export the model if step `step` is the best so far; step 0 is before training.

        If the model cannot be written, the error is logged and training goes on. The next step that
        is better than the best one written is tried again.
        """
        if self._best.metric is None:
            return
        best = copy.copy(self._best)
        if not self._on_every_rank(best.is_improved_by(step, metrics)):
            return

        try:
            self._export(self._directory)
        except CheckpointError as error:
            if dist.get_rank(self._world) == 0:
                logger.error("the best model so far is not exported: %s; training goes on", error)
            return
        self._best = best
        if dist.get_rank(self._world) == 0:
            logger.info("best so far: step %d, %s %.4g", step, best.metric, best.value)

    def summary(self) -> dict[str, Any]:
        """For summary.json: the best step, its value, and the path of its model, if any."""
        if self._best.step is None:
            return {}
        return {
            "best_step": self._best.step,
            "best_value": self._best.value,
            "best_checkpoint": str(self._directory),
        }

    def state_dict(self) -> dict[str, Any]:
        """The best step so far and its value."""
        return self._best.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` gave, unless its model has been deleted.

        Every rank calls it. Only rank 0 looks at the disk.
        """
        if self._on_every_rank(self._directory.is_dir()):
            self._best.load_state_dict(state)

    def _on_every_rank(self, verdict: bool) -> bool:
        """The verdict of rank 0."""
        said = torch.tensor(float(verdict), dtype=torch.float32)
        dist.broadcast(said, src=0, group=self._world)
        return bool(said)
