"""The files and directories that a configuration names, and the problems with those on this
machine.

It knows which keys hold paths and what kind of thing each names, and replaces those that are of a
hub by local ones. It reads no file's content.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from mrlhf.checkpoint.manifest import CHECKPOINTS, checkpoints_in, critic_beside, named_checkpoint
from mrlhf.config.fields import Section
from mrlhf.config.roots import AnyConfig, PPOConfig
from mrlhf.config.user_code import is_reference
from mrlhf.data.hub import local_directory, local_files
from mrlhf.data.tokenizer import holds_tokenizer
from mrlhf.errors import ConfigError
from mrlhf.models.published import how_to_get, published_model
from mrlhf.weights.stored import ADAPTER_CONFIG

Kind = Literal["file", "directory", "file or directory"]
TOKENIZER = "data.tokenizer"
ConfigT = TypeVar("ConfigT", bound=AnyConfig)


@dataclass(frozen=True)
class InputPath:
    """A path that the run reads."""

    key: str  # the configuration key that names it
    path: str
    kind: Kind
    holds: str | None = None  # a file that the directory must hold

    def __str__(self) -> str:
        return f"{self.key} {self.path}"


def input_paths(config: AnyConfig) -> list[InputPath]:
    """Every path that the run of `config` reads, except those that a key takes from another key."""
    paths = list(_named_paths(config))
    # A run with checkpoints of its own may continue without the one from which it began.
    has_own = checkpoints_in(Path(config.trainer.output_dir) / CHECKPOINTS)
    if config.trainer.resume not in ("auto", "never") and not has_own:
        paths.append(InputPath("trainer.resume", config.trainer.resume, "directory"))
    if isinstance(config, PPOConfig) and "critic" in config.trained() and not has_own:
        start = Path(config.critic.path)
        if config.critic.warm_start == "state" and start.exists():
            critic_beside(start)  # which refuses a path without a checkpoint

    named = {path.key: path.path for path in paths}
    own = []
    for path in paths:
        source = config.inherited.get(path.key)
        if source is None or named.get(source) != path.path:
            own.append(path)
    return own


def absent_paths(config: AnyConfig) -> list[InputPath]:
    """The missing paths of `config`; ConfigError if another one is not what its key needs."""
    absent = []
    problems = []
    for path in input_paths(config):
        if not os.path.lexists(path.path):
            absent.append(path)
            continue
        problem = _problem(path)
        if problem is not None:
            problems.append(problem)

    if problems:
        raise ConfigError("\n".join(problems))
    return absent


def require_paths(config: AnyConfig) -> None:
    """Refuse a configuration that names a missing path; ConfigError, one line for each."""
    absent = absent_paths(config)
    if absent:
        raise ConfigError("\n".join(without(path) for path in absent))


def without(path: InputPath) -> str:
    """One line that says that a path does not exist, and what to do."""
    get = "" if path.holds is None else how_to_get(path.path)
    return f"{path} does not exist; {_hint(path)}{get}"


def awaits_tokenizer(config: AnyConfig) -> bool:
    """Whether the tokenizer's directory is that of a model that has only a `config.json` so far.

    That is enough for a dry run.
    """
    directory = Path(config.data.tokenizer)
    of_model = any(role.path == config.data.tokenizer for role in config.roles().values())
    is_model = of_model and (directory / "config.json").is_file()
    return is_model and not holds_tokenizer(directory)


def has_tokenizer(config: AnyConfig) -> bool:
    """Whether the tokenizer and its template are here."""
    template = config.data.chat_template
    is_here = os.path.lexists(config.data.tokenizer) and not awaits_tokenizer(config)
    return is_here and (template is None or os.path.lexists(template))


def present(config: AnyConfig) -> AnyConfig:
    """The configuration without the data, and the code of the user's, that are not here."""
    splits = [name for name in type(config.data).model_fields if name.endswith("_files")]
    files = {name: list(filter(os.path.lexists, config.data.value_of(name))) for name in splits}
    changes: dict[str, Section] = {"data": config.data.model_copy(update=files)}
    if isinstance(config, PPOConfig):
        terms = [term for term in config.reward.terms if is_here(term.name)]
        changes["reward"] = config.reward.model_copy(update={"terms": terms})
        rollout = config.rollout
        kept = {
            "environment": [section for section in rollout.environment if is_here(section.name)],
            "tools": list(filter(is_here, rollout.tools)),
        }
        changes["rollout"] = rollout.model_copy(update=kept)
    return config.model_copy(update=changes)


def is_here(name: str) -> bool:
    """Whether a name is built in, or the file of the user's function is on this machine."""
    return not is_reference(name) or os.path.lexists(name.rpartition(":")[0])


def with_local_inputs(
    config: ConfigT,
    begun: Mapping[str, Any],
    *,
    weights: bool = True,
    rows: bool = True,
    from_cache: bool = False,
) -> tuple[ConfigT, dict[str, list[str]], dict[str, str]]:
    """Replace the repositories that `config` names by local paths.

    `begun` has the keys with which a run began, whose commits are taken again; see
    `local_directory`. Returns the configuration, the paths of each name, and why others could not
    be had.
    """
    taken: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for path in _named_paths(config):
        name = path.path
        is_rows = path.key.endswith("_files")
        shipped = published_model(name)  # which shipped configurations expect at `models/NAME`
        is_local = shipped is not None and name != f"{shipped.parent.name}/{shipped.name}"
        is_other = path.kind == "file" and not (is_rows and rows)
        if is_local or is_other or name in taken or name in reasons:
            continue
        before = str(begun.get(path.key, ""))
        try:
            if is_rows:
                taken[name] = local_files(name, begun=before, from_cache=from_cache)
            else:  # a model comes before a tokenizer of the same name
                needs = weights and path.holds is not None
                place = local_directory(name, weights=needs, begun=before, from_cache=from_cache)
                taken[name] = [place]
        except ConfigError as error:
            reasons[name] = f"{path.key} {error}"

    taken = {name: places for name, places in taken.items() if places != [name]}
    tree = config.model_dump()
    _replace(tree, taken)
    here = cast(ConfigT, type(config).model_validate(tree)) if taken else config
    return here, taken, reasons


def _replace(tree: dict[str, Any], taken: Mapping[str, list[str]]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict):
            _replace(value, taken)
        elif key == "several":
            for each in value:
                _replace(each, taken)
        elif key == "ensemble" or key.endswith("_files"):
            tree[key] = [file for name in value for file in taken.get(name, [name])]
        elif key in ("path", "tokenizer") and value in taken:
            [tree[key]] = taken[value]


def _named_paths(config: AnyConfig) -> Iterator[InputPath]:
    """Every path that a key names, apart from the checkpoint to go on from."""
    for name, role in config.roles().items():
        for key, path in role.directories().items():
            holds = "config.json" if key == "path" else ADAPTER_CONFIG
            yield InputPath(f"{name}.{key}", path, "directory", holds)

    data = config.data
    yield InputPath(TOKENIZER, data.tokenizer, "file or directory")
    if data.chat_template is not None:
        yield InputPath("data.chat_template", data.chat_template, "file")
    for split in ("train_files", "val_files", "test_files"):
        if split in type(data).model_fields:
            for file in data.value_of(split):
                yield InputPath(f"data.{split}", file, "file")

    if isinstance(config, PPOConfig):
        references = own_methods(config)
        for number, term in enumerate(config.reward.terms):
            if is_reference(term.name):
                references[f"reward.terms.{number}.name"] = term.name
        references |= own_tools(config)
        for key, name in references.items():
            yield InputPath(key, name.rpartition(":")[0], "file")


def own_methods(config: PPOConfig) -> dict[str, str]:
    """The user's own functions in the method, by their keys."""
    keys = ("actor.policy_loss.loss_mode", "algorithm.adv_estimator")
    names = {key: config.value_of(key) for key in keys}
    return {key: name for key, name in names.items() if is_reference(name)}


def own_tools(config: PPOConfig) -> dict[str, str]:
    """The user's environments and tools, by their keys."""
    rollout = config.rollout
    named = {
        f"rollout.environment.{number}.name": section.name
        for number, section in enumerate(rollout.environment)
    }
    named |= {f"rollout.tools.{number}": name for number, name in enumerate(rollout.tools)}
    return {key: name for key, name in named.items() if is_reference(name)}


def _problem(path: InputPath) -> str | None:
    """The problem with a path that exists, as a line."""
    place = Path(path.path)
    try:
        is_directory = place.is_dir()
        is_file = place.is_file()
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"

    if is_directory and path.kind == "file":
        return f"{path} is a directory; name a file"
    if is_file and path.kind == "directory":
        return f"{path} is a file; name a directory"
    if not is_file and not is_directory:
        if place.is_symlink() and not place.exists():
            return f"{path} is a link to {os.readlink(place)}, which does not exist"
        return f"{path} is neither a file nor a directory; name a {path.kind}"

    if not os.access(place, os.R_OK | (os.X_OK if is_directory else 0)):
        return f"{path} cannot be read: permission denied"
    if path.key == "trainer.resume" and named_checkpoint(place) is None:
        return (
            f"{path} has no whole checkpoint; give a checkpoint, the output directory of a run "
            "that has one, auto or never"
        )
    if path.holds is not None and not (place / path.holds).is_file():
        get = how_to_get(path.path, path.holds)
        return f"{path} holds no {path.holds}; name a directory that does{get}"
    return None


def _hint(path: InputPath) -> str:
    """The remedy for a path that does not exist."""
    place = Path(path.path)
    try:
        neighbours = [entry.name for entry in place.parent.iterdir()]
    except OSError:
        neighbours = []
    near = difflib.get_close_matches(place.name, neighbours, n=1, cutoff=0.8)
    if near:
        return f"did you mean {place.parent / near[0]}?"

    if place.is_absolute():
        return f"name an existing {path.kind}"
    here = f"name an existing {path.kind}, relative to the working directory {Path.cwd()}"
    form = "org/name:split" if path.key.endswith("_files") else "org/name"
    is_other = path.kind == "file" and form == "org/name"
    return here if is_other else f"{here}, or a repository of the Hub as {form}"
