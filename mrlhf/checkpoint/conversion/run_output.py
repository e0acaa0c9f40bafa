"""Which model of a run's output directory is meant: its final policy, or one of its checkpoints.

A finished run has gone on after its newest checkpoint, unless that is of its last step. This file
reads what a run writes; it does not know how a model is converted.
"""

from __future__ import annotations

import json
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
from mrlhf.errors import CheckpointError

_SUMMARY = "summary.json"
_CONFIG = "config.json"


@dataclass(frozen=True)
class Selection:
    """What of a run's output directory is asked for.

    Attributes:
        step: of the checkpoint; None for the newest state of the run.
        role: of the model; None for the policy.
        whole: whether the optimizer state is wanted too, which checkpoints alone have.
    """

    step: int | None = None
    role: str | None = None
    whole: bool = False


@dataclass(frozen=True)
class Choice:
    """What is meant.

    Attributes:
        path: of a checkpoint, or of the exported policy.
        step: of the run, if it is the exported policy.
        passed_over: why newer checkpoints were not taken.
    """

    path: Path
    step: int | None
    passed_over: list[str]


@dataclass(frozen=True)
class _Finished:
    """A run that has come to its end: where its policy is, and of which step."""

    policy: Path
    step: int


def choose(directory: Path, wanted: Selection) -> Choice | None:
    """What of the output directory of a run is wanted; None if it is no such directory.

    Raises:
        CheckpointError: it does not hold what is wanted; the message says what it holds.
    """
    newest_first = checkpoints_in(directory / CHECKPOINTS) or checkpoints_in(directory)
    is_finished = (directory / _SUMMARY).is_file()
    finished = None
    if wanted.step is None and is_finished:
        finished = _finished(directory)
    elif wanted.step is not None and (newest_first or is_finished):
        newest_first = _of_step(directory, newest_first, wanted.step)

    passed_over: list[str] = []
    newest, manifest = _newest_whole(newest_first, passed_over)
    if finished is None:
        if newest is None and passed_over:
            raise CheckpointError(passed_over[0])
        return None if newest is None else Choice(newest, None, passed_over)

    end = (finished.step, False)
    reached = end if manifest is None else (manifest.step, manifest.unfinished_step)
    has_policy = (finished.policy / _CONFIG).is_file()
    takes_policy = has_policy and not wanted.whole and wanted.role in (None, finished.policy.name)
    if newest is not None and (reached > end or (reached == end and not takes_policy)):
        return Choice(newest, None, passed_over)
    if takes_policy:
        return Choice(finished.policy, finished.step, [])

    ended = f"{directory} holds a run that has ended with step {finished.step}"
    where = f"; the policy of its end is {finished.policy}" if has_policy else ""
    if newest is None:
        raise CheckpointError(f"{ended}, and no whole checkpoint{where}")
    raise CheckpointError(
        f"{ended}, and its newest checkpoint is {newest.name}, which --step {reached[0]} "
        f"takes{where}"
    )


def models_in(directory: Path) -> list[str]:
    """The folders in `directory` that hold a Hugging Face model."""
    return sorted(path.parent.name for path in directory.glob(f"*/{_CONFIG}"))


def _finished(directory: Path) -> _Finished | None:
    """What the summary says, which a run writes last, and deletes when it goes on.

    Raises:
        CheckpointError: it is damaged, so nobody knows which model is the newest.
    """
    try:
        summary = json.loads((directory / _SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{directory / _SUMMARY} is damaged, so it does not say with which policy the run "
            "ended; name the policy or a checkpoint in place of the directory"
        ) from error
    try:
        stated = Path(summary["checkpoint"])
        step = int(summary["steps"])
    except (KeyError, TypeError, ValueError):  # of something else than a run
        return None
    own = directory / stated.name  # the directory may have been moved since
    return _Finished(stated if stated.is_dir() and not own.is_dir() else own, step)


def _of_step(directory: Path, checkpoints: list[Path], step: int) -> list[Path]:
    """The checkpoints of a step, that of its end first.

    Raises:
        CheckpointError: there is none.
    """
    names = [checkpoint_name(step, unfinished_step=part) for part in (False, True)]
    found = [path for path in reversed(checkpoints) if path.name in names]
    if not found:
        there = ", ".join(path.name for path in reversed(checkpoints)) or "no checkpoint"
        raise CheckpointError(f"{directory} has no checkpoint of step {step}; it has {there}")
    return found


def _newest_whole(
    newest_first: list[Path], passed_over: list[str]
) -> tuple[Path | None, Manifest | None]:
    """The first of these that is whole, by its manifest and the sizes of its files."""
    for path in newest_first:
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return path, manifest
    return None, None
