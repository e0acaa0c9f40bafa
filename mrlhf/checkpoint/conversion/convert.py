"""Converts a model's checkpoint from one format to another, one tensor at a time, in one process.

The result is made in a hidden directory beside its final place and moved there when it is complete
and, if asked for, verified. This file knows the formats by name, but not their contents.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from mrlhf.checkpoint.conversion.identify import Found, identify
from mrlhf.checkpoint.conversion.megatron_reader import MegatronSource, find_place
from mrlhf.checkpoint.conversion.megatron_writer import MegatronOptions, write_megatron
from mrlhf.checkpoint.conversion.model_files import HuggingFaceSource, write_hugging_face
from mrlhf.checkpoint.conversion.model_source import ModelSource, TrackedSource, equal_bits
from mrlhf.checkpoint.conversion.run_output import Selection
from mrlhf.checkpoint.conversion.training_checkpoints import TrainingSource
from mrlhf.checkpoint.manifest import check_hashes, read_manifest
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.models.families import load_spec
from mrlhf.models.spec import ModelSpec

Format = Literal["huggingface", "megatron"]
Progress = Callable[[int], None]
Start = Callable[[str, int], Progress]

_NOT_READ = {
    "huggingface": ("role", "like", "vocab_size", "model_type"),
    "training": ("vocab_size", "model_type"),
    "megatron": ("role",),
}
"""The source options without effect, for each format of a source."""


@dataclass(frozen=True)
class SourceOptions:
    """Facts that a source does not state, and the choice among its models; None if not given.

    Attributes:
        role: the model of a training checkpoint.
        like: a Hugging Face model of the same shape, whose `config.json` and tokenizer are used.
        vocab_size: rows of the embedding without padding.
        model_type: the family, for a checkpoint of Megatron-LM.
        step: training step of a run's checkpoint; None for the newest state of the run.
    """

    role: str | None = None
    like: Path | None = None
    vocab_size: int | None = None
    model_type: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class TargetOptions:
    """The format of the result, and how to write it.

    Attributes:
        dtype: dtype of the weights; None to keep the source's.
        max_file_bytes: a file ends once it has this many bytes.
    """

    format: Format
    dtype: torch.dtype | None = None
    max_file_bytes: int = 5 * 10**9
    megatron: MegatronOptions = field(default_factory=MegatronOptions)
    overwrite: bool = False


@dataclass(frozen=True)
class Report:
    """The outcome of a conversion.

    Attributes:
        path: the converted checkpoint; a run's output directory holds several models.
        kind: its format in words.
        step: training step of its weights, if it is known.
        tensors: number of converted tensors.
        nbytes: their bytes in the result.
        left_out: parts of the source that are not in the result.
        notes: other facts for the user.
    """

    path: Path
    kind: str
    step: int | None
    tensors: int
    nbytes: int
    left_out: list[str]
    notes: list[str]


def open_source(path: Path, options: SourceOptions) -> ModelSource:
    """Open the checkpoint at `path`, whatever its format.

    Raises:
        CheckpointError, ConfigError, WeightError: it is no checkpoint, not whole, or of a model
            that we do not know.
    """
    return _open(identify(path, Selection(options.step, options.role)), options)


def _open(found: Found, options: SourceOptions) -> ModelSource:
    for name in _NOT_READ[found.format]:
        if getattr(options, name) is not None:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} has no meaning for a {found.kind}; leave it out")

    if found.format == "huggingface":
        return HuggingFaceSource(found.path, found.step)
    if found.format == "training":
        assets = options.like or found.assets
        return TrainingSource(found.path, options.role, assets)

    place = find_place(found.path)
    assert place is not None, found
    return MegatronSource(
        place,
        like=_like(options, found),
        assets=options.like or found.assets,
        vocab_size=options.vocab_size,
        model_type=options.model_type,
    )


def convert(
    source_path: Path,
    target_path: Path,
    source_options: SourceOptions,
    options: TargetOptions,
    *,
    verify: bool,
    start: Start,
) -> Report:
    """Write the checkpoint at `source_path` in another format to `target_path`.

    Args:
        target_path: must not exist, unless `overwrite` is set.
        verify: compare the source with its hashes, if it has any; read the result again, and
            compare every tensor bit for bit.
        start: begins a task, given its name and bytes; the result is called with the bytes done.

    Raises:
        CheckpointError, ConfigError, WeightError: the source is not usable, the result would lose
            something, or the file system refuses.
    """
    found = identify(source_path, Selection(source_options.step, source_options.role))
    if source_options.step is not None and found.path == source_path:
        raise ConfigError(f"--step chooses a checkpoint of a run; {found.path} is no run")
    _check_target(source_path, found, target_path, options.overwrite)
    if verify:
        _check_hashes(found)
    source = _open(found, source_options)
    hidden = target_path.parent / f".{target_path.name}.converting"
    try:
        nbytes = sum(form.nbytes for form in _in_dtype(source, options.dtype).tensors.values())
        progress = start("converting", nbytes)
        _make_empty(hidden)
        tracked = TrackedSource(source, options.dtype, progress)
        notes = _write(tracked, hidden, options)
        if tracked.unread:
            raise CheckpointError(f"{sorted(tracked.unread)[0]} has no place in {options.format}")

        if verify:
            compare(_in_dtype(source, options.dtype), hidden, start("verifying", nbytes))
            notes = [*notes, f"verified: all {len(tracked.tensors)} tensors are equal bit by bit"]
        _publish(hidden, target_path)
    except OSError as error:
        raise CheckpointError(f"{target_path} was not written: {error}") from error
    finally:
        source.close()
        shutil.rmtree(hidden, ignore_errors=True)

    description = source.describe()
    notes = [*_origin(source_path, found), *notes]
    return Report(
        path=found.path,
        kind=description.kind,
        step=description.step,
        tensors=len(tracked.tensors),
        nbytes=nbytes,
        left_out=description.left_out,
        notes=notes,
    )


def compare(expected: ModelSource, directory: Path, progress: Progress) -> None:
    """Refuse a result that differs in any bit; the CheckpointError names the first such tensor."""
    result = open_source(directory, SourceOptions())
    try:
        if set(result.tensors) != set(expected.tensors):
            difference = sorted(set(result.tensors) ^ set(expected.tensors))
            raise CheckpointError(f"the result and the source differ in {difference[0]}")

        for name, form in expected.tensors.items():
            wanted = expected.read(name)
            found = result.read(name)
            same = found.shape == wanted.shape and found.dtype == wanted.dtype
            if not same or not equal_bits(found, wanted):
                raise CheckpointError(f"{name} differs between the source and the result")
            progress(form.nbytes)
    finally:
        result.close()


def _write(source: ModelSource, directory: Path, options: TargetOptions) -> list[str]:
    if options.format == "huggingface":
        return write_hugging_face(source, directory, options.max_file_bytes)
    return write_megatron(source, directory, options.megatron)


def _in_dtype(source: ModelSource, dtype: torch.dtype | None) -> ModelSource:
    return TrackedSource(source, dtype, lambda nbytes: None)


def _like(options: SourceOptions, found: Found) -> ModelSpec | None:
    directory = options.like or found.assets
    if directory is None or not (directory / "config.json").is_file():
        return None
    return load_spec(directory, "lm")


def _origin(source: Path, found: Found) -> list[str]:
    """Notes for the user on how the model was found in the source."""
    notes = [f"passed over: {reason}" for reason in found.passed_over]
    if found.step is not None:
        notes.append(f"{found.path} is the policy with which the run in {source} ended")
    return notes


def _check_hashes(found: Found) -> None:
    """Refuse a training checkpoint with a file that does not have its hash."""
    if found.format == "training":
        manifest = read_manifest(found.path)
        check_hashes(found.path, manifest, range(len(manifest.files)))


def _check_target(source: Path, found: Found, target: Path, overwrite: bool) -> None:
    for path in (source.resolve(), found.path.resolve()):
        if target.resolve() == path or target.resolve() in path.parents:
            raise CheckpointError(f"{target} holds the source; give another directory")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())) and not overwrite:
        raise CheckpointError(f"{target} is there already; give another one, or --overwrite")


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error.strerror or error}") from error


def _publish(hidden: Path, target: Path) -> None:
    """Move a complete result to its place, and remove what was there."""
    old = target.parent / f".{target.name}.replaced"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    hidden.rename(target)
    shutil.rmtree(old, ignore_errors=True)
