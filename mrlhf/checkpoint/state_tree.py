"""Writes a tree of plain values and tensors as JSON and safetensors, and reads it back.

The parts of a run give their state by `state_dict`: numbers, texts, lists, dictionaries, tensors,
and functions without arguments, which give a part of the tree once it is written. Nothing is
pickled. This file does not know whose state it is, but for that of the process's random number
generators.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mrlhf.checkpoint.tensor_file import TensorSource, WrittenFile, write_bytes, write_tensors
from mrlhf.errors import CheckpointError

_TENSOR = "__tensor__"
_JSON = "state.json"
_TENSORS = "state.safetensors"
_Class = TypeVar("_Class")


@dataclass(frozen=True)
class StateCopy:
    """A state as it was when it was copied, ready to be written."""

    text: bytes  # everything but the tensors, as JSON
    tensors: list[TensorSource]

    @staticmethod
    def of(state: Mapping[str, Any]) -> StateCopy:
        """Copy `state`: dictionaries have text keys; a tuple comes back as a list."""
        tensors: dict[str, Tensor] = {}
        tree = _plain(state, "", tensors)
        text = json.dumps(tree, separators=(",", ":")).encode()
        return StateCopy(text, [TensorSource.of(key, t).copied() for key, t in tensors.items()])

    def write(self, root: Path, sync: bool = True) -> list[WrittenFile]:
        """Write it as `state.json` and `state.safetensors` in `root`; `sync` waits for the disk."""
        return [
            write_bytes(root, _JSON, self.text, sync),
            write_tensors(root, _TENSORS, self.tensors, sync),
        ]


def read_state(root: Path) -> dict[str, Any]:
    """The state that `StateCopy.write` wrote; CheckpointError if it cannot be read."""
    try:
        tree = json.loads((root / _JSON).read_bytes())
        state: dict[str, Any] = _filled(tree, load_file(root / _TENSORS))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{root}: the state of the run cannot be read: {error}") from error
    return state


def state_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, and of the dataclasses in it, as a tree for `StateCopy`."""
    state = {}
    for item in fields(value):
        content = getattr(value, item.name)
        if isinstance(content, list) and content and is_dataclass(content[0]):
            content = [state_of(entry) for entry in content]
        state[item.name] = state_of(content) if is_dataclass(content) else content
    return state


def object_from(kind: type[_Class], state: Mapping[str, Any]) -> _Class:
    """The dataclass of class `kind` whose `state_of` is `state`."""
    hints = get_type_hints(kind)
    arguments = {}
    for name, content in state.items():
        part = _dataclass_in(hints[name])
        if part is not None and isinstance(content, Mapping):
            content = object_from(part, content)
        elif part is not None and isinstance(content, list):
            content = [object_from(part, entry) for entry in content]
        arguments[name] = content
    return kind(**arguments)


def _dataclass_in(hint: Any) -> type[Any] | None:
    """The first dataclass that a type names, as `list[Scores] | None` names `Scores`."""
    if isinstance(hint, type) and is_dataclass(hint):
        return hint
    return next(filter(None, map(_dataclass_in, get_args(hint))), None)


def _plain(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """`value` with each tensor moved to `tensors`, under the path at which it stood."""
    if callable(value):
        value = value()
    if isinstance(value, Tensor):
        tensors[path] = value
        return {_TENSOR: path}

    if isinstance(value, Mapping):
        plain = {}
        for key, item in value.items():
            assert isinstance(key, str), f"{path}: the key {key!r} is no text"
            plain[key] = _plain(item, f"{path}/{key}", tensors)
        return plain

    if isinstance(value, (list, tuple)):
        if all(isinstance(item, (int, float, str, bool, type(None))) for item in value):
            return list(value)
        return [_plain(item, f"{path}/{number}", tensors) for number, item in enumerate(value)]

    assert value is None or isinstance(value, (int, float, str, bool)), (
        f"{path}: a {type(value).__name__} cannot be saved"
    )
    return value


def _filled(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `_plain`."""
    if isinstance(tree, dict):
        if tree.keys() == {_TENSOR}:
            return tensors[tree[_TENSOR]]
        return {key: _filled(item, tensors) for key, item in tree.items()}
    if isinstance(tree, list) and any(isinstance(item, (dict, list)) for item in tree):
        return [_filled(item, tensors) for item in tree]
    return tree


def random_state() -> dict[str, Tensor]:
    """The state of the generators of Python, numpy, torch and, if there is one, the GPU."""
    _, numbers, next_gauss = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_gauss": torch.tensor(
            [] if next_gauss is None else [next_gauss], dtype=torch.float64
        ),
        "numpy_keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Restore a state from `random_state`; a GPU's is left out where there is none."""
    next_gauss = state["python_gauss"].tolist()
    numbers = tuple(state["python"].tolist())
    random.setstate((3, numbers, next_gauss[0] if next_gauss else None))
    position, has_gauss, gauss = state["numpy_rest"].tolist()
    keys = state["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
