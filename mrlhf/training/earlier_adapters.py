"""The adapters of a policy as they were in an earlier step, with which it is its own teacher.

They are float32, in which an average does not lose small movements. This file does not know what
the teacher teaches.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mrlhf.errors import CheckpointError, WeightError
from mrlhf.models.lora import is_adapter
from mrlhf.parallel.collectives import together
from mrlhf.training.engine import ModelEngine
from mrlhf.weights.hf import FileOptions, read_tensors, write_weights
from mrlhf.weights.shard import Shape, Slot
from mrlhf.weights.stored import ExpectedTensors, read_headers

_FILE = "adapters.safetensors"


class EarlierAdapters:
    """A copy of a model's adapters, on each rank of those that it holds."""

    def __init__(self, engine: ModelEngine, every: int, decay: float) -> None:
        """Begin as the adapters are now.

        The copy moves after each so many steps; `decay` is the share of it that then stays.
        """
        self._engine = engine
        self._every = every
        self._decay = decay
        self._held = self._now()

    def after_step(self, number: int) -> None:
        """Move after step `number`, counted from 1, if that is due."""
        if number % self._every:
            return
        now = self._now()
        self._held = {key: now[key].lerp(held, self._decay) for key, held in self._held.items()}

    def within(self) -> AbstractContextManager[None]:
        """Have the model compute with these adapters as long as it lasts."""
        adapters = self._engine.adapters
        return adapters.exchanged([self._held[id(slot.parameter)] for slot in adapters.slots])

    def save(self, directory: Path) -> None:
        """Write them, whatever the layout; CheckpointError on every rank if that fails."""
        groups = self._engine.groups
        options = FileOptions(max_shard_bytes=sys.maxsize, file=_FILE)
        try:
            with together(WeightError, groups.world):
                if groups.first_copy is not None:
                    write_weights(directory, self._slots, self._shapes, groups.first_copy, options)
        except WeightError as error:
            raise CheckpointError(str(error)) from error

    def load(self, directory: Path) -> None:
        """Read what `save` wrote; a run that had none before begins with the adapters it has."""
        self._held = self._now()
        file = directory / _FILE
        if file.is_file():
            with together(WeightError, self._engine.groups.world):
                stored = read_headers(directory, [file])
                read_tensors(stored, self._slots, ExpectedTensors(self._shapes))

    def _now(self) -> dict[int, Tensor]:
        """The adapters as they are now, by the parameter, in which several slots may lie."""
        copies = zip(self._engine.adapters.slots, self._engine.adapters.copy(), strict=True)
        return {id(slot.parameter): values.float() for slot, values in copies}

    @property
    def _slots(self) -> list[Slot]:
        slots = self._engine.adapters.slots
        return [replace(slot, parameter=self._held[id(slot.parameter)]) for slot in slots]

    @property
    def _shapes(self) -> dict[str, Shape]:
        shapes = self._engine.tensor_shapes
        return {name: shape for name, shape in shapes.items() if is_adapter(name)}
