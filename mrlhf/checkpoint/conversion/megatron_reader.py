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

from mrlhf.checkpoint.conversion.megatron_arguments import config_of, differences
from mrlhf.checkpoint.conversion.megatron_delta_nets import from_megatron, joined_forms
from mrlhf.checkpoint.conversion.megatron_gpt_oss import alternates, alternating
from mrlhf.checkpoint.conversion.megatron_names import Home, find_homes, split_names
from mrlhf.checkpoint.conversion.model_source import Description, ModelSource, TensorForm
from mrlhf.checkpoint.conversion.restricted_pickle import Name, read_pickle
from mrlhf.checkpoint.conversion.torch_dist import (
    COMMON_FILE,
    DTYPES,
    FORMAT_FILE,
    INDEX_FILE,
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


def find_folder(path: Path) -> Path | None:
    """The folder of the newest iteration in `path`, which may itself be one; None if none.

    A CheckpointError says that the file that names the newest one is wrong.
    """
    tracker = path / TRACKER_FILE
    if tracker.is_file():
        stated = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if stated == RELEASE:
            return path / RELEASE
        if not (stated.isascii() and stated.isdigit()):
            raise CheckpointError(
                f"{tracker}: says {stated!r}, which is no iteration; write the number of one there"
            )
        return path / f"iter_{int(stated):07d}"
    has_rest = (path / COMMON_FILE).is_file() or (path / INDEX_FILE).is_file()
    return path if (path / FORMAT_FILE).is_file() and has_rest else None


class Common(NamedTuple):
    """What a checkpoint holds beside tensors; None for what is missing."""

    arguments: Mapping[str, Any] | None  # from the run that wrote it
    iteration: int | None
    others: list[str]  # the other names in it
    refused: list[str]  # the classes that were not read


def read_common(folder: Path) -> Common:
    """Read that of a checkpoint with plain classes; CheckpointError if it is missing or damaged."""
    if (folder / COMMON_FILE).is_file():
        content, refused = read_pickle(folder / COMMON_FILE, _ALLOWED_IN_COMMON)
    else:
        content, refused = TorchDistReader(folder).read_common(_ALLOWED_IN_COMMON)
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder}: {COMMON_FILE} or its object is not a dictionary")

    stated = content.get("args")
    arguments = vars(stated) if isinstance(stated, argparse.Namespace) else None
    iteration = content.get("iteration")
    others = sorted(str(key) for key in content if key not in _CONVERTED)
    return Common(
        arguments, iteration if isinstance(iteration, int) else None, others, sorted(refused)
    )


class MegatronSource(ModelSource):
    """The weights of a Megatron-LM checkpoint, under Hugging Face's names."""

    def __init__(
        self,
        folder: Path,
        like: ModelSpec | None = None,
        assets: Path | None = None,
        vocab_size: int | None = None,
        model_type: str | None = None,
    ) -> None:
        """Read the index and the arguments, and find every tensor.

        Args:
            folder: one iteration.
            like: the model; None: as the checkpoint's arguments describe it.
            assets: a directory with the tokenizer, if there is one.
            vocab_size: rows of the embedding without padding; must agree with `like`.
            model_type: the family; must agree with `like`.

        Raises:
            CheckpointError: the checkpoint is damaged, lacks a tensor, has an unknown one, or is
                not of a model that we know.
        """
        self._folder = folder
        self.assets = assets
        self._reader = TorchDistReader(folder)
        self._common = read_common(folder)
        problem = next(self._reader.problems(), None)
        if problem is not None:
            raise CheckpointError(f"{folder} is not whole: {problem}; copy it again")
        names = [*self._reader.tensors, *self._reader.objects]
        weights, counts = split_names(names)
        objects = [name for name in self._reader.objects if name in set(weights)]
        if objects:
            raise CheckpointError(f"{folder}: unknown object {objects[0]}")

        stored = {name: self._reader.tensors[name] for name in weights}
        left_out = self._left_out(counts)
        if like is None:
            self.spec = self._spec_of_arguments(stored, vocab_size, model_type, left_out)
        else:
            self._check_like(like, vocab_size, model_type)
            self.spec = like
        self._forms, self._parts = joined_forms(self.spec, stored)
        self._homes = find_homes(self.spec, self._forms, str(folder))
        self.tensors = {}
        for name, shape in family_of(self.spec).tensor_shapes(self.spec).items():
            self.tensors[name] = TensorForm(shape, self._forms[self._homes[name].key].dtype)
        self.dtype = next(iter(self.tensors.values())).dtype
        step = None if folder.name == RELEASE else self._common.iteration
        self.description = Description("Megatron-LM checkpoint", step, left_out)
        self._parameters: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def read(self, name: str) -> Tensor:
        """One tensor; the parameter that holds it is kept while other tensors share it."""
        home = self._homes[name]
        return Slot(home.piece, self._parameter(home)).load().contiguous()

    def _left_out(self, counts: Mapping[str, int]) -> list[str]:
        """Describe the parts that are not converted."""
        left_out = [f"{count} {kind}" for kind, count in sorted(counts.items())]
        if self._common.others:
            left_out.append(f"in {COMMON_FILE}: {', '.join(self._common.others)}")
        if self._common.refused:
            left_out.append(f"unread classes in {COMMON_FILE}: {', '.join(self._common.refused)}")
        return left_out

    def _check_like(self, like: ModelSpec, vocab_size: int | None, model_type: str | None) -> None:
        """Refuse a model that contradicts the checkpoint or the options."""
        found = differences(like, self._common.arguments or {})
        if found:
            raise CheckpointError(f"{self._folder}: not the given model: {found[0]}")
        for option, stated, known in (
            ("--vocab-size", vocab_size, like.vocab_size),
            ("--model-type", model_type, like.family),
        ):
            if stated not in (None, known):
                raise CheckpointError(
                    f"{option} {stated} contradicts the config.json of --like or of the folder "
                    f"{ASSETS}, which says {known}; leave the option out, or give another --like"
                )

    def _spec_of_arguments(
        self,
        stored: Mapping[str, TensorForm],
        vocab_size: int | None,
        model_type: str | None,
        notes: list[str],
    ) -> ModelSpec:
        """The model that the checkpoint's arguments describe; may add to `notes` for the user."""
        arguments = self._common.arguments
        if arguments is None:
            raise CheckpointError(
                f"{self._folder}: holds no arguments; give the directory of a Hugging Face model "
                f"of the same shape with --like"
            )
        embedding = stored.get("embedding.word_embeddings.weight")
        if embedding is None:
            raise CheckpointError(
                f"{self._folder}: no embedding.word_embeddings.weight; only models of GPTModel are "
                "converted"
            )

        rows = embedding.shape[0]
        stated = arguments.get("vocab_size")
        if vocab_size is None and isinstance(stated, int) and 0 < stated <= rows:
            vocab_size = stated
        elif vocab_size is None:
            vocab_size = rows
            notes.append(
                f"the checkpoint does not say how many of its {rows} vocabulary rows are padding; "
                "all are kept, unless --like or --vocab-size says better"
            )
        try:
            spec = spec_of(config_of(arguments, vocab_size, model_type), "lm")
            found = differences(spec, arguments)
        except (CheckpointError, ConfigError) as error:
            raise CheckpointError(f"{self._folder}: {error}") from None
        if found:
            hint = "" if model_type else "; name its family with --model-type, if it has one here"
            raise CheckpointError(f"{self._folder}: not a {spec.family} model: {found[0]}{hint}")
        return spec

    def _parameter(self, home: Home) -> Tensor:
        """The parameter that holds a tensor, without vocabulary padding."""
        known_as = (home.key, home.numbers)
        if known_as in self._parameters:
            return self._parameters[known_as]

        stacked = len(home.numbers)
        parts = []
        for key in self._parts.get(home.key, [home.key]):
            shape = self._reader.tensors[key].shape
            rows = home.rows if key == home.key else shape[0]
            starts = (*home.numbers, *(0 for _ in shape[stacked:]))
            stops = (*(number + 1 for number in home.numbers), rows, *shape[stacked + 1 :])
            parts.append(self._reader.read(Box(key, starts, stops)).squeeze(tuple(range(stacked))))
        parameter = from_megatron(self.spec, home.key, parts).to(self._forms[home.key].dtype)
        if alternates(self.spec, home.key):
            parameter = alternating(parameter)
        if home.is_shared:
            # A layer's q, k and v follow each other, each with its bias: two parameters in turn.
            while len(self._parameters) > 1:
                del self._parameters[next(iter(self._parameters))]
            self._parameters[known_as] = parameter
        return parameter
