"""The weights of a policy as they were in an earlier step, with which it is its own teacher.

An average is float32, which does not lose small movements. This file does not know what the
teacher teaches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.errors import CheckpointError, WeightError
from mrlhf.models.lora import is_adapter
from mrlhf.parallel.collectives import together
from mrlhf.training.engine import ModelEngine
from mrlhf.weights.hf import FileOptions, read_tensors, write_weights
from mrlhf.weights.shard import Shape, Slot
from mrlhf.weights.stored import ExpectedTensors, read_headers

_OF_ADAPTERS = FileOptions(sys.maxsize, file="adapters.safetensors")


class EarlierPolicy:
    """A copy of what a policy trains, on each rank of what it holds: its adapters, or all weights.

    Attributes:
        engine: computes with the copy: the policy itself `within` it, or a second model.
    """

    def __init__(
        self, policy: ModelEngine, every: int, decay: float, model: ModelEngine | None = None
    ) -> None:
        """Begin as the policy is now.

        The copy moves after each so many steps; `decay` is the share of it that then stays. A
        policy without adapters has its copy in `model`, one like it in the same layout.
        """
        self.engine = model or policy
        self._policy = policy
        self._every = every
        self._decay = decay
        self._model = model
        # By the policy's parameter, in which several slots may lie.
        self._trained = {id(slot.parameter): slot.parameter for slot in self._of_policy}
        self._shown: dict[int, Tensor] = {}  # the model's own weights, if an average is beside them
        if model is None:
            self._held = self._average()
        else:
            pairs = zip(self._of_policy, model.slots, strict=True)
            self._held = {id(own.parameter): slot.parameter.detach() for own, slot in pairs}
            if decay and model.dtype != torch.float32:
                self._shown = self._held
                self._held = self._average()
                model.residency.add("optimizer", lambda: list(self._held.values()))
        self._move(0.0)

    def after_step(self, number: int) -> None:
        """Move after step `number`, counted from 1, if that is due."""
        if number % self._every == 0:
            self._move(self._decay)

    def within(self) -> AbstractContextManager[None]:
        """Have `engine` compute with the copy as long as it lasts."""
        if self._model is not None:
            return nullcontext()
        adapters = self._policy.adapters
        return adapters.exchanged([self._held[id(slot.parameter)] for slot in adapters.slots])

    def save(self, directory: Path) -> None:
        """Write it, whatever the layout; CheckpointError on every rank if that fails."""
        groups = self._policy.groups
        options = _OF_ADAPTERS if self._model is None else FileOptions()
        try:
            with self._at_hand(), together(WeightError, groups.world):
                if groups.first_copy is not None:
                    write_weights(directory, self._slots, self._shapes, groups.first_copy, options)
        except WeightError as error:
            raise CheckpointError(str(error)) from error

    def load(self, directory: Path) -> None:
        """Read what `save` wrote; a run that had none before begins with the policy it has."""
        self._move(0.0)
        files = sorted(directory.glob("*.safetensors"))
        if files:
            with self._at_hand(), together(WeightError, self._policy.groups.world):
                stored = read_headers(directory, files)
                read_tensors(stored, self._slots, ExpectedTensors(self._shapes))
                self._show()

    @torch.no_grad()
    def _move(self, decay: float) -> None:
        """Keep this share, and take the rest of the policy as it is now."""
        with self._at_hand():
            for key, now in self._trained.items():
                self._held[key].lerp_(now.to(self._held[key].dtype), 1 - decay)
            self._show()

    def _show(self) -> None:
        """Round the average, if there is one, to the model's weights."""
        for key, values in self._shown.items():
            values.copy_(self._held[key])

    def _average(self) -> dict[int, Tensor]:
        """Memory for an average of all that is trained."""
        like = self._trained.items()
        return {key: torch.zeros_like(now, dtype=torch.float32) for key, now in like}

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """Have policy and copy on the device, and the copy leave as it then is."""
        with ExitStack() as on_device:
            on_device.enter_context(self._policy.residency.needing("params"))
            if self._model is not None:
                on_device.enter_context(self._model.residency.needing("params", "optimizer"))
                self._model.residency.forget_copies()
            self._policy.wait_for_weights()
            yield

    @property
    def _of_policy(self) -> list[Slot]:
        """The policy's own slots of what it trains."""
        return self._policy.adapters.slots if self._model is None else self._policy.slots

    @property
    def _slots(self) -> list[Slot]:
        return [replace(slot, parameter=self._held[id(slot.parameter)]) for slot in self._of_policy]

    @property
    def _shapes(self) -> dict[str, Shape]:
        shapes = self._policy.tensor_shapes
        is_whole = self._model is not None
        return {name: shape for name, shape in shapes.items() if is_whole or is_adapter(name)}
