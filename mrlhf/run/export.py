"""Writes a trained model as a complete Hugging Face checkpoint, tokenizer included.

Of a model with adapters, they are written, as peft does; and if wanted the model with them merged.

The files are written to `<directory>.partial`, which is renamed when it is complete. So an earlier
checkpoint stays until the new one is there, and a full disk destroys neither. This file does not
know when a run exports.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from mrlhf.checkpoint.manifest import CHECKPOINTS, checkpoint_name, with_manifest
from mrlhf.checkpoint.output_files import MODEL_FILES
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import CheckpointError, WeightError
from mrlhf.models.adapter_files import write_adapter_config
from mrlhf.models.families import save_config
from mrlhf.models.generation_config import write_generation_config
from mrlhf.parallel.collectives import all_gather_objects, raise_together
from mrlhf.parallel.machine import name_of_this_machine
from mrlhf.printable import size_text
from mrlhf.training.engine import ModelEngine
from mrlhf.training.merging import base_shapes, export_merged
from mrlhf.weights.files import flush

logger = logging.getLogger(__name__)

_MEGABYTE = 10**6


@dataclass(frozen=True)
class ExportedModel:
    """A model with the other contents of its Hugging Face checkpoint, in shards."""

    engine: ModelEngine
    tokenizer: Tokenizer
    max_shard_mb: int
    generation_config: str | None = None
    also_merged: bool = False  # write the model of adapters and base too, when the run ends


def export_result(
    model: ExportedModel, directory: Path, step: int, save: Callable[[], None]
) -> None:
    """Write the final model of a run; every rank calls it.

    If that fails, a checkpoint of the last step is saved. If that fails too, the model is written
    into the machine's directory for temporary files, so that it is not lost.

    Args:
        save: makes sure that there is a checkpoint of the last step, which is `step`; it raises a
            CheckpointError on every rank if there cannot be one.

    Raises:
        CheckpointError: it could not be written there, on every rank; the message says where the
            model is, and how to go on.
    """
    try:
        export_checkpoint(model, directory)
    except CheckpointError as error:
        checkpoints = directory.parent / CHECKPOINTS
        if _is_saved(save):
            kept = checkpoints / checkpoint_name(step, unfinished_step=False)
            raise CheckpointError(
                f"{error}; the trained model is in {kept}: once the cause is gone, start the same "
                f"command again, or with trainer.resume={kept} and another trainer.output_dir, or "
                f"run tools/convert_checkpoint.py {kept} --to huggingface --out DIR, and it is "
                "written"
            ) from error

        where = _rescue(model, directory.name)
        if where is not None:
            raise CheckpointError(
                f"{error}; the trained model was written to {where} instead: move it from there"
            ) from error

        newest_first = with_manifest(checkpoints)
        go_on = f"; go on from {newest_first[0]}" if newest_first else ""
        raise CheckpointError(
            f"{error}; nor could it be written to {tempfile.gettempdir()}, and there is no "
            f"checkpoint of step {step}{go_on}; make room, and set trainer.save_freq, which saves "
            "the last step too"
        ) from error
    if model.also_merged:
        _export_merged(model, directory)


def _export_merged(model: ExportedModel, directory: Path) -> None:
    """Write the model merged, beside its adapters in `directory`."""
    merged = directory.with_name(f"{directory.name}_merged")
    try:
        export_checkpoint(model, merged, merged=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; its adapters are in {directory}: once the cause is gone, run "
            f"tools/convert_checkpoint.py {directory} --merge --to huggingface --out {merged}"
        ) from error


def _is_saved(save: Callable[[], None]) -> bool:
    """Whether there is a checkpoint of the last step, after an attempt to save it."""
    try:
        save()
    except CheckpointError as error:
        if dist.get_rank() == 0:
            logger.error("%s", error)
        return False
    return True


def export_checkpoint(model: ExportedModel, directory: Path, merged: bool = False) -> None:
    """Write a model as a complete Hugging Face checkpoint; every rank calls it.

    `merged` says to write base and adapters as one model. An earlier checkpoint in `directory`,
    which may be a link, is replaced when the new one is complete, and other files stay.

    Raises:
        CheckpointError: there is no room, or a rank could not write, on every rank.
    """
    engine = model.engine
    world = engine.groups.world
    is_main = dist.get_rank() == 0
    place = Path(os.path.realpath(directory))
    partial = place.with_name(f"{place.name}.partial")

    try:
        is_whole = merged or engine.spec.lora is None
        shapes = base_shapes(engine) if is_whole else engine.trained_shapes
        needed = sum(map(math.prod, shapes.values())) * engine.dtype.itemsize
        prepared = _prepare(needed, place, partial) if is_main else None
        raise_together(prepared, CheckpointError, world)
        raise_together(_write(model, partial, merged), CheckpointError, world)
        installed = _install(partial, place) if is_main else None
        raise_together(installed, CheckpointError, world)
    except CheckpointError as error:
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{directory} was not written: {error}") from error
    if is_main:
        logger.info("wrote the Hugging Face checkpoint %s", directory)


def _prepare(needed: int, place: Path, partial: Path) -> str | None:
    """Make an empty directory with room for the `needed` bytes; an error message, or None."""
    replaced = _replaced(place)
    try:
        if replaced.is_dir() and not place.exists():
            replaced.rename(place)  # a process was killed while it replaced the checkpoint
        if place.exists() and not place.is_dir():
            return f"{place} is a file; move it away"
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
    except OSError as failure:
        return f"cannot make {partial}: {failure.strerror or failure}"

    if free < needed:
        return (
            f"{partial.parent} has room for {size_text(free)}, and the model takes "
            f"{size_text(needed)}"
        )
    return None


def _write(model: ExportedModel, partial: Path, merged: bool) -> str | None:
    """Write this rank's part; returns an error message or None."""
    engine = model.engine
    try:
        max_shard_bytes = model.max_shard_mb * _MEGABYTE
        if merged:
            export_merged(engine, partial, max_shard_bytes)
        else:
            engine.export(partial, max_shard_bytes)
    except WeightError as failure:
        return str(failure)
    except Exception as failure:  # no bug may cost the model
        logger.exception("the export has failed")
        return f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    if dist.get_rank() > 0:
        return None

    try:
        if merged or engine.spec.lora is None:
            save_config(engine.spec, partial, engine.dtype)
        else:
            write_adapter_config(engine.spec, os.path.abspath(engine.path), partial)
        model.tokenizer.save_pretrained(partial, engine.spec.pad_id)
        if model.generation_config is not None:
            write_generation_config(model.generation_config, partial)
        for file in partial.iterdir():
            flush(file)
    except Exception as failure:  # the tokenizers package raises nothing more particular
        return f"cannot write {partial}: {' '.join(str(failure).split())}"
    return None


def _install(partial: Path, place: Path) -> str | None:
    """Give a complete checkpoint its final name; returns an error message or None."""
    replaced = _replaced(place)
    try:
        shutil.rmtree(replaced, ignore_errors=True)
        if place.exists():
            place.rename(replaced)
        partial.rename(place)
        if replaced.exists():
            _keep_other_files(replaced, place)
    except OSError as failure:
        if replaced.exists() and not place.exists():
            replaced.rename(place)
        return f"cannot rename {partial} to {place}: {failure.strerror or failure}"
    shutil.rmtree(replaced, ignore_errors=True)
    return None


def _keep_other_files(replaced: Path, place: Path) -> None:
    """Move the files that belong to no checkpoint from the replaced directory into the new one."""
    for path in replaced.iterdir():
        of_checkpoint = path.is_file() and any(path.match(pattern) for pattern in MODEL_FILES)
        if not of_checkpoint and not (place / path.name).exists():
            path.rename(place / path.name)


def _replaced(place: Path) -> Path:
    return place.with_name(f".{place.name}.replaced")


def _rescue(model: ExportedModel, name: str) -> Path | None:
    """Write the model into the machine's temporary files; returns where, or None if that fails."""
    made: str | None = None
    if dist.get_rank() == 0:
        try:
            made = tempfile.mkdtemp(prefix="mrlhf-")
        except OSError:
            made = None
    told = all_gather_objects((name_of_this_machine(), made), model.engine.groups.world)
    root = told[0][1]
    # Ranks on several machines share no such directory.
    if root is None or len({machine for machine, _ in told}) > 1:
        return None

    try:
        export_checkpoint(model, Path(root) / name)
    except CheckpointError:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        return None
    return Path(root) / name
