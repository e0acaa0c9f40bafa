"""Converts a model's checkpoint from one format to another, one tensor at a time, in one process.

The result is made in a hidden directory beside its final place and moved there when it is complete
and, if asked for, verified. This file knows the formats by name, but not their contents.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from mrlhf.checkpoint.conversion.adapter_source import AdapterSource, MergedSource
from mrlhf.checkpoint.conversion.identify import Identified, identify
from mrlhf.checkpoint.conversion.megatron_reader import MegatronSource, find_folder
from mrlhf.checkpoint.conversion.megatron_writer import MegatronOptions, write_megatron
from mrlhf.checkpoint.conversion.model_files import HuggingFaceSource, write_hugging_face
from mrlhf.checkpoint.conversion.model_source import ModelSource, TrackedSource
from mrlhf.checkpoint.conversion.training_checkpoints import TrainingSource
from mrlhf.checkpoint.manifest import check_hashes, read_manifest
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.models.families import load_spec

Format = Literal["huggingface", "megatron"]
Progress = Callable[[int], None]
Start = Callable[[str, int], Progress]

# The source options without effect, for each format of a source.
_NOT_READ = {
    "huggingface": ("role", "like", "vocab_size", "model_type", "merge", "base"),
    "adapter": ("role", "like", "vocab_size", "model_type"),
    "training": ("vocab_size", "model_type"),
    "megatron": ("role", "merge", "base"),
}


@dataclass(frozen=True)
class SourceOptions:
    """Facts that a source does not state, and the choice among its models; None if not given."""

    role: str | None = None  # the model of a training checkpoint
    # A Hugging Face model of the same shape, whose `config.json` and tokenizer are used.
    like: Path | None = None
    vocab_size: int | None = None  # rows of the embedding without padding
    model_type: str | None = None  # the family, for a checkpoint of Megatron-LM
    step: int | None = None  # of a run's checkpoint; None for the newest state of the run
    merge: bool | None = None  # whether to merge an adapter into its base
    base: Path | None = None  # the base of an adapter; None for the one that it names


@dataclass(frozen=True)
class TargetOptions:
    """The format of the result, and how to write it."""

    format: Format
    dtype: torch.dtype | None = None  # of the weights; None to keep the source's
    max_file_bytes: int = 5 * 10**9  # a file ends once it has this many bytes
    megatron: MegatronOptions = field(default_factory=MegatronOptions)
    overwrite: bool = False


@dataclass(frozen=True)
class Conversion:
    """The outcome of a conversion."""

    path: Path  # the converted checkpoint; a run's output directory holds several models
    kind: str  # its format in words
    step: int | None  # training step of its weights, if it is known
    tensors: int  # number of converted tensors
    nbytes: int  # their bytes in the result
    left_out: list[str]  # parts of the source that are not in the result
    notes: list[str]  # other facts for the user


def open_source(path: Path, options: SourceOptions) -> ModelSource:
    """Open the checkpoint at `path`, whatever its format; the errors are those of `convert`."""
    return _open(identify(path, options.step, options.role), options)


def _open(found: Identified, options: SourceOptions) -> ModelSource:
    _refuse(_NOT_READ[found.format], options, found.kind)
    if found.format == "huggingface":
        return HuggingFaceSource(found.path, found.step)
    if found.format == "adapter" and not options.merge:
        raise ConfigError(
            f"{found.path} is an adapter, which peft and lora.path take as it is; add --merge to "
            "get a whole model"
        )
    if found.format == "adapter":
        return MergedSource(AdapterSource(found.path, options.base, found.step))
    assets = options.like or found.assets
    if found.format == "training":
        stored = TrainingSource(found.path, options.role, assets, options.base)
        if stored.base is None:
            _refuse(("merge", "base"), options, f"{found.kind} without adapters")
        return MergedSource(stored) if options.merge else stored

    folder = find_folder(found.path)
    assert folder is not None, found
    is_model = assets is not None and (assets / "config.json").is_file()
    return MegatronSource(
        folder,
        like=load_spec(assets, "lm") if assets is not None and is_model else None,
        assets=assets,
        vocab_size=options.vocab_size,
        model_type=options.model_type,
    )


def _refuse(names: Iterable[str], options: SourceOptions, kind: str) -> None:
    """Raise a ConfigError for an option at which a conversion would not look."""
    for name in names:
        if getattr(options, name) is not None:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} has no meaning for a {kind}; leave it out")


def convert(
    source_path: Path,
    target_path: Path,
    source_options: SourceOptions,
    options: TargetOptions,
    *,
    verify: bool,
    start: Start,
) -> Conversion:
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
    found = identify(source_path, source_options.step, source_options.role)
    if source_options.step is not None and found.path == source_path:
        raise ConfigError(f"--step chooses a checkpoint of a run; {found.path} is no run")
    _check_target(source_path, found, target_path, options.overwrite)
    if verify and found.format == "training":
        manifest = read_manifest(found.path)
        check_hashes(found.path, manifest.files)
    source = _open(found, source_options)
    hidden = target_path.parent / f".{target_path.name}.converting"
    try:
        _make_empty(hidden)
        nbytes, notes = _write(source, hidden, options, verify, start)
        _publish(hidden, target_path)
    except OSError as error:
        raise CheckpointError(f"{target_path} was not written: {error}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)

    origin = [f"passed over: {reason}" for reason in found.passed_over]
    if found.step is not None:
        origin.append(f"{found.path} is the policy with which the run in {source_path} ended")
    return Conversion(
        path=found.path,
        kind=source.description.kind,
        step=source.description.step,
        tensors=len(source.tensors),
        nbytes=nbytes,
        left_out=source.description.left_out,
        notes=[*origin, *notes],
    )


def _write(
    source: ModelSource, directory: Path, options: TargetOptions, verify: bool, start: Start
) -> tuple[int, list[str]]:
    """Write the model into an empty directory, and verify it; returns its bytes and notes."""
    expected = TrackedSource(source, options.dtype, lambda nbytes: None)
    nbytes = sum(form.nbytes for form in expected.tensors.values())
    tracked = TrackedSource(source, options.dtype, start("converting", nbytes))
    if options.format == "huggingface":
        notes = write_hugging_face(tracked, directory, options.max_file_bytes)
    elif source.base is not None:
        raise ConfigError("Megatron-LM has no form for adapters alone; add --merge")
    else:
        notes = write_megatron(tracked, directory, options.megatron, options.max_file_bytes)
    if tracked.unread:
        raise CheckpointError(f"{sorted(tracked.unread)[0]} has no place in {options.format}")

    if verify:
        compare(expected, directory, start("verifying", nbytes))
        notes.append(f"verified: all {len(tracked.tensors)} tensors are equal bit by bit")
    return nbytes, notes


def compare(expected: ModelSource, directory: Path, progress: Progress) -> None:
    """Refuse a result that differs in any bit; the CheckpointError names the first such tensor."""
    result: ModelSource
    if expected.base is None:
        result = open_source(directory, SourceOptions())
    else:
        result = AdapterSource(directory, None, None)
    if set(result.tensors) != set(expected.tensors):
        difference = sorted(set(result.tensors) ^ set(expected.tensors))
        raise CheckpointError(f"the result and the source differ in {difference[0]}")

    for name, form in expected.tensors.items():
        wanted = expected.read(name).contiguous()
        found = result.read(name).contiguous()
        same = found.shape == wanted.shape and found.dtype == wanted.dtype
        # The bits: a NaN equals itself, and 0 is not -0.
        if not same or not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
            raise CheckpointError(f"{name} differs between the source and the result")
        progress(form.nbytes)


def _check_target(source: Path, found: Identified, target: Path, overwrite: bool) -> None:
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
