"""Reads Hugging Face safetensors into a model's slots, and writes a model's slots as such files.

When reading, each rank takes from the files only the slices that its slots hold. When writing, the
model-parallel ranks of one replica take turns to write files, and each slice travels once, from a
rank that holds it to the rank that writes it. No rank ever holds the whole model: a writer holds
one file, every other rank one tensor. This file does not know models, families or layouts: its
caller hands in names and shapes, and each slot says what it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.parallel.collectives import (
    all_gather_objects,
    connect,
    exchange,
    raise_together,
    wait_for_all,
)
from mrlhf.weights.files import (
    file_names,
    flush,
    open_to_readers,
    publish,
    split_files,
    temporary,
)
from mrlhf.weights.shard import Key, Shape, Slot
from mrlhf.weights.stored import (
    ExpectedTensors,
    FileTensor,
    ModelFiles,
    OtherForm,
    match,
    names_in_files,
    open_files,
    survey,
)


@dataclass(frozen=True)
class FileOptions:
    """How the files of a checkpoint are written."""

    max_shard_bytes: int = 5 * 10**9  # of tensors; a larger tensor has a file of its own
    file: str | None = None  # the name of the only file; None: those of a model
    # The stacks of whole matrices or vectors in which files hold some of the model's tensors.
    forms: Mapping[str, OtherForm] = field(default_factory=dict)


def read_weights(path: str | Path, slots: Sequence[Slot], expected: ExpectedTensors) -> list[str]:
    """Fill `slots` from the safetensors in directory `path`; see `read_tensors`."""
    return read_tensors(survey(Path(path)), slots, expected)


def read_tensors(stored: ModelFiles, slots: Sequence[Slot], expected: ExpectedTensors) -> list[str]:
    """Fill `slots` from files whose headers have been read, in each parameter's dtype and device.

    Returns the tensors that the files may lack, and lack; their slots stay as they are.
    WeightError if the files are damaged, not those of the model, or not finite.
    """
    tensors = match(stored, expected)
    with open_files(tensors.values()) as lazily:
        for slot in slots:
            piece = slot.piece
            if piece.name in tensors:
                index = (slice(None),) * piece.dim + (slice(piece.start, piece.stop),)
                slot.store(lazily(tensors[piece.name])[index])
                _check_finite(slot, tensors[piece.name])
    return [name for name in expected.shapes if name not in tensors]


def _check_finite(slot: Slot, source: FileTensor) -> None:
    """Raise a WeightError if the model would hold NaN or inf."""
    if not bool(torch.isfinite(slot.load()).all()):
        raise WeightError(
            f"{source.file}: {source.name} holds NaN or inf in {slot.parameter.dtype}; the file is "
            "damaged, or was saved when training had diverged: take another model"
        )


def write_weights(
    path: str | Path,
    slots: Sequence[Slot],
    shapes: Mapping[str, Shape],
    group: dist.ProcessGroup,
    options: FileOptions,
) -> None:
    """Write the model that a group's ranks hold together, as safetensors in directory `path`.

    Files are written under temporary names and renamed when all are complete, the index last. An
    earlier model in the directory is replaced. Every rank of the group calls this, and it returns
    when the checkpoint is there.

    Args:
        path: directory on a file system that all ranks share; it is made if need be.
        slots: this rank's slices.
        shapes: full shape of every tensor of the model, in the order in which files are filled.
        group: the model-parallel ranks of one data-parallel replica. The ranks of other replicas do
            not call this.

    Raises:
        WeightError: the ranks do not hold the whole model, or a rank could not write, on all of
            them.
    """
    directory = Path(path)
    model = _survey(slots, shapes, group)
    held = names_in_files(model, options.forms)
    sizes = {name: sum(model[part].nbytes for part in held[name]) for name in held}
    contents = split_files(sizes, options.max_shard_bytes)
    names = file_names(len(contents)) if options.file is None else [options.file]
    files = dict(zip(names, contents, strict=True))

    error = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        error = f"cannot make {directory}: {failure}"

    connect(group, _device_of(slots))
    ranks = dist.get_process_group_ranks(group)
    for first in range(0, len(files), len(ranks)):
        wait_for_all(group)  # for those that have written a file
        # In the last turn some ranks may have no file to write.
        own = dict(zip(ranks, list(files.items())[first:], strict=False))
        writers = {
            rank: [part for name in names for part in held[name]]
            for rank, (_, names) in own.items()
        }
        tensors = _collect(writers, model, slots, group)
        if dist.get_rank() in own and error is None:
            file, in_file = own[dist.get_rank()]
            for name in in_file:
                if name in options.forms:
                    parts = {part: tensors.pop(part) for part in held[name]}
                    tensors[name] = options.forms[name].joined(parts).contiguous()
            error = _write(tensors, directory / file)
        del tensors

    raise_together(error, WeightError, group)  # all files are complete
    if dist.get_rank() == ranks[0]:
        try:
            publish(directory, files, sum(sizes.values()))
        except OSError as failure:
            error = f"cannot write {directory}: {failure}"
    raise_together(error, WeightError, group)


def _device_of(slots: Sequence[Slot]) -> torch.device:
    """The device of this rank's slices; a stage without layers may have none of adapters."""
    if slots:
        return slots[0].parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _write(tensors: dict[str, Tensor], file: Path) -> str | None:
    """Write a file under its temporary name; returns the error, if any, to tell other ranks."""
    try:
        save_file(tensors, temporary(file), metadata={"format": "pt"})
        open_to_readers(temporary(file))
        flush(temporary(file))
    except Exception as failure:
        return f"cannot write {file}: {failure}"
    return None


@dataclass(frozen=True)
class _SharedTensor:
    """A named tensor of the model, whose slices the ranks hold."""

    shape: Shape
    dtype: torch.dtype
    # The global ranks that hold each slice. The slices are in order and cover the tensor.
    holders: dict[Key, list[int]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def _survey(
    slots: Sequence[Slot], shapes: Mapping[str, Shape], group: dist.ProcessGroup
) -> dict[str, _SharedTensor]:
    """Find the ranks of the group that hold each slice of each tensor, in the order of `shapes`."""
    mine = [(slot.piece.key, slot.parameter.dtype) for slot in slots]
    everyone = all_gather_objects(mine, group)

    holders: dict[str, dict[Key, list[int]]] = {name: {} for name in shapes}
    dtypes: dict[str, torch.dtype] = {}
    for rank, held in zip(dist.get_process_group_ranks(group), everyone, strict=True):
        for key, slot_dtype in held:
            name = key[0]
            dtypes.setdefault(name, slot_dtype)
            assert dtypes[name] == slot_dtype, f"{name} has two dtypes"
            holders[name].setdefault(key, []).append(rank)

    model = {}
    for name, shape in shapes.items():
        slices = dict(sorted(holders[name].items()))
        if not _covers(slices, shape):
            raise WeightError(
                f"{name}: the ranks that write do not hold the whole of it; pass their "
                f"model-parallel group"
            )
        model[name] = _SharedTensor(shape, dtypes[name], slices)
    return model


def _covers(slices: Iterable[Key], shape: Shape) -> bool:
    """Whether ordered slices of a tensor follow each other from its beginning to its end."""
    dim = 0
    reached = 0
    for _, slice_dim, start, stop in slices:
        if start != reached:
            return False
        dim = slice_dim
        reached = stop
    return reached == shape[dim]


def _collect(
    writers: Mapping[int, list[str]],
    model: Mapping[str, _SharedTensor],
    slots: Sequence[Slot],
    group: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """The whole tensors that this rank writes in this turn, on the host.

    All writers receive their first tensor, then their second, and so on: at any time one tensor of
    each writer is under way. `writers` has the names of the tensors that each rank writes.
    """
    rank = dist.get_rank()
    device = _device_of(slots)
    held = {slot.piece.key: slot for slot in slots}
    whole = {}
    for name in writers.get(rank, ()):
        whole[name] = torch.empty(model[name].shape, dtype=model[name].dtype)

    for number in range(max(len(names) for names in writers.values())):
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        arrivals: list[tuple[Tensor, Tensor]] = []
        for writer, source, key in _transfers(writers, model, number):
            name, dim, start, stop = key
            if rank == source:
                values = held[key].load().contiguous()
                if rank != writer:
                    sends.append((writer, values))
            if rank == writer:
                place = whole[name].narrow(dim, start, stop - start)
                if rank != source:
                    values = torch.empty(place.shape, dtype=place.dtype, device=device)
                    receives.append((source, values))
                arrivals.append((place, values))

        exchange(sends, receives, group)
        for place, values in arrivals:
            place.copy_(values)
    return whole


def _transfers(
    writers: Mapping[int, list[str]], model: Mapping[str, _SharedTensor], number: int
) -> Iterator[tuple[int, int, Key]]:
    """The transfers of each writer's tensor number `number`: writer, source, slice.

    The source may be the writer itself.
    """
    for writer, names in writers.items():
        if number < len(names):
            for key, holders in model[names[number]].holders.items():
                yield writer, (writer if writer in holders else holders[0]), key
