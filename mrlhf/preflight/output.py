"""Checks that a run can write into its output directory, without creating anything there.

It knows the names of a run's files: nothing of another kind, and no input, may stand in their
place. It does not know what an earlier run has left there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import mrlhf
from mrlhf.checkpoint.output_files import FILES, FOLDERS
from mrlhf.config.roots import AnyConfig, PPOConfig
from mrlhf.errors import ConfigError
from mrlhf.inputs.paths import input_paths

_LONGEST_NAME = 255
_NO_FILES_THERE = ("proc", "sys")
_FULL_OR_READ_ONLY = {
    errno.ENOSPC: "has no room left",
    errno.EDQUOT: "has no room left in your quota",
    errno.EROFS: "is on a file system that is read-only",
    errno.EACCES: "may not be written",
    errno.EPERM: "may not be written",
}


def check_output(config: AnyConfig) -> None:
    """Refuse, with one line, an output directory that cannot be written, or would lose an input."""
    path = config.trainer.output_dir
    directory = Path(path)
    models = ["actor" if isinstance(config, PPOConfig) else "model"]
    if config.trainer.export_best is not None:
        models.append(f"{models[0]}_best")
    if config.trainer.export_merged:
        models.append(f"{models[0]}_merged")
    if isinstance(config, PPOConfig) and config.trainer.export_critic:
        models.append("critic")

    problem = (
        _problem(directory)
        or _no_place_of_its_own(config, directory)
        or _in_the_way(directory, models)
        or _overwritten(config, [directory / name for name in models])
    )
    if problem is not None:
        raise ConfigError(f"trainer.output_dir {path} {problem}; name another directory")


def _no_place_of_its_own(config: AnyConfig, directory: Path) -> str | None:
    """Whether the directory is one for other things, such as a home."""
    place = Path(os.path.realpath(directory))
    home = Path(os.path.realpath(os.path.expanduser("~")))
    package = Path(mrlhf.__file__).resolve().parent
    if place == Path("/"):
        return "is the root of the file system"
    if home.is_relative_to(place):
        return "is your home directory" if place == home else "holds your home directory"
    if place == package.parent or place.is_relative_to(package):
        return "is where mrlhf's own files are"

    for path in input_paths(config):
        if path.holds is not None and place == Path(os.path.realpath(path.path)):
            return f"is the directory of the model {path}"
    return None


def _problem(directory: Path) -> str | None:
    """The reason why the directory cannot be created or written; None if it can."""
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in directory.parts):
        return f"has a part of more than {_LONGEST_NAME} bytes"
    existing = directory.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent

    if not existing.is_dir():
        what = "is a link to nothing" if existing.is_symlink() else "is a file"
        return what if existing == directory.absolute() else f"lies below {existing}, which {what}"
    if existing.resolve().parts[1:2] and existing.resolve().parts[1] in _NO_FILES_THERE:
        return "lies where no files can be"

    refusal = _refusal(existing)
    if refusal is not None:
        where = "" if existing == directory.absolute() else f"cannot be created: {existing} "
        return f"{where}{refusal}"
    return None


def _refusal(directory: Path) -> str | None:
    """The reason why no file can be created in `directory`; None if one can."""
    if not os.access(directory, os.W_OK | os.X_OK):
        read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
        return _FULL_OR_READ_ONLY[errno.EROFS if read_only else errno.EACCES]
    try:
        # A file without a name, which no other process sees; not every file system has them.
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY))
    except (AttributeError, OSError) as error:
        code = error.errno if isinstance(error, OSError) else None
        return _FULL_OR_READ_ONLY.get(code) if code is not None else None
    return None


def _overwritten(config: AnyConfig, models: Sequence[Path]) -> str | None:
    """An input that lies where the run writes a file, or a model, which replaces its directory."""
    own = {os.path.realpath(os.path.join(config.trainer.output_dir, name)) for name in FILES}
    for read in input_paths(config):
        if os.path.realpath(read.path) in own:
            return f"has {read} where the run writes a file of its own"

    for model in models:
        place = Path(os.path.realpath(model))
        replaced = (place, place.with_name(f"{place.name}.partial"))
        for read in input_paths(config):
            real = Path(os.path.realpath(read.path))
            if any(real.is_relative_to(other) for other in replaced):
                return f"would write a model to {model}, and so overwrite {read}"
    return None


def _in_the_way(directory: Path, models: Sequence[str]) -> str | None:
    """A file or directory that stands where the run will write something of another kind."""
    for name in (*models, ".lock", *FOLDERS):
        path = directory / name
        if os.path.lexists(path) and not path.is_dir():
            return f"holds a file '{name}' where the run makes a directory"
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            return f"holds a directory '{name}' that may not be written"

    for name in FILES:
        path = directory / name
        if path.is_dir():
            return f"holds a directory '{name}' where the run writes a file"
        if path.exists() and not path.is_file():
            return f"holds a pipe or a device '{name}' where the run writes a file"
        if path.exists() and not os.access(path, os.W_OK):
            return f"holds a file '{name}' that may not be written"
    return None
