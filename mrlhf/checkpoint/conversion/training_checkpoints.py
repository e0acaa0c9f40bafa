"""Reads a model's weights out of our training checkpoints, and writes checkpoints for a layout.

A checkpoint of a run holds several models. This file takes one of them as weights, cuts a whole
checkpoint anew for another layout, moments included, or makes a checkpoint of weights alone. It is
one process, and holds one slice at a time.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.checkpoint.conversion.model_source import (
    Description,
    ModelSource,
    TensorForm,
    dtype_within,
    equal_bits,
)
from mrlhf.checkpoint.manifest import (
    MANIFEST,
    WEIGHT,
    Manifest,
    StoredModel,
    StoredTensor,
    check_sizes,
    read_manifest,
    slice_key,
)
from mrlhf.checkpoint.slice_reader import SliceReader, check_shapes
from mrlhf.checkpoint.state_tree import StateCopy
from mrlhf.checkpoint.tensor_file import TensorSource, WrittenFile, write_bytes, write_tensors
from mrlhf.errors import CheckpointError, WeightError
from mrlhf.models.families import family_of, spec_of
from mrlhf.models.parallel_sizes import ep_problem, pp_problem, tp_problem
from mrlhf.models.parameters import role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.weights.boxes import Box, whole

WEIGHTS_ONLY = "Weights"
"""The program of a checkpoint that no run has saved."""

ReadBox = Callable[[str, Box], Tensor]
"""(kind, box) -> the elements of the box."""


class TrainingSource:
    """The weights of one model of a training checkpoint."""

    def __init__(self, directory: Path, role: str | None, assets: Path | None) -> None:
        """Read the manifest.

        Args:
            directory: of the checkpoint.
            role: the model's name in it; None for the only one.
            assets: a directory with the tokenizer, if there is one.

        Raises:
            CheckpointError: the checkpoint is not whole, or has no such model.
        """
        self._directory = directory
        self._manifest = read_manifest(directory)
        check_sizes(directory, self._manifest)
        self._role = pick_role(directory, self._manifest, role)
        self._model = self._manifest.models[self._role]
        self.assets = assets
        self.spec = model_spec(self._model)
        self.dtype = stored_dtype(self._model)

        shapes = family_of(self.spec).tensor_shapes(self.spec)
        check_shapes(directory, self._role, self._model, shapes)
        # Main weights are stored in float32; a model is used in the dtype of its parameters.
        self.tensors: dict[str, TensorForm] = {}
        for name, shape in shapes.items():
            self.tensors[name] = TensorForm(shape, dtype_within(self.spec, name, self.dtype))
        self._reader = SliceReader(directory, self._manifest)

    def read(self, name: str) -> Tensor:
        """One tensor, in its dtype in the model."""
        form = self.tensors[name]
        box = whole(name, form.shape)
        return self._reader.read(self._role, WEIGHT, box).to(form.dtype).contiguous()

    def describe(self) -> Description:
        """What of the checkpoint is not converted."""
        left_out = []
        others = [role for role in self._manifest.models if role != self._role]
        if others:
            left_out.append(f"other models: {', '.join(others)}")
        moments = [kind for kind in self._model.kinds if kind != WEIGHT]
        if moments:
            left_out.append(f"optimizer state of {self._role}: {', '.join(moments)}")
        if self._manifest.program != WEIGHTS_ONLY:
            left_out.append("the state of the run: schedules, sampler, counters, random numbers")
        kind = f"training checkpoint ({self._role})"
        return Description(kind, self._manifest.step, left_out)

    def close(self) -> None:
        """Close the files."""
        self._reader.__exit__()


def slice_bytes(directory: Path, role: str | None) -> int:
    """Bytes of the slices of one model of a checkpoint, or of all models.

    Raises:
        CheckpointError: there is no such checkpoint or model.
    """
    manifest = read_manifest(directory)
    roles = list(manifest.models) if role is None else [pick_role(directory, manifest, role)]
    numbers = 0
    for name in roles:
        model = manifest.models[name]
        for tensor in model.tensors.values():
            numbers += len(model.kinds) * math.prod(tensor.shape)
    return numbers * torch.float32.itemsize


def pick_role(directory: Path, manifest: Manifest, role: str | None) -> str:
    """The model of a checkpoint that is meant.

    Raises:
        CheckpointError: there is no such model, or there are several and none is named.
    """
    roles = list(manifest.models)
    if role is None and len(roles) == 1:
        return roles[0]
    if role is None and "actor" in roles:
        return "actor"
    if role not in roles:
        asked = "several models" if role is None else f"no model {role!r}"
        raise CheckpointError(f"{directory} has {asked}; name one with --role: {', '.join(roles)}")
    return role


def model_spec(model: StoredModel) -> ModelSpec:
    """The spec of a stored model."""
    if model.head not in ("lm", "scalar"):
        raise CheckpointError(f"a stored model has the head {model.head!r}, which is unknown")
    return spec_of(model.hf_config, "lm" if model.head == "lm" else "scalar")


def stored_dtype(model: StoredModel) -> torch.dtype:
    """The dtype of a stored model's parameters."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(model.dtype)
    if dtype is None:
        raise CheckpointError(f"a stored model has the dtype {model.dtype!r}, which is unknown")
    return dtype


def write_training_checkpoint(
    source: ModelSource, directory: Path, role: str, layout: ParallelLayout
) -> list[str]:
    """Write weights as a training checkpoint of one model, into the empty `directory`.

    Args:
        source: of the weights.
        directory: of the checkpoint.
        role: the model's name in it.
        layout: each rank of it will find its slices in one file.

    Returns:
        What the user should know.

    Raises:
        CheckpointError: the file system refuses.
        WeightError: the model does not divide over the layout.
    """
    if source.dtype not in (torch.float32, torch.bfloat16):
        raise CheckpointError("training is in float32 or bfloat16; give one of them with --dtype")

    def read(kind: str, box: Box) -> Tensor:
        tensor = source.read(box.name)
        return tensor[box.within(whole(box.name, tuple(tensor.shape)))].to(torch.float32)

    model = StoredModel(
        head=source.spec.head,
        hf_config=source.spec.hf_config,
        dtype=str(source.dtype).removeprefix("torch."),
        layout=layout.stated,
        kinds=(WEIGHT,),
        optimizer_steps=0,
        tensors={},
    )
    files = StateCopy.of({}).write(directory)
    written, stored = _write_model(directory, role, model, layout, read, len(files))
    manifest = Manifest(
        step=source.describe().step or 0,
        unfinished_step=False,
        program=WEIGHTS_ONLY,
        world_size=layout.world_size,
        config={},
        versions={},
        files=(*files, *written),
        models={role: stored},
    )
    write_bytes(directory, MANIFEST, manifest.to_bytes())
    return [f"it holds the weights of {role} alone: no optimizer state, no state of a run"]


def change_layout(
    source: Path,
    directory: Path,
    role: str | None,
    layout: ParallelLayout,
    progress: Callable[[int], None],
) -> tuple[int, int, list[str]]:
    """Copy a training checkpoint, with the slices of its models cut for another layout.

    Everything else is copied as it is. A checkpoint loads into any layout without this; what
    changes is how many files each rank reads.

    Args:
        source: directory of the checkpoint.
        directory: of the copy, empty.
        role: the only model to cut; None for all.
        layout: the new layout.
        progress: is told the bytes of each slice that is written.

    Returns:
        How many tensors were cut, their bytes with moments, and what the user should know.

    Raises:
        CheckpointError: the checkpoint is not whole, or the file system refuses.
        WeightError: a model does not divide over the layout.
    """
    manifest = read_manifest(source)
    check_sizes(source, manifest)
    roles = list(manifest.models) if role is None else [pick_role(source, manifest, role)]

    kept = _files_of_others(manifest, roles)
    for listed in kept:
        (directory / listed.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / listed.path, directory / listed.path)

    files = list(kept)
    models = {}
    with SliceReader(source, manifest) as reader:
        for name, model in manifest.models.items():
            if name not in roles:
                models[name] = _renumbered(model, manifest, files)
                continue

            def read(kind: str, box: Box, role: str = name) -> Tensor:
                values = reader.read(role, kind, box)
                progress(values.nbytes)
                return values

            written, models[name] = _write_model(directory, name, model, layout, read, len(files))
            files += written

    copy = replace(manifest, files=tuple(files), models=models)
    write_bytes(directory, MANIFEST, copy.to_bytes())
    tensors = sum(len(models[name].tensors) for name in roles)
    nbytes = sum(file.nbytes for file in files[len(kept) :])
    return tensors, nbytes, [f"cut for {layout.stated}: {', '.join(roles)}"]


def compare_checkpoints(first: Path, second: Path) -> int:
    """Compare weights and moments of all models of two checkpoints, bit for bit.

    Returns:
        How many tensors were compared.

    Raises:
        CheckpointError: naming the first tensor that differs.
    """
    manifest = read_manifest(first)
    other = read_manifest(second)
    compared = 0

    with (
        SliceReader(first, manifest) as reader,
        SliceReader(second, other) as other_reader,
    ):
        for role, model in manifest.models.items():
            for name, tensor in model.tensors.items():
                box = whole(name, tensor.shape)
                for kind in model.kinds:
                    wanted = reader.read(role, kind, box)
                    if not equal_bits(wanted, other_reader.read(role, kind, box)):
                        raise CheckpointError(f"{kind} of {role} {name} differs in the result")
                    compared += 1
    return compared


def _write_model(
    directory: Path,
    role: str,
    model: StoredModel,
    layout: ParallelLayout,
    read: ReadBox,
    first_file: int,
) -> tuple[list[WrittenFile], StoredModel]:
    """Write a model's slices, one file for each rank of a replica, and describe them."""
    spec = model_spec(model)
    problems = [tp_problem("tp", layout.tp, spec), pp_problem("", layout.stages, spec)]
    if spec.experts is not None:
        problems.append(ep_problem("", AxisSizes(tp=layout.tp, etp=layout.etp), spec))
    for problem in problems:
        if problem is not None:
            raise WeightError(f"{role}: {problem}")

    (directory / role).mkdir()
    files: list[WrittenFile] = []
    slices: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
    for rank, boxes in _boxes_by_rank(spec, layout):
        tensors = []
        for box in boxes:
            slices.setdefault(box.name, []).append((first_file + len(files), box.starts, box.stops))
            tensors += [_to_write(kind, box, read) for kind in model.kinds]
        files.append(write_tensors(directory, f"{role}/rank_{rank:05d}.safetensors", tensors))

    tensors_by_name = {}
    for name, shape in family_of(spec).tensor_shapes(spec).items():
        tensors_by_name[name] = StoredTensor(shape, tuple(slices[name]))
    return files, replace(model, layout=layout.stated, tensors=tensors_by_name)


def _boxes_by_rank(spec: ModelSpec, layout: ParallelLayout) -> Iterator[tuple[int, list[Box]]]:
    """What each rank of the first replica writes: the slices that no earlier rank has."""
    seen = set()
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            rank = layout.rank_at(tp=tp, dp=0, pp=pp)
            boxes = []
            for piece in role_pieces(spec, layout, rank):
                if piece.key not in seen:
                    seen.add(piece.key)
                    box = whole(piece.name, piece.full_shape)
                    starts = (*box.starts[: piece.dim], piece.start, *box.starts[piece.dim + 1 :])
                    stops = (*box.stops[: piece.dim], piece.stop, *box.stops[piece.dim + 1 :])
                    boxes.append(Box(piece.name, starts, stops))
            if boxes:
                yield rank, boxes


def _to_write(kind: str, box: Box, read: ReadBox) -> TensorSource:
    """A slice that is read when it is written; weights and moments are float32."""
    return TensorSource(
        slice_key(kind, box), torch.float32, box.shape, lambda: [read(kind, box).reshape(-1)]
    )


def _files_of_others(manifest: Manifest, roles: list[str]) -> list[WrittenFile]:
    """The files that hold no slice of `roles`."""
    replaced = set()
    for role in roles:
        for tensor in manifest.models[role].tensors.values():
            replaced |= {number for number, _, _ in tensor.slices}
    return [file for number, file in enumerate(manifest.files) if number not in replaced]


def _renumbered(model: StoredModel, manifest: Manifest, files: list[WrittenFile]) -> StoredModel:
    """A model whose files are as they were, at other places of the manifest's list."""
    places = {file.path: number for number, file in enumerate(files)}
    tensors = {}
    for name, tensor in model.tensors.items():
        slices = []
        for number, starts, stops in tensor.slices:
            slices.append((places[manifest.files[number].path], starts, stops))
        tensors[name] = StoredTensor(tensor.shape, tuple(slices))
    return replace(model, tensors=tensors)
