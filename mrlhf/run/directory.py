"""Decides what a new job may do with the run that its output directory holds.

A run is never overwritten in silence: a new job continues it, sets its rows aside, deletes it if
`trainer.overwrite` says so, or refuses. One process decides for all ranks, while it holds the lock.
Nothing is changed until all other checks have passed. This file does not know what is in a
checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from mrlhf.checkpoint.manifest import (
    CHECKPOINTS,
    bring_back_replaced,
    checkpoint_name,
    checkpoints_in,
    named_checkpoint,
    read_manifest,
    with_manifest,
)
from mrlhf.checkpoint.output_files import (
    ALARMS,
    CONFIG,
    METRICS,
    RUN_RECORD,
    SUMMARY,
    TENSORBOARD,
    WRITTEN,
)
from mrlhf.config.load import changed_keys, dump_yaml
from mrlhf.config.roots import Root
from mrlhf.config.tree import flatten, leaves
from mrlhf.errors import CheckpointError, ConfigError, MrlhfError
from mrlhf.log import parse_metrics_line
from mrlhf.version import code_version

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpeningOptions:
    """The keys, starters and inputs that decide what becomes of an earlier run."""

    resume: str  # `trainer.resume`
    overwrite: bool  # `trainer.overwrite`
    names: Collection[str]  # names of what started this run: a scheduler's job, a launcher's run
    again: Collection[str]  # those of `names` that have started it before
    inputs: Collection[Path]  # files and directories that the run reads; they are not deleted


@dataclass(frozen=True)
class DirectoryContents:
    """The parts of a run that a directory holds."""

    rows: bool  # whether there are metrics
    finished: bool  # whether there is a summary, which is written last
    newest: str | None  # name of the newest checkpoint; None if there is none

    @property
    def is_run(self) -> bool:
        """Whether there is anything that must not be lost."""
        return self.rows or self.finished or self.newest is not None


@dataclass(frozen=True)
class _RunRecord:
    """The record in `run.json` of how a run began."""

    started_by: tuple[str, ...]  # names of what has started it last
    # The absolute path in `trainer.resume` when the run began from a checkpoint of another run;
    # else None.
    begun_from: str | None


@dataclass(frozen=True)
class Opening:
    """A plan for the output directory."""

    # A checkpoint, or a folder of checkpoints whose newest whole one is meant; None to start from
    # the beginning.
    resume_from: Path | None
    begun_from: str | None = None
    change: Callable[[], None] = lambda: None  # sets aside or deletes what lies in the way


def plan_opening(directory: Path, options: OpeningOptions) -> Opening:
    """Decide what a run may do with `directory`; ConfigError if it must not be touched."""
    bring_back_replaced(directory / CHECKPOINTS)
    return _plan(directory, _contents(directory), options)


def describe_opening(directory: Path, options: OpeningOptions) -> str:
    """Say what a start would do with `directory` now; nothing is changed."""
    contents = _contents(directory)
    try:
        opening = _plan(directory, contents, options)
    except ConfigError as error:
        return f"a start would be refused: {error}"

    begins = "begin at step 1"
    if opening.resume_from is not None:
        newest_first = with_manifest(opening.resume_from)
        begins = f"go on from {newest_first[0] if newest_first else opening.resume_from}"
    elif contents.is_run and not options.overwrite:
        begins += ", and set aside the rows of a run that left no checkpoint"
    if options.overwrite and contents.is_run:
        begins = f"delete the run in {directory} and {begins}"
    return f"a start would {begins}"


def begun_keys(directory: Path, options: OpeningOptions) -> dict[str, Any]:
    """The keys of the run that a start would go on with; none of a new one."""
    with suppress(MrlhfError, OSError):
        source = _plan(directory, _contents(directory), options).resume_from
        for folder in () if source is None else (*with_manifest(source), source):
            with suppress(CheckpointError):
                return dict(leaves(read_manifest(folder).config))
    return {}


def open_directory(
    directory: Path, config: Root, options: OpeningOptions, opening: Opening
) -> None:
    """Carry out the plan, and write the configuration into `directory`.

    Raises:
        OSError: it cannot be written. If there is no room for the new files, nothing is changed.
    """
    resume_from = opening.resume_from
    record = {
        "started_by": list(options.names),
        "resumed_from": str(resume_from) if resume_from else None,
        "begun_from": opening.begun_from,
        "command": f"{sys.argv[0]} {shlex.join(sys.argv[1:])}",
        "code": code_version(),
    }
    files = {CONFIG: dump_yaml(config), RUN_RECORD: json.dumps(record) + "\n"}
    written = []
    try:
        for name, text in files.items():
            temporary = directory / f".{name}.tmp"
            written.append(temporary)
            temporary.write_text(text, encoding="utf-8")
    except OSError:
        for temporary in written:
            temporary.unlink(missing_ok=True)
        raise

    opening.change()
    _keep_earlier_config(directory, config)
    for name, temporary in zip(files, written, strict=True):
        temporary.replace(directory / name)


def inputs_in(config: Root) -> list[Path]:
    """The existing files and directories that values of the configuration name."""
    texts = []
    for value in flatten(config).values():
        texts += value if isinstance(value, list) else [value]
    return [Path(text) for text in texts if isinstance(text, str) and os.path.exists(text)]


def _contents(directory: Path) -> DirectoryContents:
    rows = directory / METRICS
    newest_first = checkpoints_in(directory / CHECKPOINTS)
    return DirectoryContents(
        rows=rows.is_file() and rows.stat().st_size > 0,
        finished=(directory / SUMMARY).is_file(),
        newest=newest_first[0].name if newest_first else None,
    )


def _plan(directory: Path, contents: DirectoryContents, options: OpeningOptions) -> Opening:
    own = directory / CHECKPOINTS if contents.newest else None
    record = _read_record(directory)
    asked = os.path.abspath(options.resume)

    is_again = any(name in record.started_by for name in options.again)
    if contents.is_run and is_again and own is not None:
        # This very job has begun the run, and has dealt with the earlier run as its keys ask.
        return Opening(own, record.begun_from)

    # The same command continues the run that it has begun from that checkpoint.
    goes_on = options.resume == "auto" or record.begun_from == asked
    ended_with = checkpoint_name(_last_step(directory), unfinished_step=False)
    is_whole = not contents.finished or contents.newest == ended_with
    if goes_on and not options.overwrite and own is not None and is_whole:
        # It is written again at the end; until then the run is not finished.
        finish_anew = partial((directory / SUMMARY).unlink, missing_ok=True)
        return Opening(own, record.begun_from, finish_anew)

    named = _named_checkpoint(options.resume)
    begun_from = None if named is None else asked
    if contents.is_run and is_again:
        return Opening(named, begun_from, partial(_set_aside_rows, directory))

    places = [directory.resolve(), (directory / CHECKPOINTS).resolve()]  # which may be a link
    if named is not None and any(map(named.is_relative_to, places)):
        if options.overwrite:
            raise ConfigError(
                f"trainer.overwrite would delete {named}, which trainer.resume names; leave one of "
                "them out"
            )
        return Opening(named, record.begun_from, partial(_set_aside_after, directory, named))

    if options.overwrite and (contents.is_run or (directory / RUN_RECORD).is_file()):
        return Opening(named, begun_from, partial(_delete_run, directory, options.inputs))
    if not contents.is_run:
        return Opening(named, begun_from)
    if goes_on and own is None and not contents.finished:
        return Opening(named, begun_from, partial(_set_aside_rows, directory))
    raise _refusal(directory, contents)


def _last_step(directory: Path) -> int:
    """The step of the last row of a run's metrics; -1 if that cannot be read."""
    try:
        lines = (directory / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return -1
    last = parse_metrics_line(lines[-1]) if lines else None
    return -1 if last is None else int(last["step"])


def _refusal(directory: Path, contents: DirectoryContents) -> ConfigError:
    holds = "a run"
    if contents.newest is not None:
        kind = "a finished run" if contents.finished else "a run"
        holds = f"{kind} with the checkpoint {contents.newest}"
    elif contents.finished:
        holds = "a finished run without a checkpoint to go on from"

    go_on = ""
    if contents.newest is not None and contents.finished:
        newest = directory / CHECKPOINTS / contents.newest
        go_on = f"trainer.resume={newest} trains from it again, "
    elif contents.newest is not None:
        go_on = "trainer.resume=auto goes on from it, "
    return ConfigError(
        f"trainer.output_dir {directory} holds {holds}; {go_on}trainer.overwrite=true deletes it, "
        "or give another trainer.output_dir"
    )


def _named_checkpoint(resume: str) -> Path | None:
    """The checkpoint that `trainer.resume` names, or the checkpoints of the run that it names."""
    if resume in ("auto", "never"):
        return None

    path = Path(resume)
    found = named_checkpoint(path)
    if found is not None:
        return found
    what = "has no whole checkpoint" if path.is_dir() else "does not exist"
    raise ConfigError(
        f"trainer.resume names {path}, which {what}; give a checkpoint, the output directory of a "
        "run that has one, auto or never"
    )


def _read_record(directory: Path) -> _RunRecord:
    """The record in `run.json`; an empty one if it cannot be read."""
    try:
        read = json.loads((directory / RUN_RECORD).read_text(encoding="utf-8"))
        return _RunRecord(tuple(read["started_by"]), read.get("begun_from"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _RunRecord((), None)


def _set_aside_rows(directory: Path) -> None:
    """Rename the rows and curves of a run that left no checkpoint."""
    number = _newest_number(directory) + 1
    for name in (TENSORBOARD, ALARMS, METRICS):
        with suppress(FileNotFoundError):
            (directory / name).rename(_aside(directory / name, number))

    logger.warning(
        "%s holds a run that ended before its first checkpoint: it begins anew, and its metrics "
        "are kept in %s",
        directory,
        _aside(directory / METRICS, number).name,
    )


def _set_aside_after(directory: Path, named: Path) -> None:
    """Set aside all that the run has left after a checkpoint of its own, under one number.

    Otherwise it would be taken for that of the steps to come. If `named` is a folder of
    checkpoints, its newest one is meant, and files stay as they are.
    """
    number = _newest_number(directory) + 1
    newest_first = checkpoints_in(named.parent)
    if named in newest_first:
        step = int(named.name.split("_")[1])
        later = newest_first[: newest_first.index(named)]
        for folder in WRITTEN.keys() - {CHECKPOINTS}:
            for path in sorted((directory / folder).glob("*step_*")):
                found = re.match(r"(failed_)?step_(\d+)", path.name)
                later += [path] if found and int(found[2]) > step else []

        for path in later:
            kept = path.rename(path.with_name(f"before_{number}.{path.name}"))
            logger.warning("going back to %s: %s is kept as %s", named.name, path.name, kept.name)
        if _last_step(directory) > step:
            for name in (METRICS, ALARMS, TENSORBOARD, SUMMARY):  # earlier rows are still needed
                path = directory / name
                if path.exists():
                    copy = shutil.copytree if path.is_dir() else shutil.copyfile
                    copy(path, _aside(path, number))
    (directory / SUMMARY).unlink(missing_ok=True)


def keep_aside(directory: Path, path: Path, is_replayed: bool) -> None:
    """Rename what is of an abandoned step, if it is there, by the newest number that is free.

    If the run does that step again, as after a crash, the number is 0, so that one copy is kept
    however often it stops.
    """
    number = max(1, _newest_number(directory))
    kept = _aside(path, 0 if is_replayed else number + _aside(path, number).exists())
    if path.exists():
        if is_replayed:
            shutil.rmtree(kept, ignore_errors=True)
        path.rename(kept)
        logger.warning("%s is not of this run's steps now, and is kept as %s", path, kept.name)


def _newest_number(directory: Path) -> int:
    """The number of what was set aside last; 0 if nothing was."""
    kept = (*directory.glob("*before_*"), *directory.glob("*/before_*"))
    found = (re.search(r"before_(\d+)", path.name) for path in kept)
    return max((int(match[1]) for match in found if match), default=0)


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.before_{number}{path.suffix}")


def _delete_run(directory: Path, inputs: Collection[Path]) -> None:
    """Delete all files that a run has written, and nothing else."""
    kept = [path.resolve() for path in inputs]
    for folder, patterns in WRITTEN.items():
        for pattern in patterns:
            for path in (directory / folder).glob(pattern):
                if not any(_overlap(path.resolve(), other, directory) for other in kept):
                    _delete(path)
        with suppress(OSError):  # it holds other files, or is the current directory
            if folder != ".":
                (directory / folder).rmdir()
    logger.warning("trainer.overwrite: the run in %s is deleted", directory)


def _overlap(path: Path, other: Path, directory: Path) -> bool:
    """Whether one path lies in the other; the output directory itself does not count."""
    if directory.resolve().is_relative_to(other):
        return False
    return path.is_relative_to(other) or other.is_relative_to(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _keep_earlier_config(directory: Path, config: Root) -> None:
    """Rename an earlier `config.yaml` if it differs."""
    path = directory / CONFIG
    try:
        earlier = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    if earlier == dump_yaml(config):
        return

    names = (directory / f"config.{number}.yaml" for number in count(1))
    kept = path.rename(next(name for name in names if not name.exists()))
    changed = ", ".join(changed_keys(earlier, config))
    logger.warning("the configuration has changed: %s; the earlier is %s", changed, kept.name)
