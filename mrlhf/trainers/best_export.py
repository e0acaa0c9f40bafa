"""Exports the model of the best step so far, next to the model with which the run ends.

It decides by one metric. It does not know what the metric means, nor how a model is exported.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrlhf.checkpoint.frozen import fingerprint
from mrlhf.checkpoint.retention import Best
from mrlhf.errors import CheckpointError
from mrlhf.parallel.collectives import from_first

logger = logging.getLogger(__name__)


class BestExport:
    """The best model so far, as a Hugging Face checkpoint; every rank calls it together."""

    def __init__(
        self, best: Best, export: Callable[[Path], None], directory: Path, world: dist.ProcessGroup
    ) -> None:
        """Export nothing yet; never, if `best` names no metric.

        `export` writes the model as it is now into `directory`, and replaces a worse one there.
        """
        self.best = best
        self._export = export
        self.directory = directory
        self._world = world
        self._files: Mapping[str, Any] = {}  # the fingerprint of the exported model, on rank 0

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Export the model if step `step` is the best so far; step 0 is before training.

        If the model cannot be written, the error is logged and training goes on. The next step that
        is better than the best one written is tried again.
        """
        if self.best.metric is None:
            return
        best = copy.copy(self.best)
        if not from_first(best.is_improved_by(step, metrics), self._world):
            return

        try:
            self._export(self.directory)
        except CheckpointError as error:
            if dist.get_rank(self._world) == 0:
                logger.error("the best model so far is not exported: %s; training goes on", error)
            return
        self.best = best
        if dist.get_rank(self._world) == 0:
            self._files = fingerprint(self.directory)["files"]
            logger.info("best so far: step %d, %s %.4g", step, best.metric, best.value)

    def summary(self) -> dict[str, Any]:
        """For summary.json: the best step, its value, and the path of its model, if any."""
        if self.best.step is None:
            return {}
        return {
            "best_step": self.best.step,
            "best_value": self.best.value,
            "best_checkpoint": str(self.directory),
        }

    def state_dict(self) -> dict[str, Any]:
        """The best step, and what its model is known by."""
        return {**self.best.state_dict(), "files": self._files}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Go on from a state, unless its model was deleted, or a later step's has replaced it.

        Every rank calls it. The disk of rank 0 counts. Returns whether the model is there.
        """
        found = fingerprint(self.directory)["files"]
        is_its_model = self.directory.is_dir() and state.get("files", found) == found
        if not from_first(is_its_model, self._world):
            return False
        self.best.load_state_dict(state)
        self._files = found
        return True
