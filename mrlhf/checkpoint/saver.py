"""Saves checkpoints: all ranks write their files, and rank 0 makes them a checkpoint.

The files are written into a hidden directory. Once every rank is done, rank 0 writes the manifest
and renames the directory. So a checkpoint is whole or not there, whatever dies and when. This file
does not know what the state means, nor when a checkpoint is due.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mrlhf.checkpoint.manifest import (
    MANIFEST,
    REPLACED,
    Manifest,
    StoredModel,
    StoredTensor,
    check_sizes,
    checkpoint_name,
    hidden_directories,
)
from mrlhf.checkpoint.model_slices import slices_to_save
from mrlhf.checkpoint.rank_files import RankPart, RankWriter, Staging, WriteFiles, model_file
from mrlhf.checkpoint.state_tree import StateCopy, random_state
from mrlhf.checkpoint.tensor_file import (
    TensorSource,
    WrittenFile,
    describe_file,
    write_bytes,
    write_tensors,
)
from mrlhf.errors import CheckpointError
from mrlhf.parallel.collectives import from_first, wait_for_all
from mrlhf.printable import size_text
from mrlhf.training.engine import ModelEngine
from mrlhf.version import __version__

logger = logging.getLogger(__name__)
_PACKAGES = ("torch", "megatron-core", "transformers", "safetensors")


@dataclass(frozen=True)
class RunIdentity:
    """The facts about a run in each of its manifests."""

    program: str  # class of the configuration
    config: dict[str, Any]  # the whole configuration
    # The fingerprint of each model that is not stored, by role.
    frozen: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint; the same on every rank, but for the models' shards."""

    step: int  # training steps that are complete
    unfinished_step: bool  # whether the state holds a part of the next step
    models: Mapping[str, ModelEngine]  # the trained models, by role
    state: Mapping[str, Any]  # everything else that lasts, as a tree for `StateCopy`
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of step `step`
    # By the name of a directory, a function that writes further files into it, such as a Hugging
    # Face checkpoint. Every rank calls each, and if one fails, each raises a CheckpointError.
    exports: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being written."""

    contents: Contents
    hidden: Path
    writer: RankWriter


class Saver:
    """Saves the checkpoints of one run into `directory`; every rank calls each method together."""

    def __init__(
        self,
        directory: Path,
        identity: RunIdentity,
        world: dist.ProcessGroup,
        asynchronous: bool,
        verify: Callable[[], None] | None = None,
    ) -> None:
        """Save nothing yet.

        Args:
            directory: holds the checkpoints; on a file system that all ranks share.
            asynchronous: let a thread write models while training goes on.
            verify: rank 0 calls it before a checkpoint gets its name; it raises a CheckpointError
                if the directory is no longer this run's.
        """
        self.directory = directory
        self._identity = identity
        self._world = world
        self._versions = {"mrlhf": __version__} | {name: version(name) for name in _PACKAGES}
        self._versions["python"] = platform.python_version()
        self._verify = verify
        self._staging = Staging() if asynchronous else None
        self._pending: _Pending | None = None
        self.longest_s = 0.0  # of the saves so far, on rank 0

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._pending is not None

    def save(self, contents: Contents) -> Path | None:
        """Save a checkpoint, or begin to; a save that is under way is finished first.

        Returns the checkpoint; None if it is still being written. If a rank could not write, every
        rank raises a CheckpointError, and what was written is deleted.
        """
        self.finish(wait=True)
        name = checkpoint_name(contents.step, contents.unfinished_step)
        hidden = self.directory / f".{name}.saving"
        error = self._prepare(hidden)

        writer = RankWriter(hidden, dist.get_rank())
        try:
            for export_name, export in contents.exports.items():
                if error is None:
                    export(hidden / export_name)
        except CheckpointError as failure:  # on every rank
            error = str(failure)
        if error is not None:
            writer.fail(error)
        else:
            self._write(writer, contents, _writer_of_rest(hidden, contents))
        self._pending = _Pending(contents, hidden, writer)
        return self.finish(wait=self._staging is None)

    def finish(self, wait: bool) -> Path | None:
        """Complete the checkpoint that is being written, if every rank has written its files.

        With `wait`, wait until they have. Returns the checkpoint, if one was completed; errors are
        those of `save`.
        """
        pending = self._pending
        if pending is None:
            return None
        if not wait:
            done = torch.tensor(float(pending.writer.is_done), dtype=torch.float32)
            dist.all_reduce(done, dist.ReduceOp.MIN, group=self._world)
            if not done:
                return None

        self._pending = None
        return self._publish(pending, pending.writer.result())

    def _write(self, writer: RankWriter, contents: Contents, write_rest: WriteFiles) -> None:
        """Write this rank's files, or begin to; what is offloaded leaves once it is copied."""
        engines = contents.models.values()
        with ExitStack() as on_device:
            for engine in engines:
                on_device.enter_context(engine.residency.needing("params", "optimizer"))
            models = {role: slices_to_save(engine) for role, engine in contents.models.items()}
            if self._staging is None:
                writer.write(models, write_rest)
                return
            self._staging.follow(next(iter(engines)).device)
            writer.begin(models, write_rest, self._staging)
            for engine in engines:
                assert engine.optimizer is not None, "a frozen model does not change"
                engine.optimizer.hold_until(writer.wait_until_copied)

    def _prepare(self, hidden: Path) -> str | None:
        """Make the hidden directory; returns the error, if any, on every rank."""
        error = None
        if dist.get_rank() == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                for rest in hidden_directories(self.directory):
                    shutil.rmtree(rest)
                (hidden / "rng").mkdir(parents=True)
            except OSError as failure:
                error = f"cannot make {hidden}: {failure.strerror or failure}"
        wait_for_all(self._world)
        return from_first(error, self._world)

    def _publish(self, pending: _Pending, part: RankPart) -> Path:
        """Make the hidden directory a checkpoint, or delete it if a rank has failed."""
        wait_for_all(self._world)
        rank = dist.get_rank()
        parts: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
        dist.gather_object(part, parts, dst=0, group=self._world)

        error = None
        contents = pending.contents
        path = self.directory / checkpoint_name(contents.step, contents.unfinished_step)
        if rank == 0:
            assert parts is not None
            error = self._publish_on_main_rank(pending, parts, path)
        wait_for_all(self._world)
        error = from_first(error, self._world)
        if error is not None:
            raise CheckpointError(f"the checkpoint {path} was not saved: {error}")
        return path

    def _publish_on_main_rank(
        self, pending: _Pending, parts: list[RankPart], path: Path
    ) -> str | None:
        """Write the manifest and rename the directory; returns the error, if any."""
        began = time.monotonic()
        try:
            for rank, part in enumerate(parts):
                if part.error is not None:
                    raise CheckpointError(f"rank {rank} {part.error}")
            manifest = self._manifest(pending.contents, parts)
            check_sizes(pending.hidden, manifest.files)  # rank 0 must see what all ranks wrote
            write_bytes(pending.hidden, MANIFEST, manifest.to_bytes())
            if self._verify is not None:
                self._verify()
            free = shutil.disk_usage(pending.hidden).free
            _replace(pending.hidden, path)
        except (CheckpointError, OSError) as failure:
            shutil.rmtree(pending.hidden, ignore_errors=True)
            return str(failure)

        # Not the time since then, in which training has gone on.
        seconds = max(part.seconds for part in parts) + time.monotonic() - began
        self.longest_s = max(self.longest_s, seconds)
        logger.info(
            "saved the checkpoint %s in %.1f s: %s; the disk has room for %s more",
            path,
            seconds,
            size_text(sum(file.nbytes for file in manifest.files)),
            size_text(free),
        )
        return None

    def _manifest(self, contents: Contents, parts: list[RankPart]) -> Manifest:
        files = [file for part in parts for file in part.files]
        numbers = {file.path: number for number, file in enumerate(files)}
        models = {}
        for role, engine in contents.models.items():
            models[role] = _stored_model(role, engine, parts, numbers)

        return Manifest(
            step=contents.step,
            unfinished_step=contents.unfinished_step,
            program=self._identity.program,
            world_size=len(parts),
            config=self._identity.config,
            versions=self._versions,
            files=tuple(files),
            models=models,
            frozen=self._identity.frozen,
            metrics=dict(contents.metrics),
        )


def _writer_of_rest(hidden: Path, contents: Contents) -> WriteFiles:
    """Copy everything but the models, as it is now; returns a function that writes it."""
    rank = dist.get_rank()
    numbers = [TensorSource.of(name, tensor) for name, tensor in random_state().items()]
    state = StateCopy.of(contents.state) if rank == 0 else None

    def write() -> list[WrittenFile]:
        path = f"rng/rank_{rank:05d}.safetensors"
        files = [write_tensors(hidden, path, numbers, sync=False)]
        if state is not None:
            files += state.write(hidden, sync=False)
            files += _files_in(hidden, contents.exports)
        return files

    return write


def _stored_model(
    role: str, engine: ModelEngine, parts: list[RankPart], numbers: Mapping[str, int]
) -> StoredModel:
    """One model's entry in the manifest, made of all ranks' parts."""
    places: dict[str, list[Any]] = {name: [] for name in engine.trained_shapes}
    for rank, part in enumerate(parts):
        number = numbers[model_file(role, rank)]
        for box in part.models[role].boxes:
            places[box.name].append((number, box.starts, box.stops))
    tensors = {}
    for name, shape in engine.trained_shapes.items():
        tensors[name] = StoredTensor(tuple(shape), tuple(places[name]))

    slices = [part.models[role] for part in parts]
    return StoredModel(
        head=engine.spec.head,
        hf_config=dict(engine.spec.hf_config),
        dtype=str(engine.dtype).removeprefix("torch."),
        layout=engine.groups.layout.stated,
        kinds=tuple(dict.fromkeys(kind for part in slices for kind in part.kinds)),
        optimizer_steps=max(part.optimizer_steps for part in slices),
        tensors=tensors,
    )


def _files_in(root: Path, directories: Mapping[str, object]) -> list[WrittenFile]:
    """The manifest's lines of all files in these directories of `root`."""
    files = []
    for name in directories:
        for file in sorted((root / name).rglob("*")):
            if file.is_file():
                files.append(describe_file(root, file.relative_to(root).as_posix()))
    return files


def _replace(hidden: Path, path: Path) -> None:
    """Give a whole checkpoint its name, and delete an older one of that name.

    If the process is killed in between, `bring_back_replaced` brings the older one back.
    """
    old = path.with_name(f".{path.name}{REPLACED}")
    if path.exists():
        path.rename(old)
    hidden.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the names are on disk too
    finally:
        os.close(directory)
    shutil.rmtree(old, ignore_errors=True)
