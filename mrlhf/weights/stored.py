"""The tensors that the safetensors files of a directory store, as `transformers` would find them.

Names, shapes and number formats come from the headers, so that a model can be checked without
reading it. This file does not know models or ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrlhf.data.hub_files import refuse_pointer
from mrlhf.errors import WeightError
from mrlhf.weights.forms import Columns, MatrixRows, OtherForm, Part, Rows
from mrlhf.weights.quantised import (
    FP8_BLOCK,
    INT4_GROUP,
    INT4_PACKED,
    Fp8Blocks,
    Int4Rows,
    MxFp4Rows,
)
from mrlhf.weights.shard import Shape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
_PREFIX = "model."
# In the files of a model that also reads images, as transformers writes them and as Kimi-K2.5 is.
_WRAPPED = "model.language_model."
_LANGUAGE = "language_model."
BUFFER = "rotary_emb.inv_freq"
_ROWS_AT_ONCE = 4096
FP8 = "F8_E4M3"
_SCALES = "_scale_inv"
_PACKED = ".weight_packed"
_PACKED_SCALES = ".weight_scale"
_PACKED_SHAPE = ".weight_shape"
_MXFP4_BLOCKS = "_blocks"
_MXFP4_SCALES = "_scales"


@dataclass(frozen=True)
class FileTensor:
    """A tensor as the header of its file describes it."""

    name: str  # in the file
    file: Path
    dtype: str  # as safetensors calls it
    shape: Shape  # its full shape, or that of the part
    part: Part | None = None  # the part of the named tensor that it is; None: all of it
    is_transposed: bool = False  # see `OtherForm`
    scales: FileTensor | None = None  # of the blocks of a matrix of fp8 numbers, or in MXFP4


@dataclass(frozen=True)
class ModelFiles:
    """All tensors of a directory."""

    directory: Path
    tensors: Mapping[str, FileTensor]  # by the name in the file
    remarks: tuple[str, ...] = ()  # hints for the user about the files, one line each


@dataclass(frozen=True)
class ExpectedTensors:
    """The tensors that a model expects in a directory."""

    shapes: Mapping[str, Shape]  # of every tensor of the model
    may_lack: tuple[str, ...] = ()  # tensors that the directory need not have
    ignored: tuple[str, ...] = ()  # tensors that the directory may have although the model does not
    ignored_prefixes: tuple[str, ...] = ()  # how the names of more such tensors begin
    # A tensor, and the one that is read in its place where the directory lacks it.
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    # By their names in a file, tensors that may be there in place of the model's.
    other_forms: Mapping[str, OtherForm] = field(default_factory=dict)


def survey(directory: Path) -> ModelFiles:
    """Read the headers of the checkpoint in `directory`.

    transformers reads `model.safetensors` even if an index stands beside it. Of the files that an
    index names it reads every tensor, in the order of their names; a later one replaces an earlier
    one of the same name.

    Raises:
        WeightError: there is no safetensors checkpoint, or a file of it is missing or damaged.
    """
    if (directory / ADAPTER_CONFIG).exists():
        raise WeightError(
            f"{directory}: adapter_config.json says that this is an adapter (LoRA); give the base "
            "model as path, and this directory as lora.path, or merge the two "
            "(tools/convert_checkpoint.py --merge)"
        )

    if (directory / SINGLE).exists():
        stored = read_headers(directory, [directory / SINGLE])
        if not (directory / INDEX).exists():
            return stored
        remark = f"{directory}: {SINGLE} is read, as by transformers, and not {INDEX}"
        return replace(stored, remarks=(remark, *stored.remarks))
    if (directory / INDEX).exists():
        return read_headers(directory, _indexed_files(directory / INDEX))
    raise WeightError(f"{directory}: {_absence(directory)}")


def read_headers(directory: Path, files: Iterable[Path]) -> ModelFiles:
    """Read some files' headers, a later tensor for an earlier one; WeightError if damaged."""
    remarks = []
    tensors: dict[str, FileTensor] = {}
    doubles: dict[str, str] = {}
    for file in files:
        for tensor in _header(file):
            earlier = tensors.get(tensor.name)
            if earlier is not None:
                doubles[tensor.name] = f"{tensor.name} is in {earlier.file.name} and in {file.name}"
            tensors[tensor.name] = tensor

    if doubles:
        more = f", and {len(doubles) - 1} more tensors are in two files" if len(doubles) > 1 else ""
        remarks.append(
            f"{directory}: {next(iter(doubles.values()))}{more}; the latter is read, as by "
            "transformers"
        )
    return ModelFiles(directory, tensors, tuple(remarks))


def holds_weights(directory: Path) -> bool:
    """Whether anything in a directory looks like weights, in a format that is read here or not."""
    if (directory / ADAPTER_CONFIG).exists() or (directory / INDEX).exists():
        return True
    return any(path.suffix in (".safetensors", *_OTHERS) for path in directory.iterdir())


def match(stored: ModelFiles, expected: ExpectedTensors) -> dict[str, FileTensor]:
    """The stored tensor of each tensor of a model.

    As transformers does, it adds or removes the prefix `model.`, or takes `language_model.` out of
    a name, where that makes it known.
    Quantised matrices, and stacks of them, come with the scales of their numbers.

    Raises:
        WeightError: a tensor is missing, unknown, ambiguous, of another shape than the model's, or
            of a number format that is not of weights.
    """
    directory = stored.directory
    stored = replace(stored, tensors=_with_scales(stored))
    known = {*expected.shapes, *expected.ignored}
    found: dict[str, FileTensor] = {}
    unknown = []
    for name, tensor in _by_model_name(stored, known, expected.other_forms):
        if name in found:
            raise WeightError(
                f"{directory}: {found[name].name} and {tensor.name} are both the model's {name}; "
                "keep one of them"
            )
        if name in known:
            found[name] = tensor
        elif not name.endswith(BUFFER) and not name.startswith(expected.ignored_prefixes):
            unknown.append(tensor.name)
    _check_formats(stored)

    for name, stand_in in expected.stand_ins.items():
        if name not in found and stand_in in found:
            found[name] = found[stand_in]

    missing = [
        name for name in expected.shapes if name not in found and name not in expected.may_lack
    ]
    if missing:
        raise WeightError(
            f"{directory}: no tensor {first_three(missing)}; the checkpoint is not of this model "
            "or not whole"
        )
    if unknown:
        raise WeightError(
            f"{directory}: the model has no place for tensor {first_three(unknown)}; check "
            "config.json beside it"
        )
    for name, shape in expected.shapes.items():
        if name in found:
            _require_shape(directory, name, found[name].shape, shape)
    return {name: found[name] for name in expected.shapes if name in found}


def names_in_files(names: Iterable[str], forms: Mapping[str, OtherForm]) -> dict[str, list[str]]:
    """For each tensor of files in these forms the model's tensors in it, in the order of `names`.

    A tensor that no form holds has its own name in a file.
    """
    holders = {part: name for name, form in forms.items() for part in form.parts}
    held: dict[str, list[str]] = {}
    for name in names:
        held.setdefault(holders.get(name, name), []).append(name)
    return held


def names_read(tensors: Iterable[FileTensor]) -> set[str]:
    """The names of all that files hold for these tensors, scales included."""
    names = set()
    for tensor in tensors:
        names.add(tensor.name)
        if tensor.scales is not None:
            names.add(tensor.scales.name)
        if tensor.name.endswith(_PACKED):
            names.add(f"{tensor.name.removesuffix(_PACKED)}{_PACKED_SHAPE}")
    return names


def are_equal(one: FileTensor, other: FileTensor, dtype: torch.dtype | None) -> bool:
    """Whether two matrices are equal in `dtype`, or in that of the first one."""
    if one.shape != other.shape:
        return False
    target = dtype or DTYPES.get(one.dtype)
    with open_files((one, other)) as lazily:
        first = lazily(one)
        second = lazily(other)
        for start in range(0, one.shape[0], _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            if not torch.equal(first[rows].to(target), second[rows].to(target)):
                return False
    return True


@contextmanager
def open_files(tensors: Iterable[FileTensor]) -> Iterator[Callable[[FileTensor], Any]]:
    """Open the files of some stored tensors; gives what reads one when it is indexed by slices."""
    with ExitStack() as stack:
        read = list(tensors)
        read += [tensor.scales for tensor in read if tensor.scales is not None]
        paths = sorted({tensor.file for tensor in read})
        handles = {path: stack.enter_context(_open(path)) for path in paths}

        @lru_cache(maxsize=1)  # all experts of a layer are read out of one tensor
        def at_once(file: Path, name: str) -> Tensor:
            read: Tensor = handles[file].get_tensor(name)
            return read

        def lazily(tensor: FileTensor) -> Any:
            if isinstance(tensor.part, Columns):
                part = tensor.part
                return at_once(tensor.file, tensor.name)[:, part.first :: part.step]
            whole = handles[tensor.file].get_slice(tensor.name)
            if isinstance(tensor.part, Rows):
                return whole[tensor.part.start : tensor.part.stop]
            if tensor.part is None:
                if tensor.scales is None:
                    return whole
                if tensor.name.endswith(_PACKED):
                    return Int4Rows(whole, lazily(tensor.scales))
                return Fp8Blocks(whole, tensor.shape, lazily(tensor.scales)[:])
            if tensor.scales is None:
                return _SliceOfMatrix(whole, tensor.part, tensor.is_transposed)
            return MxFp4Rows(
                _SliceOfMatrix(whole, tensor.part),
                _SliceOfMatrix(lazily(tensor.scales), tensor.part),
            )

        yield lazily


def read_tensor(tensor: FileTensor) -> Tensor:
    """Read one tensor, whose file is mapped into memory no longer than that."""
    # With all files mapped, a process would seem to need as much memory as the model.
    with open_files([tensor]) as lazily:
        return lazily(tensor)[:]


class _SliceOfMatrix:
    """Some rows of a matrix in a stack, which are read when this is indexed."""

    def __init__(self, stack: Any, part: MatrixRows, is_transposed: bool = False) -> None:
        self._stack = stack
        self._part = part
        self._is_transposed = is_transposed

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        part = self._part
        start, stop, _ = rows.indices(part.stop - part.start)
        matrix = slice(part.number, part.number + 1)
        rows = slice(part.start + start, part.start + stop)
        if self._is_transposed:
            return self._stack[matrix, columns[0] if columns else slice(None), rows][0].t()
        place = (matrix, rows, *columns)
        return self._stack[place][0]


def _open(file: Path) -> Any:
    refuse_pointer(file, WeightError)
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{file}: not readable: {_one_line(error)}; copy it again") from error


def _header(file: Path) -> list[FileTensor]:
    """The tensors of a file, in the order of the names."""
    tensors = []
    with _open(file) as handle:
        for name in sorted(handle.keys()):
            stored = handle.get_slice(name)
            shape = tuple(stored.get_shape())
            tensors.append(FileTensor(name, file, str(stored.get_dtype()), shape))
    return tensors


def _indexed_files(index: Path) -> list[Path]:
    """The files that an index names, in the order in which transformers reads them."""
    refuse_pointer(index, WeightError)
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightError(f"{index}: not readable: {_one_line(error)}; copy it again") from error

    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and "\0" not in name for name in names):
        raise WeightError(
            f'{index}: "weight_map", which gives the name of a file for each tensor, is missing or '
            "malformed; copy it again"
        )

    files = [index.parent / name for name in sorted(set(names))]
    for file in files:
        if not file.is_file():
            raise WeightError(
                f"{index.parent}: {INDEX} names {file.name}, which is not there; copy the whole "
                "checkpoint"
            )
    return files


def _absence(directory: Path) -> str:
    """Say why a directory without the files of a checkpoint cannot be read, and the remedy."""
    there = sorted(path.name for path in directory.glob("*")) if directory.is_dir() else []
    shards = [name for name in there if name.endswith(".safetensors")]
    if shards:
        return f"{shards[0]} is there without {INDEX}; copy the whole checkpoint"
    others = [name for name in there if name.endswith(_OTHERS)]
    if others:
        return (
            f"{others[0]} is there, but only safetensors are read; load the model with "
            f"transformers and save it anew with save_pretrained, which writes {SINGLE}"
        )
    return (
        f"neither {SINGLE} nor {INDEX} there; give the directory of a Hugging Face model, and save "
        "an older .bin checkpoint anew with transformers' save_pretrained"
    )


def _by_model_name(
    stored: ModelFiles, known: Collection[str], other_forms: Mapping[str, OtherForm]
) -> Iterator[tuple[str, FileTensor]]:
    """The stored tensors by the model's names, or by their own where it does not know them."""
    names = {*known, *other_forms}
    for own, tensor in stored.tensors.items():
        name = model_name(own, names)
        read = tensor if tensor.scales is None else replace(tensor, dtype="BF16")
        if name in known or name not in other_forms:
            yield name, read
            continue
        form = other_forms[name]
        _require_shape(stored.directory, name, tensor.shape, form.shape)
        read = replace(read, is_transposed=form.is_transposed)
        for held, part in form.parts.items():
            yield held, replace(read, shape=form.shape_of(part), part=part)


def _with_scales(stored: ModelFiles) -> dict[str, FileTensor]:
    """The tensors other than scales; quantised matrices and stacks have theirs.

    One of packed integers has the name of the matrix that it stands for.
    """
    tensors = dict(stored.tensors)
    for name, scales in stored.tensors.items():
        matrix = stored.tensors.get(name.removesuffix(_SCALES))
        stack = stored.tensors.get(f"{name.removesuffix(_MXFP4_SCALES)}{_MXFP4_BLOCKS}")
        if name.endswith(_SCALES) and matrix is not None and matrix.dtype == FP8:
            blocks = tuple(-(-size // FP8_BLOCK) for size in matrix.shape)
            if len(blocks) != 2:
                continue  # refused for its format
        elif stack is not None and stack.dtype == scales.dtype == "U8":
            matrix = stack
            blocks = stack.shape[:-1]
        else:
            continue
        _require_shape(stored.directory, name, scales.shape, blocks)
        tensors[matrix.name] = replace(matrix, scales=scales)
        del tensors[name]

    for name, packed in stored.tensors.items():
        module = name.removesuffix(_PACKED)
        steps = stored.tensors.get(f"{module}{_PACKED_SCALES}")
        if module == name or steps is None or packed.dtype != "I32" or len(packed.shape) != 2:
            continue  # if it is quantised, it is refused for its format
        rows, columns = packed.shape
        shape = (rows, columns * INT4_PACKED)
        _require_shape(stored.directory, steps.name, steps.shape, (rows, shape[1] // INT4_GROUP))
        tensors[f"{module}.weight"] = replace(packed, shape=shape, scales=steps)
        for unneeded in (_PACKED, _PACKED_SCALES, _PACKED_SHAPE):
            tensors.pop(f"{module}{unneeded}", None)
    return tensors


def _require_shape(directory: Path, name: str, shape: Shape, expected: Shape) -> None:
    """Raise a WeightError with both shapes if they differ."""
    if shape != expected:
        raise WeightError(
            f"{directory}: {name} is {list(shape)} and not {list(expected)}; check config.json "
            "beside it"
        )


def model_name(name: str, known: Collection[str]) -> str:
    """The model's name of a stored tensor, or its own if the model does not know it."""
    others = (
        *(name.removeprefix(_PREFIX), _PREFIX + name),
        *(name.replace(_WRAPPED, _PREFIX, 1), name.removeprefix(_LANGUAGE)),
    )
    return next((other for other in others if other in known), name)


def _check_formats(stored: ModelFiles) -> None:
    """Refuse integers and numbers of 8 bits or fewer: they need scales to mean anything."""
    for tensor in stored.tensors.values():
        if tensor.dtype not in DTYPES and tensor.scales is None:
            raise WeightError(
                f"{tensor.file}: {tensor.name} is of type {tensor.dtype}, and no scales that are "
                "read lie beside it; if they should, copy the model again, else give it in "
                "bfloat16, float16 or float32"
            )


def first_three(names: list[str]) -> str:
    """The first names of a list, for messages."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
