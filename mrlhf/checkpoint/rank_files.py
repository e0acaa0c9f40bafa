"""The files that one rank writes into a checkpoint, at once or in a thread while training goes on.

On a GPU the thread copies in a stream of its own, so that what trains or generates does not wait.
This file knows neither the manifest nor the other ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread

import torch
from torch import Tensor

from mrlhf.checkpoint.model_slices import RankSlices
from mrlhf.checkpoint.tensor_file import WrittenFile, sync_files, write_tensors
from mrlhf.errors import CheckpointError
from mrlhf.parallel.host_block import host_tensors

WriteFiles = Callable[[], list[WrittenFile]]


@dataclass(frozen=True)
class RankPart:
    """All that one rank has written."""

    files: list[WrittenFile] = field(default_factory=list)
    models: dict[str, RankSlices] = field(default_factory=dict)  # by role, without their tensors
    error: str | None = None  # why it could not write
    seconds: float = 0.0  # from the making of the writer to the end of its last file


def model_file(role: str, rank: int) -> str:
    """The file of a rank's slices of a model, relative to the checkpoint."""
    return f"{role}/rank_{rank:05d}.safetensors"


class Staging:
    """Host memory into which state is copied before a thread writes it; used again and again."""

    def __init__(self) -> None:
        self._buffers: dict[str, list[Tensor]] = {}  # by role
        self._stream: torch.cuda.Stream | None = None

    def follow(self, device: torch.device) -> None:
        """Copy next what the device has computed by now, beside what it computes from now on."""
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def copy(self, models: Mapping[str, RankSlices]) -> dict[str, RankSlices]:
        """The same slices, copied; they stay as they are until the next call."""
        if self._stream is None:
            return {role: self._copied(role, slices) for role, slices in models.items()}
        torch.cuda.set_device(self._stream.device)  # a thread begins with the first one
        with torch.cuda.stream(self._stream):
            copies = {role: self._copied(role, slices) for role, slices in models.items()}
        self._stream.synchronize()
        return copies

    def _copied(self, role: str, slices: RankSlices) -> RankSlices:
        sizes = [(math.prod(source.shape), source.dtype) for source in slices.sources]
        buffers = self._buffers.get(role, [])
        if [(len(buffer), buffer.dtype) for buffer in buffers] != sizes:
            # Only into pinned memory the copy goes on beside other work.
            buffers = self._buffers[role] = host_tensors(sizes, pinned=self._stream is not None)
        pairs = zip(slices.sources, buffers, strict=True)
        return replace(slices, sources=[source.copied(into=buffer) for source, buffer in pairs])


class RankWriter:
    """Writes the files of one rank."""

    def __init__(self, root: Path, rank: int) -> None:
        """`root` is the directory of the checkpoint that is being made."""
        self._root = root
        self._rank = rank
        self._began = time.monotonic()
        self._part = RankPart()
        self._thread: Thread | None = None
        self._copied = Event()

    def fail(self, error: str) -> None:
        """Write nothing, because of an error."""
        self._part = RankPart(error=error)

    def write(self, models: Mapping[str, RankSlices], write_rest: WriteFiles) -> None:
        """Write all files; returns when they are on disk, or writing has failed.

        `write_rest` writes the rank's other files; it need not wait for the disk.
        """
        part = RankPart()
        try:
            part.files.extend(write_rest())
            for role, slices in models.items():
                path = model_file(role, self._rank)
                (self._root / role).mkdir(exist_ok=True)
                part.files.append(write_tensors(self._root, path, slices.sources, sync=False))
                part.models[role] = replace(slices, sources=[])
            sync_files(self._root, part.files)
            part = replace(part, seconds=time.monotonic() - self._began)
        except (CheckpointError, OSError) as error:
            part = RankPart(error=str(error))
        self._part = part

    def begin(
        self, models: Mapping[str, RankSlices], write_rest: WriteFiles, staging: Staging
    ) -> None:
        """Copy and write in a thread; models must not change until `wait_until_copied` returns."""
        arguments = (models, write_rest, staging)
        self._thread = Thread(target=self._copy_and_write, args=arguments, name="checkpoint")
        self._thread.start()

    def wait_until_copied(self) -> None:
        """Return once the thread does not look at the models any more."""
        self._copied.wait()

    @property
    def is_done(self) -> bool:
        """Whether everything is written, or writing has failed."""
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> RankPart:
        """The files that were written; waits for them."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._part

    def _copy_and_write(
        self, models: Mapping[str, RankSlices], write_rest: WriteFiles, staging: Staging
    ) -> None:
        # Whatever is raised in a thread is lost with it; so every error goes into the result.
        try:
            copied = staging.copy(models)
            self._copied.set()
            self.write(copied, write_rest)
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
        finally:
            self._copied.set()
