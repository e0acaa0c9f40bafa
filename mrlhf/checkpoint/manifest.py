"""The contents of a checkpoint, as its `manifest.json` says; and the checkpoints of a run.

The manifest is written last, so a directory without one is not whole. It lists every file with size
and hash, and for each model the file of each box of each tensor. It ends with the hash of its own
text, so every byte of a checkpoint is under a hash. This file knows names, numbers and directories.
It knows no tensors and no ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from mrlhf.checkpoint.tensor_file import WrittenFile, describe_file
from mrlhf.errors import CheckpointError
from mrlhf.weights.boxes import Box
from mrlhf.weights.shard import Shape

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
REPLACED = ".replaced"
FORMAT = 2
WEIGHT = "weight"
_NAME = re.compile(r"step_(\d+)(_interrupted)?")
_SEALED = re.compile(rb'(.*),"xxh3":"([0-9a-f]{16})"\}', re.DOTALL)


@dataclass(frozen=True)
class StoredTensor:
    """The places of a named tensor's parts."""

    shape: Shape
    # (number of the file in the manifest, starts, stops) of each stored box. Together the boxes
    # hold each element once.
    slices: tuple[tuple[int, Shape, Shape], ...]

    def boxes(self, name: str) -> Iterator[tuple[int, Box]]:
        """The file and the box of each slice."""
        for file, starts, stops in self.slices:
            yield file, Box(name, starts, stops)


@dataclass(frozen=True)
class StoredModel:
    """One model of a checkpoint."""

    head: str  # "lm" or "scalar"
    hf_config: dict[str, Any]  # the content of its Hugging Face `config.json`
    dtype: str  # of the parameters, such as "float32"; main weights are stored in float32
    layout: dict[str, int]  # sizes of the parallel axes when it was saved
    # Stored of each element: the weight, and its moments if any. With Muon these are the
    # momentum of a matrix and Adam's two of all else, otherwise Adam's.
    kinds: tuple[str, ...]
    optimizer_steps: int  # behind the moments
    tensors: dict[str, StoredTensor]  # every named tensor of the model


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    step: int  # training steps that are complete
    unfinished_step: bool  # whether it also holds a part of the next step
    program: str  # class of the configuration that made it, such as "PPOConfig"
    world_size: int  # ranks that saved it
    config: dict[str, Any]  # the whole configuration
    versions: dict[str, str]  # of the packages that made it
    files: tuple[WrittenFile, ...]  # every file but the manifest
    models: dict[str, StoredModel]  # the trained models, by role
    # The fingerprint of each model that is not stored, by role.
    frozen: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)  # of step `step`
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """The content of `manifest.json`."""
        return seal(asdict(self))


def seal(content: Mapping[str, Any]) -> bytes:
    """The JSON of a manifest, with a hash of everything before the hash at its end."""
    body = json.dumps(content, separators=(",", ":")).encode()[:-1]
    return body + b',"xxh3":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}'


def slice_key(kind: str, box: Box) -> str:
    """The name of a stored box in its safetensors file."""
    return f"{kind}:{box.key}"


def checkpoint_name(step: int, unfinished_step: bool) -> str:
    """The directory of the checkpoint after step `step`, with or without a part of the next."""
    return f"step_{step:06d}" + ("_interrupted" if unfinished_step else "")


def checkpoints_in(directory: Path) -> list[Path]:
    """The directories in `directory` that have a checkpoint's name, newest first, whole or not.

    A checkpoint with a part of the next step is newer than one of the same step without it.
    """
    found = []
    if directory.is_dir():
        for path in directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), match[2] is not None, path))
    return [path for *_, path in sorted(found, reverse=True)]


def with_manifest(directory: Path) -> list[Path]:
    """The directories of `checkpoints_in` that have a manifest, newest first."""
    return [path for path in checkpoints_in(directory) if (path / MANIFEST).is_file()]


def named_checkpoint(path: Path) -> Path | None:
    """The checkpoint, or the folder of checkpoints, that `path` names; None if there is none.

    `path` may be either of them, or the output directory of a run; the result has no links.
    """
    if (path / MANIFEST).is_file():
        return path.resolve()
    for folder in (path / CHECKPOINTS, path):
        if with_manifest(folder):
            return folder.resolve()
    return None


def critic_beside(export: Path) -> tuple[Path, str]:
    """The newest checkpoint of the run that wrote `export`, and its model with a scalar head."""
    for path in with_manifest(export.parent / CHECKPOINTS)[:1]:
        for role, model in read_manifest(path).models.items():
            if model.head == "scalar":
                return path, role
    raise CheckpointError(
        f"critic.warm_start is state, and {export.parent} has no whole checkpoint of a critic; let "
        "critic.path be the export of a run with trainer.save_freq, or set it to weights"
    )


def hidden_directories(directory: Path) -> list[Path]:
    """The remains in `directory` of saves and deletions that were cut short."""
    hidden: list[Path] = []
    for ending in (".saving", ".deleted", REPLACED):
        hidden += directory.glob(f".step_*{ending}")
    return hidden


def bring_back_replaced(directory: Path) -> None:
    """Rename a checkpoint back that another one of its name was about to replace.

    Call it before a run looks for checkpoints in `directory`, while no other process writes there.
    """
    for hidden in directory.glob(f".step_*{REPLACED}"):
        path = hidden.with_name(hidden.name.removeprefix(".").removesuffix(REPLACED))
        if not path.exists():
            hidden.rename(path)


def read_manifest(directory: Path, content: bytes | None = None) -> Manifest:
    """The manifest of the checkpoint in `directory`; see `parse_manifest`.

    `content` is that of its file, if the caller has it. A CheckpointError says that there is no
    manifest, or that the directory has another checkpoint's name.
    """
    file = directory / MANIFEST
    try:
        content = file.read_bytes() if content is None else content
    except OSError as error:
        raise CheckpointError(
            f"{directory} is no whole checkpoint: it has no readable {MANIFEST}"
        ) from error

    manifest = parse_manifest(file, content)
    check_name(directory, manifest)
    return manifest


def parse_manifest(file: Path, content: bytes) -> Manifest:
    """Read the manifest with this content, and check it and its hash.

    Raises:
        CheckpointError: it is damaged, of another format, or names a file outside of its directory.
    """
    sealed = _SEALED.fullmatch(content)
    if sealed is not None and xxhash.xxh3_64_hexdigest(sealed[1]).encode() != sealed[2]:
        raise CheckpointError(f"{file} is damaged: it is not what was written (its hash differs)")
    try:
        raw = json.loads(content)
        number = raw["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it is no manifest ({error})") from error

    if number != FORMAT:
        raise CheckpointError(
            f"{file} has format {number}, and this version of mrlhf reads format {FORMAT}"
        )
    if sealed is None:
        raise CheckpointError(f"{file} is damaged: it does not end with its hash")

    try:
        manifest = _from_json(raw)
        _check_paths(file, manifest)
        _check_slices(file, manifest)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__} {error}") from error
    return manifest


def check_name(directory: Path, manifest: Manifest) -> None:
    """Refuse a directory with the name of another checkpoint: names say which is newest."""
    name = checkpoint_name(manifest.step, manifest.unfinished_step)
    if _NAME.fullmatch(directory.name) and directory.name != name:
        raise CheckpointError(
            f"{directory} holds {name}, as its {MANIFEST} says; give it that name, or one that is "
            "no checkpoint's"
        )


def check_sizes(directory: Path, files: Iterable[WrittenFile]) -> None:
    """Refuse, with a CheckpointError, a checkpoint with one of these files missing or resized."""
    for listed in files:
        file = directory / listed.path
        try:
            nbytes = file.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{directory} is not whole: {listed.path} is missing or cannot be read"
            ) from error
        if nbytes != listed.nbytes:
            raise CheckpointError(
                f"{directory} is damaged: {listed.path} has {nbytes} bytes and not {listed.nbytes}"
            )


def check_hashes(path: Path, files: Iterable[WrittenFile]) -> None:
    """Refuse, with a CheckpointError, a checkpoint with one of these files damaged."""
    for listed in files:
        if describe_file(path, listed.path) != listed:
            raise CheckpointError(
                f"{path} is damaged: {listed.path} is not what was written (its hash differs from "
                f"{MANIFEST})"
            )


def _from_json(raw: Mapping[str, Any]) -> Manifest:
    models = {}
    for role, model in raw["models"].items():
        tensors = {}
        for name, tensor in model["tensors"].items():
            slices = []
            for number, starts, stops in tensor["slices"]:
                slices.append((int(number), tuple(map(int, starts)), tuple(map(int, stops))))
            tensors[name] = StoredTensor(tuple(map(int, tensor["shape"])), tuple(slices))
        models[role] = StoredModel(**{**model, "kinds": tuple(model["kinds"]), "tensors": tensors})

    files = tuple(WrittenFile(**entry) for entry in raw["files"])
    rest = {name: value for name, value in raw.items() if name != "xxh3"}
    return Manifest(**{**rest, "files": files, "models": models})


def _check_paths(file: Path, manifest: Manifest) -> None:
    for listed in manifest.files:
        path = PurePosixPath(listed.path)
        if path.is_absolute() or ".." in path.parts or "\\" in listed.path or not path.parts:
            raise CheckpointError(
                f"{file} names the file {listed.path!r}, which is outside of the checkpoint"
            )


def _check_slices(file: Path, manifest: Manifest) -> None:
    """Refuse a manifest whose slices do not make up every tensor."""
    for role, model in manifest.models.items():
        for name, tensor in model.tensors.items():
            stored = 0
            for number, box in tensor.boxes(name):
                if not 0 <= number < len(manifest.files):
                    raise CheckpointError(f"{file}: a slice of {role} {name} is in no listed file")
                stored += box.numel
            elements = Box(name, (0,) * len(tensor.shape), tensor.shape).numel
            if stored != elements:
                raise CheckpointError(
                    f"{file}: {role} {name} has {elements} elements, and {stored} are stored"
                )
