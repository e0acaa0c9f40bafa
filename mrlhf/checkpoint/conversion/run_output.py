"""Chooses a model in a run's output directory: its final policy, or one of its checkpoints.

A finished run has continued after its newest checkpoint, unless that is of its last step. This file
reads a run's files; it does not know how a model is converted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mrlhf.checkpoint.manifest import (
    CHECKPOINTS,
    Manifest,
    check_sizes,
    checkpoint_name,
    checkpoints_in,
    read_manifest,
)
from mrlhf.checkpoint.output_files import SUMMARY, read_summary
from mrlhf.errors import CheckpointError, DataError

_CONFIG = "config.json"
ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class ChosenModel:
    """The chosen model."""

    path: Path  # a checkpoint, or the exported policy
    step: int | None  # the run's last step, if it is the exported policy
    passed_over: list[str]  # why newer checkpoints were not taken


def choose(directory: Path, step: int | None, role: str | None) -> ChosenModel | None:
    """Choose a model in the output directory of a run; None if it is no such directory.

    Without `step`, it is the newest state of the run; without `role`, its policy. A CheckpointError
    says what the directory holds in place of what is wanted.
    """
    newest_first = checkpoints_in(directory / CHECKPOINTS) or checkpoints_in(directory)
    is_finished = (directory / SUMMARY).is_file()
    final = None
    if step is None and is_finished:
        final = _final_policy(directory)
    elif step is not None and (newest_first or is_finished):
        newest_first = _of_step(directory, newest_first, step)

    passed_over: list[str] = []
    newest, manifest = _newest_whole(newest_first, passed_over)
    if final is None:
        if newest is None and passed_over:
            raise CheckpointError(passed_over[0])
        return None if newest is None else ChosenModel(newest, None, passed_over)

    policy, last_step = final
    end = (last_step, False)
    reached = end if manifest is None else (manifest.step, manifest.unfinished_step)
    has_policy = any((policy / name).is_file() for name in (_CONFIG, ADAPTER))
    takes_policy = has_policy and role in (None, policy.name)
    if newest is not None and (reached > end or (reached == end and not takes_policy)):
        return ChosenModel(newest, None, passed_over)
    if takes_policy:
        return ChosenModel(policy, last_step, [])

    ended = f"{directory} holds a run that has ended with step {last_step}"
    where = f"; the policy of its end is {policy}" if has_policy else ""
    if newest is None:
        raise CheckpointError(f"{ended}, and no whole checkpoint{where}")
    raise CheckpointError(
        f"{ended}, and its newest checkpoint is {newest.name}, which --step {reached[0]} "
        f"takes{where}"
    )


def models_in(directory: Path) -> list[str]:
    """The folders in `directory` that hold a Hugging Face model."""
    return sorted(path.parent.name for path in directory.glob(f"*/{_CONFIG}"))


def _final_policy(directory: Path) -> tuple[Path, int] | None:
    """The policy with which a run has ended, and its step, by the summary that it wrote last."""
    try:
        summary = read_summary(directory)
    except DataError as error:
        raise CheckpointError(
            f"{error}. It does not say with which policy the run ended; or name the policy or a "
            "checkpoint in place of the directory"
        ) from error
    if summary is None:
        return None

    try:
        stated = Path(summary["checkpoint"])
        step = int(summary["steps"])
    except (KeyError, TypeError, ValueError):  # not the summary of a run
        return None
    own = directory / stated.name  # the directory may have been moved since
    return (stated if stated.is_dir() and not own.is_dir() else own), step


def _of_step(directory: Path, checkpoints: list[Path], step: int) -> list[Path]:
    """The checkpoints of a step; the one at its end comes first."""
    names = [checkpoint_name(step, unfinished_step=part) for part in (False, True)]
    found = [path for path in reversed(checkpoints) if path.name in names]
    if not found:
        there = ", ".join(path.name for path in reversed(checkpoints)) or "no checkpoint"
        raise CheckpointError(f"{directory} has no checkpoint of step {step}; it has {there}")
    return found


def _newest_whole(
    newest_first: list[Path], passed_over: list[str]
) -> tuple[Path | None, Manifest | None]:
    """The first checkpoint that is whole, by its manifest and the sizes of its files."""
    for path in newest_first:
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest.files)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return path, manifest
    return None, None
