"""Reads and writes the weights of Megatron-LM's own checkpoints.

A directory of Megatron-LM has one folder for each saved iteration, or one called `release`, and a
file that names the newest. Its optimizer state is not converted. This file does not know Hugging
Face's files: `model_files` does.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrlhf.checkpoint.megatron_arguments import (
    arguments_of,
    command_line,
    config_of,
    differences,
)
from mrlhf.checkpoint.megatron_names import (
    FUSED_NORMS,
    LAYERS,
    STATEFUL_MODULES,
    Home,
    find_homes,
    split_names,
    whole_model,
)
from mrlhf.checkpoint.restricted_pickle import Name, read_torch_file
from mrlhf.checkpoint.tensor_streams import Description, StoredTensor
from mrlhf.checkpoint.torch_dist import (
    COMMON_FILE,
    DTYPES,
    FORMAT,
    FORMAT_FILE,
    TorchDistReader,
    TorchDistWriter,
)
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.models.families import family_of, spec_of
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Slot, local_shape, pieces_of

TRACKER_FILE = "latest_checkpointed_iteration.txt"
OPTIONS_FILE = "pretrain_gpt_options.txt"
ASSETS = "huggingface"
_RELEASE = "release"

_ALLOWED_IN_COMMON: dict[Name, Any] = {
    **DTYPES,
    ("torch", "Size"): torch.Size,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("collections", "OrderedDict"): dict,
}
_CONVERTED = ("args", "iteration", "checkpoint_version", "content_metadata")


class Place(NamedTuple):
    """A checkpoint of Megatron-LM.

    Attributes:
        root: the directory that Megatron-LM is given.
        folder: that of one iteration, in it.
    """

    root: Path
    folder: Path


def find_place(path: Path) -> Place | None:
    """The newest checkpoint in `path`, which may also be the folder of one iteration.

    Returns:
        None if this is no directory of Megatron-LM.

    Raises:
        CheckpointError: the file that names the newest one is wrong.
    """
    tracker = path / TRACKER_FILE
    if tracker.is_file():
        stated = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if stated != _RELEASE and not (stated.isascii() and stated.isdigit()):
            raise CheckpointError(
                f"{tracker}: says {stated!r}, which is no iteration; write the number of one there"
            )
        folder = stated if stated == _RELEASE else f"iter_{int(stated):07d}"
        return Place(path, path / folder)
    if (path / FORMAT_FILE).is_file() and (path / COMMON_FILE).is_file():
        return Place(path.parent, path)
    return None


class Common(NamedTuple):
    """What `common.pt` says.

    Attributes:
        arguments: of the run that wrote it; None if they are not there.
        iteration: of the run, if it is there.
        others: the names of what else is there.
        refused: the classes that were not looked at.
    """

    arguments: Mapping[str, Any] | None
    iteration: int | None
    others: list[str]
    refused: list[str]


def read_common(folder: Path) -> Common:
    """Read `common.pt`, without making an object of any class but plain ones.

    Raises:
        CheckpointError: it is missing or damaged.
    """
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
        vocab_size: int | None = None,
        model_type: str | None = None,
    ) -> None:
        """Read the index and the arguments, and find every tensor.

        Args:
            place: the checkpoint.
            like: the model; if None, what the checkpoint's arguments describe.
            vocab_size: rows of the embedding without padding, if `like` does not say.
            model_type: the family, if `like` does not say.

        Raises:
            CheckpointError: the checkpoint is damaged, lacks a tensor, has an unknown one, or is
                not of a model that we know.
        """
        self._place = place
        self._common = read_common(place.folder)
        self._reader = TorchDistReader(place.folder)
        names = [*self._reader.tensors, *self._reader.objects]
        weights, self._left_out = split_names(names)
        objects = [name for name in self._reader.objects if name in set(weights)]
        if objects:
            raise CheckpointError(f"{place.folder}: unknown object {objects[0]}")

        stored = {name: self._reader.tensors[name] for name in weights}
        self._notes: list[str] = []
        self.spec = self._find_spec(like, stored, vocab_size, model_type)
        self._homes = find_homes(self.spec, stored, str(place.folder))
        self.tensors: dict[str, StoredTensor] = {}
        for name, shape in family_of(self.spec).tensor_shapes(self.spec).items():
            self.tensors[name] = StoredTensor(shape, stored[self._homes[name].key].dtype)
        self._parameters: dict[tuple[str, int | None], Tensor] = {}

    @property
    def assets(self) -> Path | None:
        """The directory that our own writer puts beside the iterations."""
        directory = self._place.root / ASSETS
        return directory if directory.is_dir() else None

    def read(self, name: str) -> Tensor:
        """One tensor; the parameter that holds it is read, and kept while others share it."""
        home = self._homes[name]
        return Slot(home.piece, self._parameter(home)).load().contiguous()

    def describe(self) -> Description:
        """What of the checkpoint is not converted."""
        left_out = [f"{count} {kind}" for kind, count in sorted(self._left_out.items())]
        if self._common.others:
            left_out.append(f"in {COMMON_FILE}: {', '.join(self._common.others)}")
        if self._common.refused:
            left_out.append(f"unread classes in {COMMON_FILE}: {', '.join(self._common.refused)}")
        step = None if self._place.folder.name == _RELEASE else self._common.iteration
        return Description("Megatron-LM checkpoint", step, [*left_out, *self._notes])

    def close(self) -> None:
        """Close the files."""
        self._parameters.clear()
        self._reader.close()

    def _find_spec(
        self,
        like: ModelSpec | None,
        stored: Mapping[str, StoredTensor],
        vocab_size: int | None,
        model_type: str | None,
    ) -> ModelSpec:
        arguments = self._common.arguments
        if like is not None:
            found = differences(like, arguments or {})
            if found:
                raise CheckpointError(f"{self._place.folder}: not the given model: {found[0]}")
            return like
        if arguments is None:
            raise CheckpointError(
                f"{self._place.folder / COMMON_FILE}: holds no arguments; give the directory of a "
                f"Hugging Face model of the same shape with --like"
            )

        rows = self._vocabulary_rows(stored)
        vocab_size = vocab_size or self._stated_vocabulary(arguments, rows)
        try:
            return spec_of(config_of(arguments, vocab_size, model_type), "lm")
        except (CheckpointError, ConfigError) as error:
            raise CheckpointError(f"{self._place.folder}: {error}") from None

    def _vocabulary_rows(self, stored: Mapping[str, StoredTensor]) -> int:
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
        """The parameter in which a tensor lies, vocabulary padding left out."""
        place = (home.key, home.layer)
        if place in self._parameters:
            return self._parameters[place]

        if home.layer is None:
            parameter = self._reader.read(home.key, (0, home.rows))
        else:
            parameter = self._reader.read(home.key, (home.layer, home.layer + 1))[0]
        if home.is_shared:
            # A layer's q, k and v follow each other, each with its bias: two parameters in turn.
            while len(self._parameters) > 1:
                del self._parameters[next(iter(self._parameters))]
            self._parameters[place] = parameter
        return parameter


class MegatronSink:
    """Writes a directory that Megatron-LM loads: weights alone, as a `release`."""

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        dtype: torch.dtype,
        *,
        step: int | None,
        vocab_divisible_by: int,
        fused_norms: bool,
        max_file_bytes: int,
    ) -> None:
        """Begin to write in the empty `directory`.

        Args:
            directory: that Megatron-LM will be given.
            spec: the model, a language model.
            dtype: of the weights, for the arguments.
            step: training step of the weights, if it is known.
            vocab_divisible_by: the embedding gets rows of zeros until this divides them.
            fused_norms: name norms as TransformerEngine's fused layers do, as Megatron-LM does.
            max_file_bytes: after how many bytes a file ends.

        Raises:
            CheckpointError: Megatron-LM cannot express the model.
        """
        if spec.head != "lm":
            raise CheckpointError(
                "Megatron-LM has no model with a scalar head; convert the critic or reward model "
                "to Hugging Face"
            )
        self._directory = directory
        self._spec = spec
        self._dtype = dtype
        self._step = step
        self._divisor = vocab_divisible_by
        self._fused_norms = fused_norms
        self._padded_vocab = -(-spec.vocab_size // vocab_divisible_by) * vocab_divisible_by
        self._arguments = arguments_of(spec, self._padded_vocab)

        folder = directory / _RELEASE
        folder.mkdir(parents=True)
        self._writer = TorchDistWriter(folder, max_file_bytes)
        self._missing, self._parameter_of = self._plan()
        self._filling: dict[str, Tensor] = {}

    def write(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; its parameter is written when all tensors of it have come."""
        for slot_name in self._parameter_of.pop(name):
            slots = self._slots(slot_name, tensor.dtype)
            for slot in slots:
                if slot.piece.name == name:
                    slot.store(tensor)
            self._missing[slot_name].remove(name)
            if not self._missing[slot_name]:
                self._write_parameter(slot_name, self._filling.pop(slot_name))

    def finish(self) -> list[str]:
        """Write the index, the arguments, and the file that names the checkpoint."""
        if self._parameter_of:
            raise CheckpointError(f"{next(iter(self._parameter_of))} has not come")
        for layer in range(self._spec.num_layers):
            for module in STATEFUL_MODULES:
                key = f"{LAYERS}{module}._extra_state/shard_{layer}_{self._spec.num_layers}"
                self._writer.write_object(key, None)

        self._writer.finish(
            {
                "args": argparse.Namespace(**self._arguments, **self._run_arguments()),
                "checkpoint_version": 3.0,
                "iteration": self._step or 0,
                "num_floating_point_operations_so_far": 0,
                "content_metadata": {
                    "singleton_local_shards": False,
                    "chained_optim_avoid_prefix": True,
                },
            }
        )
        (self._directory / OPTIONS_FILE).write_text(command_line(self._arguments), encoding="utf-8")
        (self._directory / TRACKER_FILE).write_text(_RELEASE, encoding="utf-8")
        return [
            f"{OPTIONS_FILE} holds the options of pretrain_gpt.py for this model; it holds no "
            f"optimizer state, and Megatron-LM begins at iteration 0"
        ]

    def _plan(self) -> tuple[dict[str, set[str]], dict[str, list[str]]]:
        """The named tensors of each parameter, and the parameters of each named tensor."""
        missing: dict[str, set[str]] = {}
        parameter_of: dict[str, list[str]] = {}
        family = family_of(self._spec)
        whole = whole_model(self._spec)
        for parameter in family.parameter_names(self._spec, whole):
            names = family.rule_of(self._spec, whole, parameter).names
            missing[parameter] = set(names)
            for name in names:
                parameter_of.setdefault(name, []).append(parameter)
        return missing, parameter_of

    def _slots(self, parameter: str, dtype: torch.dtype) -> list[Slot]:
        family = family_of(self._spec)
        shapes = family.tensor_shapes(self._spec)
        rule = family.rule_of(self._spec, whole_model(self._spec), parameter)
        if parameter not in self._filling:
            shape = local_shape(rule, shapes, tp_size=1)
            self._filling[parameter] = torch.zeros(shape, dtype=dtype)
        values = self._filling[parameter]
        return [Slot(piece, values) for piece in pieces_of(parameter, rule, shapes, 0, 1)]

    def _write_parameter(self, parameter: str, values: Tensor) -> None:
        if not parameter.startswith(LAYERS):
            offsets = (0,) * values.dim()
            full_shape = tuple(values.shape)
            if parameter.endswith("embeddings.weight") or parameter == "output_layer.weight":
                full_shape = (self._padded_vocab, values.shape[1])
            self._writer.write_box(parameter, full_shape, offsets, values)
            if full_shape[0] > len(values):
                padding = values.new_zeros(full_shape[0] - len(values), values.shape[1])
                self._writer.write_box(parameter, full_shape, (len(values), 0), padding)
            return

        layer, _, rest = parameter.removeprefix(LAYERS).partition(".")
        if self._fused_norms:
            rest = FUSED_NORMS.get(rest, rest)
        full_shape = (self._spec.num_layers, *values.shape)
        offsets = (int(layer),) + (0,) * values.dim()
        self._writer.write_box(LAYERS + rest, full_shape, offsets, values.unsqueeze(0))

    def _run_arguments(self) -> dict[str, Any]:
        """What Megatron-LM also reads of the run that wrote a checkpoint."""
        return {
            "make_vocab_size_divisible_by": self._divisor,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "virtual_pipeline_model_parallel_size": None,
            "expert_model_parallel_size": 1,
            "context_parallel_size": 1,
            "data_parallel_size": 1,
            "world_size": 1,
            "ckpt_format": FORMAT,
            "use_dist_ckpt": True,
            "iteration": self._step or 0,
            "consumed_train_samples": 0,
            "consumed_valid_samples": 0,
            "skipped_train_samples": 0,
            "no_save_optim": True,
            "no_save_rng": True,
            "params_dtype": self._dtype,
            "bf16": self._dtype == torch.bfloat16,
            "fp16": self._dtype == torch.float16,
            "tokenizer_type": "HuggingFaceTokenizer",
        }
