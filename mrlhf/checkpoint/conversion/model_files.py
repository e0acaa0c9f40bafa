"""Reads and writes Hugging Face models tensor by tensor, in one process.

Each tensor is written to its file at once, so only that tensor is held. This file does not know
ranks or layouts: `weights.hf` reads and writes models that ranks hold together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.checkpoint.conversion.model_source import Description, ModelSource, TensorForm
from mrlhf.checkpoint.tensor_file import TensorSource, write_tensors
from mrlhf.errors import ConfigError
from mrlhf.models.adapter_files import PREFIX, WEIGHTS, adapter_forms, write_adapter_config
from mrlhf.models.families import family_of, load_spec, save_config, stated_spec, with_labels
from mrlhf.models.spec import Head, ModelSpec
from mrlhf.models.weight_files import expected_tensors
from mrlhf.weights.files import file_names, publish, split_files, temporary
from mrlhf.weights.forms import OtherForm
from mrlhf.weights.stored import (
    BUFFER,
    DTYPES,
    ModelFiles,
    match,
    names_in_files,
    names_read,
    read_tensor,
    survey,
)

CONFIG_FILE = "config.json"


class HuggingFaceSource(ModelSource):
    """A Hugging Face model: a language model, or a sequence classifier."""

    def __init__(
        self,
        directory: Path,
        step: int | None = None,
        head: Head | None = None,
        labels: Sequence[str] = (),
    ) -> None:
        """Read `config.json` and the headers of the files; `step` is the weights', if known.

        With `head` the model is taken as one with that head and `labels`, which the files may lack;
        None: the head that `config.json` names, which must be there.

        Raises:
            ConfigError: `config.json` is missing, or describes no model that we know.
            WeightError: a tensor is missing, unknown, or of another shape than the model's.
        """
        stored = survey(directory)
        self.assets = directory
        self.spec = with_labels(load_spec(directory, head or stated_head(directory)), labels)
        expected = expected_tensors(self.spec)
        ignores_output = self.spec.output_is_embedding or head is not None
        # A model that is converted must be whole, and nothing of it is dropped in silence.
        self._files = match(
            stored,
            replace(
                expected,
                may_lack=() if head is None else expected.may_lack,
                ignored=expected.ignored if ignores_output else (),
            ),
        )

        self.held = frozenset(self._files)  # the names of the tensors that are there
        self.dtype = DTYPES[next(iter(self._files.values())).dtype]
        self.tensors = {}
        for name, shape in expected.shapes.items():
            dtype = DTYPES[self._files[name].dtype] if name in self.held else self.dtype
            self.tensors[name] = TensorForm(shape, dtype)
        use = "policy" if self.spec.head == "lm" else "critic or reward model"
        kind = f"Hugging Face model ({use})"
        self.description = Description(kind, step, self._left_out(directory, stored))

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return read_tensor(self._files[name])

    def _left_out(self, directory: Path, stored: ModelFiles) -> list[str]:
        """Notes on the tensors that are not the model's; `match` has refused unknown ones."""
        family = family_of(self.spec)
        left_out = []
        stated = stated_spec(directory, self.spec.head)
        if stated.tied_embeddings != self.spec.tied_embeddings:
            left_out.append(
                f"tie_word_embeddings in {CONFIG_FILE}: {family.language_head} differs from the "
                "embedding, so they are kept apart, as in transformers"
            )

        unneeded = 0
        for name in sorted(stored.tensors.keys() - names_read(self._files.values())):
            if name.startswith(family.ignored_prefixes(self.spec)):
                unneeded += 1
            elif name.endswith(BUFFER):
                left_out.append(f"{name}: follows from {CONFIG_FILE}")
            elif self.spec.head == "scalar":
                left_out.append(f"{name}: the output layer of the language model")
            else:
                left_out.append(f"{name}: a copy of the embedding, which the model shares")
        if unneeded:
            left_out.append(f"tensors of a draft model or of what reads images: {unneeded}")
        return left_out


def stated_head(directory: Path) -> Head:
    """The head of a model, by the class that its `config.json` names."""
    try:
        config = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        (architecture, *_) = config.get("architectures") or [""]
    except (OSError, ValueError, AttributeError):
        return "lm"  # `load_spec` says what is wrong with it
    return "scalar" if str(architecture).endswith("ForSequenceClassification") else "lm"


def write_hugging_face(source: ModelSource, directory: Path, max_file_bytes: int) -> list[str]:
    """Write a model, tokenizer included, into the empty `directory`; returns notes for the user.

    Adapters alone are written as peft does. Otherwise a file has at most `max_file_bytes` of
    tensors; a larger tensor has a file of its own. A CheckpointError says that the file system
    refuses.
    """
    if source.base is not None:
        tensors = _factors_to_write(source)
        write_tensors(directory, WEIGHTS, tensors)
        source.write_assets(directory)
        path = os.path.abspath(str(source.base.assets))
        write_adapter_config(source.spec, path, directory)
        return [f"an adapter of {path}, for peft and lora.path; --merge makes a whole model"]

    forms = family_of(source.spec).written_forms(source.spec)
    held = names_in_files(source.tensors, forms)
    sizes = {name: sum(source.tensors[part].nbytes for part in held[name]) for name in held}
    contents = split_files(sizes, max_file_bytes)
    files = dict(zip(file_names(len(contents)), contents, strict=True))
    for file, names in files.items():
        tensors = [
            _stack_to_write(source, name, forms[name]) if name in forms else _to_write(source, name)
            for name in names
        ]
        write_tensors(directory, temporary(Path(file)).name, tensors)
    publish(directory, files, sum(sizes.values()))

    source.write_assets(directory)
    write_config(source.spec, directory, source.dtype)
    if not any(directory.glob("tokenizer*")):
        return ["there is no tokenizer; copy one beside the model"]
    return []


def _to_write(source: ModelSource, name: str, prefix: str = "") -> TensorSource:
    """A tensor that is read when it is written, with `prefix` before its name in the file."""
    form = source.tensors[name]
    return TensorSource(prefix + name, form.dtype, form.shape, lambda: [source.read(name).view(-1)])


def _factors_to_write(source: ModelSource) -> list[TensorSource]:
    """The tensors of a source of adapters alone, as peft names and joins them."""
    forms = adapter_forms(source.spec)
    tensors: list[TensorSource] = []
    for name, parts in names_in_files((PREFIX + name for name in source.tensors), forms).items():
        own = parts[0].removeprefix(PREFIX)
        if name not in forms:
            tensors.append(_to_write(source, own, PREFIX))
            continue

        def joined(form: OtherForm = forms[name]) -> list[Tensor]:
            factors = {part: source.read(part.removeprefix(PREFIX)) for part in form.parts}
            return [form.joined(factors).reshape(-1)]

        dtype = source.tensors[own].dtype
        tensors.append(TensorSource(name, dtype, forms[name].shape, joined))
    return tensors


def _stack_to_write(source: ModelSource, name: str, form: OtherForm) -> TensorSource:
    """A tensor of several of the source's, which are read one after another when it is written."""
    dtype = source.tensors[next(iter(form.parts))].dtype

    def runs() -> Iterator[Tensor]:
        for part in form.parts:
            tensor = source.read(part)
            yield (tensor.t() if form.is_transposed else tensor).reshape(-1)

    return TensorSource(name, dtype, form.shape, runs)


def write_config(spec: ModelSpec, directory: Path, dtype: torch.dtype) -> None:
    """Write `config.json`; ConfigError if transformers refuses the configuration."""
    try:
        save_config(spec, directory, dtype)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{directory}: {' '.join(str(error).split())}") from error
