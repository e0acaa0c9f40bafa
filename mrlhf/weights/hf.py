"""Hugging Face safetensors into a model's slots, and a model's slots into Hugging Face safetensors.

Reading, each rank takes from the files only the slices that its slots hold. Writing, the
model-parallel ranks of one replica take turns in writing files, and each slice travels once, from a
rank that holds it to the rank that writes it. No rank ever holds the whole model: a writer holds
one file, all others one tensor. This file does not know models, families or layouts: names and
shapes are handed in, and each slot says what it holds.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mrlhf.errors import WeightError
from mrlhf.parallel.collectives import all_gather_objects, connect, exchange
from mrlhf.weights.shard import Key, Shape, Slot

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHT_FILE = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_BUFFER = "rotary_emb.inv_freq"


def read_weights(
    path: str | Path,
    slots: Sequence[Slot],
    shapes: Mapping[str, Shape],
    allow_missing: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
) -> list[str]:
    """Fill `slots` from the safetensors in directory `path`, converted to each parameter's dtype
    and device.

    Args:
        path: directory with `model.safetensors`, or with `model.safetensors.index.json` and the
            files that it names.
        slots: where this rank's slices live.
        shapes: name and full shape of every tensor of the model.
        allow_missing: tensors that the checkpoint may lack; their slots stay as they are.
        ignore: tensors that the checkpoint may have and the model has not.

    Returns:
        The tensors of `allow_missing` that are not there.

    Raises:
        WeightError: no safetensors there, or a tensor is missing, unknown, or of another shape than
            the model's.
    """
    files = _files_of(Path(path))
    with ExitStack() as stack:
        handles = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in set(files.values())
        }
        tensors = {name: handles[file] for name, file in files.items()}
        _check(path, tensors, shapes, allow_missing, ignore)
        for slot in slots:
            piece = slot.piece
            if piece.name in tensors:
                rows = (slice(None),) * piece.dim + (slice(piece.start, piece.stop),)
                view = slot.view(piece.start, piece.stop)
                view.copy_(tensors[piece.name].get_slice(piece.name)[rows].reshape(view.shape))
    return [name for name in shapes if name not in files]


def write_weights(
    path: str | Path,
    slots: Sequence[Slot],
    shapes: Mapping[str, Shape],
    group: dist.ProcessGroup,
    max_shard_bytes: int = 5 * 10**9,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the model that the slots of a group's ranks make up, as safetensors in directory
    `path`.

    Files are written under temporary names and renamed when all are complete, the index last; an
    earlier model in the directory is replaced. Every rank of the group calls it, and it returns
    when the checkpoint is there.

    Args:
        path: directory on a file system that all ranks share; made if need be.
        slots: what this rank holds.
        shapes: name and full shape of every tensor of the model, in the order in which files are
            filled.
        group: the model-parallel ranks of one data-parallel replica; ranks of other replicas do not
            call.
        max_shard_bytes: largest file, in bytes of tensors; a larger tensor has a file of its own.
        metadata: more header entries of each file, beside `format: pt`.
        dtype: dtype in the files; that of the parameters where None.

    Raises:
        WeightError: the ranks do not hold the whole model.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
    model = _survey(slots, shapes, group, dtype)
    files = split_files({name: tensor.nbytes for name, tensor in model.items()}, max_shard_bytes)
    titles = _titles(len(files))
    connect(group, slots[0].parameter.device)
    for first in range(0, len(files), len(ranks)):
        writers = dict(
            zip(ranks, files[first : first + len(ranks)], strict=False)
        )  # the last turn may be short
        tensors = _collect(writers, model, slots, group)
        if rank in writers:
            title = titles[first + ranks.index(rank)]
            save_file(
                tensors, _aside(directory / title), metadata={"format": "pt", **(metadata or {})}
            )
        del tensors
    all_gather_objects(None, group)  # all files are complete
    if rank == ranks[0]:
        _publish(
            directory,
            dict(zip(titles, files, strict=True)),
            sum(tensor.nbytes for tensor in model.values()),
        )
    all_gather_objects(None, group)


def split_files(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Cut the names of `sizes` (bytes a tensor), in order, into files of at most `max_shard_bytes`."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > max_shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def _files_of(directory: Path) -> dict[str, Path]:
    """The file that holds each tensor of the checkpoint."""
    single, index = directory / _SINGLE, directory / _INDEX
    if index.is_file():
        files = {
            name: directory / file
            for name, file in json.loads(index.read_text())["weight_map"].items()
        }
        absent = sorted({file.name for file in files.values() if not file.is_file()})
        if absent:
            raise WeightError(
                f"{directory}: {_INDEX} names {absent[0]}, which is not there; copy the whole checkpoint"
            )
        return files
    if single.is_file():
        with safe_open(single, framework="pt") as handle:
            return dict.fromkeys(handle.keys(), single)
    raise WeightError(
        f"{directory}: neither {_SINGLE} nor {_INDEX} there; give the directory of a Hugging Face model, and save an "
        f"older .bin checkpoint anew with transformers' save_pretrained"
    )


def _check(
    path: str | Path,
    tensors: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    allow_missing: tuple[str, ...],
    ignore: tuple[str, ...],
) -> None:
    """Refuse a checkpoint whose tensors are not exactly the model's."""
    missing = [name for name in shapes if name not in tensors and name not in allow_missing]
    if missing:
        raise WeightError(
            f"{path}: no tensor {_some(missing)}; the checkpoint is not of this model or not whole"
        )
    # A model without an output layer of its own is tied; some checkpoints of such models store the
    # copy.
    tied = not {"lm_head.weight", "score.weight"} & set(shapes)
    unused = {*ignore, "lm_head.weight"} if tied else set(ignore)
    unknown = [
        name for name in tensors if not (name in shapes or name in unused or name.endswith(_BUFFER))
    ]
    if unknown:
        raise WeightError(
            f"{path}: the model has no place for tensor {_some(unknown)}; check config.json beside it"
        )
    for name, shape in shapes.items():
        if name in tensors:
            found = tuple(tensors[name].get_slice(name).get_shape())
            if found != shape:
                raise WeightError(
                    f"{path}: {name} is {list(found)} and not {list(shape)}; check config.json beside it"
                )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


@dataclass(frozen=True)
class _Stored:
    """A named tensor of the model, as its ranks hold it.

    Attributes:
        shape: full shape.
        dtype: dtype in the file.
        holders: each slice of the tensor and the global ranks that hold it; the slices are in order
            and cover it.
    """

    shape: Shape
    dtype: torch.dtype
    holders: dict[Key, list[int]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def slice_shape(self, key: Key) -> Shape:
        """Shape of the slice `key`."""
        _, dim, start, stop = key
        return (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])


def _survey(
    slots: Sequence[Slot],
    shapes: Mapping[str, Shape],
    group: dist.ProcessGroup,
    dtype: torch.dtype | None,
) -> dict[str, _Stored]:
    """Which ranks of the group hold which slice of each tensor, in the order of `shapes`."""
    mine = [(slot.piece.key, dtype or slot.parameter.dtype) for slot in slots]
    everyone = zip(
        dist.get_process_group_ranks(group), all_gather_objects(mine, group), strict=True
    )
    holders: dict[str, dict[Key, list[int]]] = {name: {} for name in shapes}
    dtypes: dict[str, torch.dtype] = {}
    for rank, held in everyone:
        for key, stored in held:
            assert dtypes.setdefault(key[0], stored) == stored, f"{key[0]} has two dtypes"
            holders[key[0]].setdefault(key, []).append(rank)
    model = {}
    for name, shape in shapes.items():
        slices = sorted(holders[name].items())
        dim = slices[0][0][1] if slices else 0
        stops = [0, *(stop for (_, _, _, stop), _ in slices)]
        if [start for (_, _, start, _), _ in slices] != stops[:-1] or stops[-1] != shape[dim]:
            raise WeightError(
                f"{name}: the ranks that write do not hold the whole of it; pass their model-parallel group"
            )
        model[name] = _Stored(shape, dtypes[name], dict(slices))
    return model


def _collect(
    writers: Mapping[int, list[str]],
    model: Mapping[str, _Stored],
    slots: Sequence[Slot],
    group: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """The whole tensors that this rank writes in this turn, on the host.

    The ranks go through the writers' names in step, so that at any time one tensor a writer is
    under way.

    Args:
        writers: the names that each rank writes.
        model: who holds what.
        slots: what this rank holds.
        group: the ranks that take part.
    """
    rank = dist.get_rank()
    held = {slot.piece.key: slot for slot in slots}
    whole = {
        name: torch.empty(model[name].shape, dtype=model[name].dtype)
        for name in writers.get(rank, ())
    }
    for step in range(max(len(names) for names in writers.values())):
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        arrivals: list[tuple[Key, Tensor]] = []
        for writer, source, key in _routes(writers, model, step):
            if source == rank:
                piece = held[key].piece
                stored = (
                    held[key]
                    .view(piece.start, piece.stop)
                    .reshape(piece.shape(piece.start, piece.stop))
                )
                packed = stored.to(model[piece.name].dtype).contiguous()
                if writer != rank:
                    sends.append((writer, packed))
            elif writer == rank:
                tensor = model[key[0]]
                packed = torch.empty(
                    tensor.slice_shape(key), dtype=tensor.dtype, device=slots[0].parameter.device
                )
                receives.append((source, packed))
            if writer == rank:
                arrivals.append((key, packed))
        exchange(sends, receives, group)
        for (name, dim, start, stop), packed in arrivals:
            whole[name].narrow(dim, start, stop - start).copy_(packed)
    return whole


def _routes(
    writers: Mapping[int, list[str]], model: Mapping[str, _Stored], step: int
) -> Iterator[tuple[int, int, Key]]:
    """(writer, source rank, slice) for each writer's tensor number `step`; a writer is its own
    source if it can be.
    """
    for writer, names in writers.items():
        if step < len(names):
            for key, holders in model[names[step]].holders.items():
                yield writer, writer if writer in holders else holders[0], key


def _titles(count: int) -> list[str]:
    several = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return several if count > 1 else [_SINGLE]


def _aside(file: Path) -> Path:
    return file.with_name(f".{file.name}.tmp")


def _publish(directory: Path, files: Mapping[str, list[str]], total_bytes: int) -> None:
    """Put complete files in the place of an earlier checkpoint: the old index goes first, the new
    one comes last.
    """
    index = directory / _INDEX
    index.unlink(missing_ok=True)
    for old in directory.iterdir():
        if _WEIGHT_FILE.fullmatch(old.name) and old.name not in files:
            old.unlink()
    for title in files:
        _aside(directory / title).replace(directory / title)
    if len(files) > 1:
        weight_map = {name: title for title, names in files.items() for name in names}
        text = json.dumps(
            {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2
        )
        _aside(index).write_text(text)
        _aside(index).replace(index)
