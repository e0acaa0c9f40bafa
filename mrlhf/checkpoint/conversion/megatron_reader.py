"""Reads the weights of Megatron-LM's own checkpoints.

A directory of Megatron-LM has a folder for each saved iteration, or one called `release`, and a
file that names the newest. Optimizer state is not converted. This file does not know Hugging Face's
files.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrlhf.checkpoint.conversion.megatron_arguments import (
    config_of,
    differences,
)
from mrlhf.checkpoint.conversion.megatron_names import (
    Home,
    find_homes,
    split_names,
)
from mrlhf.checkpoint.conversion.model_source import Description, TensorForm
from mrlhf.checkpoint.conversion.restricted_pickle import Name, read_torch_file
from mrlhf.checkpoint.conversion.torch_dist import (
    COMMON_FILE,
    DTYPES,
    FORMAT_FILE,
    TorchDistReader,
)
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.models.families import family_of, spec_of
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.boxes import Box
from mrlhf.weights.shard import Slot

TRACKER_FILE = "latest_checkpointed_iteration.txt"
ASSETS = "huggingface"
RELEASE = "release"

_ALLOWED_IN_COMMON: dict[Name, Any] = {
    **DTYPES,
    ("torch", "Size"): torch.Size,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("collections", "OrderedDict"): dict,
}
_CONVERTED = ("args", "iteration", "checkpoint_version", "content_metadata")


class Place(NamedTuple):
    """A checkpoint of Megatron-LM: the directory for its options, and a folder in it."""

    root: Path
    folder: Path


def find_place(path: Path) -> Place | None:
    """The newest checkpoint in `path`, which may also be the folder of one iteration; None if none.

    Raises:
        CheckpointError: the file that names the newest one is wrong.
    """
    tracker = path / TRACKER_FILE
    if tracker.is_file():
        stated = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if stated != RELEASE and not (stated.isascii() and stated.isdigit()):
            raise CheckpointError(
                f"{tracker}: says {stated!r}, which is no iteration; write the number of one there"
            )
        folder = stated if stated == RELEASE else f"iter_{int(stated):07d}"
        return Place(path, path / folder)
    if (path / FORMAT_FILE).is_file() and (path / COMMON_FILE).is_file():
        return Place(path.parent, path)
    return None


class Common(NamedTuple):
    """The content of `common.pt`.

    Attributes:
        arguments: from the run that wrote it; None if they are missing.
        iteration: None if it is missing.
        others: the other names in it.
        refused: the classes that were not read.
    """

    arguments: Mapping[str, Any] | None
    iteration: int | None
    others: list[str]
    refused: list[str]


def read_common(folder: Path) -> Common:
    """Read `common.pt` with plain classes alone; CheckpointError if it is missing or damaged."""
    content, refused = read_torch_file(folder / COMMON_FILE, _ALLOWED_IN_COMMON)
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / COMMON_FILE}: not a dictionary")

    stated = content.get("args")
    arguments = vars(stated) if isinstance(stated, argparse.Namespace) else None
    iteration = content.get("iteration")
    others = sorted(str(key) for key in content if key not in _CONVERTED)
    return Common(
        arguments, iteration if isinstance(iteration, int) else None, others, sorted(refused)
    )


class MegatronSource:
    """The weights of a Megatron-LM checkpoint, under Hugging Face's names."""

    def __init__(
        self,
        place: Place,
        like: ModelSpec | None = None,
        assets: Path | None = None,
        vocab_size: int | None = None,
        model_type: str | None = None,
    ) -> None:
        """Read the index and the arguments, and find every tensor.

        Args:
            like: the model; None: as the checkpoint's arguments describe it.
            assets: a directory with the tokenizer, if there is one.
            vocab_size: rows of the embedding without padding; must agree with `like`.
            model_type: the family; must agree with `like`.

        Raises:
            CheckpointError: the checkpoint is damaged, lacks a tensor, has an unknown one, or is
                not of a model that we know.
        """
        self._place = place
        self.assets = assets
        self._reader = TorchDistReader(place.folder)
        self._common = read_common(place.folder)
        problem = next(self._reader.problems(), None)
        if problem is not None:
            raise CheckpointError(f"{place.folder} is not whole: {problem}; copy it again")
        names = [*self._reader.tensors, *self._reader.objects]
        weights, self._left_out = split_names(names)
        objects = [name for name in self._reader.objects if name in set(weights)]
        if objects:
            raise CheckpointError(f"{place.folder}: unknown object {objects[0]}")

        stored = {name: self._reader.tensors[name] for name in weights}
        self._notes: list[str] = []
        self.spec = self._find_spec(like, stored, vocab_size, model_type)
        self._homes = find_homes(self.spec, stored, str(place.folder))
        self.tensors: dict[str, TensorForm] = {}
        for name, shape in family_of(self.spec).tensor_shapes(self.spec).items():
            self.tensors[name] = TensorForm(shape, stored[self._homes[name].key].dtype)
        self._parameters: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding."""
        return next(iter(self.tensors.values())).dtype

    def read(self, name: str) -> Tensor:
        """Read one tensor; the parameter that holds it is kept while other tensors share it."""
        home = self._homes[name]
        return Slot(home.piece, self._parameter(home)).load().contiguous()

    def describe(self) -> Description:
        """Describe the checkpoint, and the parts that are not converted."""
        left_out = [f"{count} {kind}" for kind, count in sorted(self._left_out.items())]
        if self._common.others:
            left_out.append(f"in {COMMON_FILE}: {', '.join(self._common.others)}")
        if self._common.refused:
            left_out.append(f"unread classes in {COMMON_FILE}: {', '.join(self._common.refused)}")
        step = None if self._place.folder.name == RELEASE else self._common.iteration
        return Description("Megatron-LM checkpoint", step, [*left_out, *self._notes])

    def close(self) -> None:
        """Close the files."""
        self._parameters.clear()
        self._reader.close()

    def _find_spec(
        self,
        like: ModelSpec | None,
        stored: Mapping[str, TensorForm],
        vocab_size: int | None,
        model_type: str | None,
    ) -> ModelSpec:
        arguments = self._common.arguments
        if like is not None:
            found = differences(like, arguments or {})
            if found:
                raise CheckpointError(f"{self._place.folder}: not the given model: {found[0]}")
            _check_stated("--vocab-size", vocab_size, like.vocab_size)
            _check_stated("--model-type", model_type, like.family)
            return like
        if arguments is None:
            raise CheckpointError(
                f"{self._place.folder / COMMON_FILE}: holds no arguments; give the directory of a "
                f"Hugging Face model of the same shape with --like"
            )

        rows = self._vocabulary_rows(stored)
        vocab_size = vocab_size or self._stated_vocabulary(arguments, rows)
        try:
            spec = spec_of(config_of(arguments, vocab_size, model_type), "lm")
            found = differences(spec, arguments)
        except (CheckpointError, ConfigError) as error:
            raise CheckpointError(f"{self._place.folder}: {error}") from None
        if found:
            hint = "" if model_type else "; name its family with --model-type, if it has one here"
            raise CheckpointError(
                f"{self._place.folder}: not a {spec.family} model: {found[0]}{hint}"
            )
        return spec

    def _vocabulary_rows(self, stored: Mapping[str, TensorForm]) -> int:
        embedding = stored.get("embedding.word_embeddings.weight")
        if embedding is None:
            raise CheckpointError(
                f"{self._place.folder}: no embedding.word_embeddings.weight; only models of "
                f"GPTModel are converted"
            )
        return embedding.shape[0]

    def _stated_vocabulary(self, arguments: Mapping[str, Any], rows: int) -> int:
        stated = arguments.get("vocab_size")
        if isinstance(stated, int) and 0 < stated <= rows:
            return stated
        self._notes.append(
            f"the checkpoint does not say how many of its {rows} vocabulary rows are padding; all "
            f"are kept, unless --like or --vocab-size says better"
        )
        return rows

    def _parameter(self, home: Home) -> Tensor:
        """The parameter that holds a tensor, without vocabulary padding."""
        known_as = (home.key, home.numbers)
        if known_as in self._parameters:
            return self._parameters[known_as]

        stacked = len(home.numbers)
        shape = self._reader.tensors[home.key].shape
        starts = (*home.numbers, *(0 for _ in shape[stacked:]))
        stops = (*(number + 1 for number in home.numbers), home.rows, *shape[stacked + 1 :])
        parameter = self._reader.read(Box(home.key, starts, stops)).squeeze(tuple(range(stacked)))
        if home.is_shared:
            # A layer's q, k and v follow each other, each with its bias: two parameters in turn.
            while len(self._parameters) > 1:
                del self._parameters[next(iter(self._parameters))]
            self._parameters[known_as] = parameter
        return parameter


def _check_stated(option: str, stated: int | str | None, known: int | str) -> None:
    """Refuse an option that contradicts the model's `config.json`."""
    if stated not in (None, known):
        raise CheckpointError(
            f"{option} {stated} contradicts the config.json of --like or of the folder {ASSETS}, "
            f"which says {known}; leave the option out, or give another --like"
        )
