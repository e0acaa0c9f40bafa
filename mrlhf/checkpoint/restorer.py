"""Chooses the checkpoint that a run goes on from, and brings it back.

All ranks share the work of checking the files against the manifest. This file does not know what
the state means.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from mrlhf.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    check_hashes,
    check_sizes,
    checkpoints_in,
    read_manifest,
)
from mrlhf.checkpoint.model_slices import load_slices
from mrlhf.checkpoint.state_tree import read_state, restore_random_state
from mrlhf.errors import CheckpointError
from mrlhf.parallel.collectives import from_first, together
from mrlhf.training.engine import ModelEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been found to be whole."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]  # everything but models and random numbers

    def load_models(self, models: Mapping[str, ModelEngine]) -> None:
        """Fill the models, which have their optimizers; each rank reads what it needs."""
        missing = sorted(models.keys() - self.manifest.models.keys())
        if missing:
            stored = ", ".join(sorted(self.manifest.models)) or "no model"
            raise CheckpointError(
                f"{self.path} holds {stored}, and this run also trains {', '.join(missing)}; "
                "begin a new run, with the exported model as its path"
            )
        for role, engine in models.items():
            load_slices(engine, self.path, self.manifest, role)

    def restore_random_numbers(self) -> None:
        """Restore the random number generators, if there are as many ranks as there were."""
        if self.manifest.world_size == dist.get_world_size():
            file = self.path / f"rng/rank_{dist.get_rank():05d}.safetensors"
            restore_random_state(load_file(file))


def newest_checkpoint(
    directory: Path, world: dist.ProcessGroup, damaged: list[Path]
) -> Checkpoint | None:
    """The newest whole checkpoint, or None; adds those that are `damaged`. Every rank calls it."""
    # The ranks must look at the same ones.
    for name in from_first([path.name for path in checkpoints_in(directory)], world):
        try:
            return open_checkpoint(directory / name, world)
        except CheckpointError as error:
            damaged.append(directory / name)
            if dist.get_rank() == 0:
                logger.warning("%s; the checkpoint before it is tried", error)
    return None


def open_checkpoint(path: Path, world: dist.ProcessGroup) -> Checkpoint:
    """Check every byte of the checkpoint in directory `path`, and read it; every rank calls it.

    If it is not whole or damaged, every rank raises a CheckpointError that names the file.
    """
    rank = dist.get_rank(world)
    content = None
    if rank == 0:
        with contextlib.suppress(OSError):  # `read_manifest` says why, on every rank
            content = (path / MANIFEST).read_bytes()
    content = from_first(content, world)

    with together(CheckpointError, world):  # a file that is cut short is found at once
        manifest = read_manifest(path, content)
        share = manifest.files[rank :: dist.get_world_size(world)]
        check_sizes(path, share)
    with together(CheckpointError, world):
        check_hashes(path, share)
        state = read_state(path)
    return Checkpoint(path, manifest, state)


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint so that it is no longer found."""
    number = 1
    while (aside := path.with_name(f"damaged_{number}.{path.name}")).exists():
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        logger.warning("cannot rename %s: %s", path, error)
