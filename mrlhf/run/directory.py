"""What an output directory holds of a run, and what a new job may do with it.

A run is never overwritten in silence: a new job goes on from it, sets its rows aside, deletes it
because it was told to, or refuses. One process decides for all ranks, while it holds the lock.
Nothing is changed until all other checks have passed too. This file knows which files a run writes;
it does not know what is in a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mrlhf.checkpoint.manifest import (
    CHECKPOINTS,
    bring_back_replaced,
    checkpoint_name,
    checkpoints_in,
    named_checkpoint,
    with_manifest,
)
from mrlhf.config.compare import changed_keys
from mrlhf.config.load import dump_yaml
from mrlhf.config.roots import Root
from mrlhf.errors import ConfigError
from mrlhf.log import parse_metrics_line
from mrlhf.run.status import STATUS
from mrlhf.run.summary import SUMMARY
from mrlhf.run.timeline import TIMELINE

logger = logging.getLogger(__name__)

ALARMS = "alarms.jsonl"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
REFERENCE_LOGPROBS = "reference_logprobs.npz"
REPORT = "report.html"
CONFIG = "config.yaml"
_BEGUN = "run.json"

# All that a run writes: patterns of files in the output directory, and in folders of it.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", ".*.tmp")
_MODELS = ("actor", "actor_best", "model", "model_best")
_WRITTEN = {
    ".": (
        METRICS,
        "metrics.before_*.jsonl",
        "metrics.damaged_*.jsonl",
        ALARMS,
        "alarms.before_*.jsonl",
        STATUS,
        CONFIG,
        "config.*.yaml",
        _BEGUN,
        SUMMARY,
        "curves.png",
        REPORT,
        "failed_step_*",
        REFERENCE_LOGPROBS,
        f".{REFERENCE_LOGPROBS}.tmp",
        "tensorboard.before_*",
        *(f"{name}.partial" for name in _MODELS),
        *(f".{name}.replaced" for name in _MODELS),
    ),
    CHECKPOINTS: ("step_*", ".step_*", "before_*.step_*", "damaged_*.step_*"),
    TENSORBOARD: ("events.out.tfevents.*",),
    "rollouts": ("step_*.jsonl", "step_*.parquet"),
    TIMELINE: ("rank_*.jsonl",),
    "hangs": ("*",),
    "wandb": ("*",),
    **dict.fromkeys(_MODELS, MODEL_FILES),
}


@dataclass(frozen=True)
class Wishes:
    """What the configuration says about the run that a directory may hold.

    Attributes:
        resume: `trainer.resume`.
        overwrite: `trainer.overwrite`.
        names: of what started this run: a scheduler's job, a launcher's run.
        again: those of the names that have started it before.
        inputs: files and directories that the run reads; they are not deleted.
    """

    resume: str
    overwrite: bool
    names: Collection[str]
    again: Collection[str]
    inputs: Collection[Path]


@dataclass(frozen=True)
class Contents:
    """What a directory holds of a run.

    Attributes:
        rows: whether there are metrics.
        finished: whether there is a summary, which is written last.
        newest: name of the newest checkpoint; None if there is none.
    """

    rows: bool
    finished: bool
    newest: str | None

    @property
    def is_run(self) -> bool:
        """Whether there is anything that must not be lost."""
        return self.rows or self.finished or self.newest is not None


@dataclass(frozen=True)
class _Begun:
    """How the run that a directory holds was begun.

    Attributes:
        started_by: names of what has started it last.
        begun_from: the absolute path that `trainer.resume` named when it began from a checkpoint of
            another run; else None.
    """

    started_by: tuple[str, ...]
    begun_from: str | None


@dataclass(frozen=True)
class Opening:
    """What a run is going to do with its output directory.

    Attributes:
        resume_from: what to go on from: a checkpoint, or a folder of checkpoints, of which the
            newest whole one is meant. None to begin anew.
        begun_from: as in `_Begun`.
        change: sets aside or deletes what lies in the way.
    """

    resume_from: Path | None
    begun_from: str | None = None
    change: Callable[[], None] = lambda: None


def plan_opening(directory: Path, wishes: Wishes) -> Opening:
    """What a run may do with `directory`; a run that lies there is not changed.

    Raises:
        ConfigError: the directory holds a run that must not be touched, or there is no checkpoint
            where `trainer.resume` says.
    """
    bring_back_replaced(directory / CHECKPOINTS)
    return _plan(directory, _contents(directory), wishes)


def describe_opening(directory: Path, wishes: Wishes) -> str:
    """What a start would do with `directory` now, in words; nothing is changed."""
    contents = _contents(directory)
    try:
        opening = _plan(directory, contents, wishes)
    except ConfigError as error:
        return f"a start would be refused: {error}"

    begins = "begin at step 1"
    if opening.resume_from is not None:
        newest_first = with_manifest(opening.resume_from)
        begins = f"go on from {newest_first[0] if newest_first else opening.resume_from}"
    elif contents.is_run and not wishes.overwrite:
        begins += ", and set aside the rows of a run that left no checkpoint"
    if wishes.overwrite and contents.is_run:
        begins = f"delete the run in {directory} and {begins}"
    return f"a start would {begins}"


def open_directory(directory: Path, config: Root, wishes: Wishes, opening: Opening) -> None:
    """Do with `directory` what was planned, and write the configuration into it.

    Raises:
        OSError: it cannot be written. If there is no room for the new files, nothing is changed.
    """
    resume_from = opening.resume_from
    begun = {
        "started_by": list(wishes.names),
        "resumed_from": str(resume_from) if resume_from else None,
        "begun_from": opening.begun_from,
    }
    files = {CONFIG: dump_yaml(config), _BEGUN: json.dumps(begun) + "\n"}
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
    return [Path(text) for text in _texts(config.model_dump()) if os.path.exists(text)]


def _contents(directory: Path) -> Contents:
    rows = directory / METRICS
    newest_first = checkpoints_in(directory / CHECKPOINTS)
    return Contents(
        rows=rows.is_file() and rows.stat().st_size > 0,
        finished=(directory / SUMMARY).is_file(),
        newest=newest_first[0].name if newest_first else None,
    )


def _plan(directory: Path, contents: Contents, wishes: Wishes) -> Opening:
    """What may be done with the run in `directory`."""
    own = directory / CHECKPOINTS if contents.newest else None
    begun = _read_begun(directory)
    asked = os.path.abspath(wishes.resume)

    is_again = any(name in begun.started_by for name in wishes.again)
    if contents.is_run and is_again and own is not None:
        # This very job has begun the run, so what it asks for has been done to the earlier run.
        return Opening(own, begun.begun_from)

    # The same command again goes on with the run that it has begun from that checkpoint.
    goes_on = wishes.resume == "auto" or begun.begun_from == asked
    is_whole = not contents.finished or _ends_with(directory, contents.newest)
    if goes_on and not wishes.overwrite and own is not None and is_whole:
        # It is written anew at the end; until then the run is not finished.
        finish_anew = partial((directory / SUMMARY).unlink, missing_ok=True)
        return Opening(own, begun.begun_from, finish_anew)

    named = _named_checkpoint(wishes.resume)
    begun_from = None if named is None else asked
    if contents.is_run and is_again:
        return Opening(named, begun_from, partial(_set_aside_rows, directory))

    if named is not None and _is_in(named, directory):
        if wishes.overwrite:
            raise ConfigError(
                f"trainer.overwrite would delete {named}, which trainer.resume names; leave one of "
                "them out"
            )
        return Opening(named, begun.begun_from, partial(_set_aside_checkpoints_after, named))

    if wishes.overwrite and (contents.is_run or (directory / _BEGUN).is_file()):
        return Opening(named, begun_from, partial(_delete_run, directory, wishes.inputs))
    if not contents.is_run:
        return Opening(named, begun_from)
    if goes_on and own is None and not contents.finished:
        return Opening(named, begun_from, partial(_set_aside_rows, directory))
    raise _refusal(directory, contents, wishes)


def _ends_with(directory: Path, checkpoint: str | None) -> bool:
    """Whether the last row of a run's metrics is that of its newest checkpoint."""
    if checkpoint is None:
        return False
    try:
        lines = (directory / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    last = parse_metrics_line(lines[-1]) if lines else None
    return last is not None and checkpoint == checkpoint_name(last["step"], unfinished_step=False)


def _refusal(directory: Path, contents: Contents, wishes: Wishes) -> ConfigError:
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
    """The checkpoint that `trainer.resume` names, or the checkpoints of the run that it names.

    Raises:
        ConfigError: there is none.
    """
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


def _is_in(named: Path, directory: Path) -> bool:
    """Whether a checkpoint is one of the output directory's own; its folder may be a link."""
    return any(
        named.is_relative_to(place.resolve()) for place in (directory, directory / CHECKPOINTS)
    )


def _read_begun(directory: Path) -> _Begun:
    """What `run.json` says of the run in `directory`."""
    try:
        read = json.loads((directory / _BEGUN).read_text(encoding="utf-8"))
        return _Begun(tuple(read["started_by"]), read.get("begun_from"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _Begun((), None)


def _set_aside_rows(directory: Path) -> None:
    """Keep the rows and curves of a run that left no checkpoint, under names of their own."""
    number = 1
    while any(directory.glob(f"*.before_{number}*")):
        number += 1

    kept = directory / f"metrics.before_{number}.jsonl"
    with suppress(FileNotFoundError):
        (directory / TENSORBOARD).rename(directory / f"{TENSORBOARD}.before_{number}")
    with suppress(FileNotFoundError):
        (directory / ALARMS).rename(directory / f"alarms.before_{number}.jsonl")
    with suppress(FileNotFoundError):
        (directory / METRICS).rename(kept)
    logger.warning(
        "%s holds a run that ended before its first checkpoint: it begins anew, and its metrics "
        "are kept in %s",
        directory,
        kept.name,
    )


def _set_aside_checkpoints_after(named: Path) -> None:
    """Rename the checkpoints of the run that are newer, which would else be the newest again.

    A folder of checkpoints, in place of one, stays as it is.
    """
    newest_first = checkpoints_in(named.parent)
    newer = newest_first[: newest_first.index(named)] if named in newest_first else []
    for path in newer:
        number = 1
        while (kept := path.with_name(f"before_{number}.{path.name}")).exists():
            number += 1
        path.rename(kept)
        logger.warning(
            "going back to %s: the later %s is kept as %s", named.name, path.name, kept.name
        )


def _delete_run(directory: Path, inputs: Collection[Path]) -> None:
    """Delete all that a run has written, and nothing else."""
    kept = [path.resolve() for path in inputs]
    for folder, patterns in _WRITTEN.items():
        for pattern in patterns:
            for path in (directory / folder).glob(pattern):
                if not any(_overlap(path.resolve(), other, directory) for other in kept):
                    _delete(path)
        with suppress(OSError):  # it holds other files, or is the current directory
            if folder != ".":
                (directory / folder).rmdir()
    logger.warning("trainer.overwrite: the run in %s is deleted", directory)


def _overlap(path: Path, other: Path, directory: Path) -> bool:
    """Whether one of the two lies in the other; the output directory itself does not count."""
    if directory.resolve().is_relative_to(other):
        return False
    return path.is_relative_to(other) or other.is_relative_to(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _keep_earlier_config(directory: Path, config: Root) -> None:
    """Keep an earlier `config.yaml` that differs under a number."""
    path = directory / CONFIG
    try:
        earlier = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    if earlier == dump_yaml(config):
        return

    number = 1
    while (kept := directory / f"config.{number}.yaml").exists():
        number += 1
    path.rename(kept)
    changed = ", ".join(changed_keys(earlier, config))
    logger.warning("the configuration has changed: %s; the earlier is %s", changed, kept.name)


def _texts(node: object) -> Iterator[str]:
    """All strings in nested dictionaries and lists."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)
