"""Reads and writes Hugging Face models tensor by tensor, in one process.

Each tensor is written to its file at once, so only that tensor is held. This file does not know
ranks or layouts: `weights.hf` reads and writes models that ranks hold together.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from mrlhf.checkpoint.conversion.model_source import Description, ModelSource, TensorForm
from mrlhf.checkpoint.streamed_file import StreamedFile
from mrlhf.checkpoint.tensor_file import TensorSource, write_tensors
from mrlhf.errors import ConfigError, WeightError
from mrlhf.models.families import family_of, load_spec, save_config, stated_spec
from mrlhf.models.spec import Head, ModelSpec
from mrlhf.weights.files import file_names, find_files, publish, split_files, temporary

CONFIG_FILE = "config.json"
ASSET_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
)
"""Files that belong to a model and hold no weights; code is not among them."""

_INV_FREQ = "rotary_emb.inv_freq"


class HuggingFaceSource:
    """A Hugging Face model: a language model, or a sequence classifier with one label."""

    def __init__(self, directory: Path, step: int | None = None) -> None:
        """Read `config.json` and the headers of the files.

        Args:
            step: training step of the weights, if it is known.

        Raises:
            ConfigError: `config.json` is missing, or describes no model that we know.
            WeightError: a tensor is missing, unknown, or of another shape than the model's.
        """
        self._directory = directory
        self._step = step
        files = find_files(directory)
        self._resources = ExitStack()
        self._handles: dict[Path, StreamedFile] = {}
        for file in dict.fromkeys(files.values()):
            self._handles[file] = self._resources.enter_context(StreamedFile(file))
        self._files = files

        self.spec = load_spec(directory, self._head())
        self._left_out = self._check()
        self.tensors: dict[str, TensorForm] = {}
        for name, shape in family_of(self.spec).tensor_shapes(self.spec).items():
            self.tensors[name] = TensorForm(shape, self._stored(name).dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding."""
        return next(iter(self.tensors.values())).dtype

    @property
    def assets(self) -> Path | None:
        """The model's own directory."""
        return self._directory

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return self._handles[self._files[name]].read(name)

    def describe(self) -> Description:
        """Describe the model, and the parts of its directory that are not converted."""
        head = "policy" if self.spec.head == "lm" else "critic or reward model"
        return Description(f"Hugging Face model ({head})", self._step, self._left_out)

    def close(self) -> None:
        """Close the files."""
        self._resources.close()

    def _stored(self, name: str) -> TensorForm:
        file = self._files[name]
        form = self._handles[file].tensors.get(name)
        if form is None:
            raise WeightError(f"{file}: {name} is not there, though the index says so")
        if not form.dtype.is_floating_point:
            raise WeightError(
                f"{file}: {name} is of type {form.dtype}, which is no type of weights here; save "
                f"the model in bfloat16 or float32"
            )
        return form

    def _head(self) -> Head:
        """The head of the model, by the class that its `config.json` names."""
        try:
            config = json.loads((self._directory / CONFIG_FILE).read_text(encoding="utf-8"))
            (architecture, *_) = config.get("architectures") or [""]
        except (OSError, ValueError, AttributeError):
            return "lm"  # `load_spec` says what is wrong with it
        return "scalar" if str(architecture).endswith("ForSequenceClassification") else "lm"

    def _check(self) -> list[str]:
        """Refuse tensors that are not exactly the model's; returns notes on other tensors."""
        family = family_of(self.spec)
        shapes = family.tensor_shapes(self.spec)
        missing = [name for name in shapes if name not in self._files]
        if missing:
            raise WeightError(
                f"{self._directory}: no tensor {missing[0]} ({len(missing)} are missing); the "
                f"checkpoint is not of this model or not whole"
            )
        for name, shape in shapes.items():
            found = self._stored(name).shape
            if found != shape:
                raise WeightError(
                    f"{self._directory}: {name} is {list(found)} and not {list(shape)}; check "
                    f"{CONFIG_FILE} beside it"
                )

        left_out = []
        if (
            stated_spec(self._directory, self.spec.head).tied_embeddings
            != self.spec.tied_embeddings
        ):
            left_out.append(
                f"tie_word_embeddings in {CONFIG_FILE}: {family.language_head} differs from the "
                "embedding, so they are kept apart, as in transformers"
            )
        unneeded = 0
        for name in self._files:
            if name in shapes:
                continue
            if name.startswith(family.ignored_prefixes(self.spec)):
                unneeded += 1
            elif name.endswith(_INV_FREQ):
                left_out.append(f"{name}: follows from {CONFIG_FILE}")
            elif name == family.language_head and self.spec.output_is_embedding:
                left_out.append(f"{name}: a copy of the embedding, which the model shares")
            else:
                raise WeightError(
                    f"{self._directory}: the model has no place for tensor {name}; check "
                    f"{CONFIG_FILE} beside it"
                )
        if unneeded:
            left_out.append(f"tensors of a draft model: {unneeded}")
        return left_out


def write_hugging_face(source: ModelSource, directory: Path, max_file_bytes: int) -> list[str]:
    """Write a model, tokenizer included, into the empty `directory`.

    Args:
        max_file_bytes: largest file, bytes of tensors; a larger tensor has a file of its own.

    Returns:
        Notes for the user.

    Raises:
        CheckpointError: the file system refuses.
    """
    sizes = {name: form.nbytes for name, form in source.tensors.items()}
    contents = split_files(sizes, max_file_bytes)
    files = dict(zip(file_names(len(contents)), contents, strict=True))
    for file, names in files.items():
        tensors = [_to_write(source, name) for name in names]
        write_tensors(directory, temporary(Path(file)).name, tensors)
    publish(directory, files, sum(sizes.values()))

    copy_assets(source.assets, directory)
    write_config(source.spec, directory, source.dtype)
    if not any(directory.glob("tokenizer*")):
        return ["there is no tokenizer; copy one beside the model"]
    return []


def _to_write(source: ModelSource, name: str) -> TensorSource:
    """A tensor that is read when it is written."""
    form = source.tensors[name]
    return TensorSource(name, form.dtype, form.shape, lambda: [source.read(name).view(-1)])


def copy_assets(source: Path | None, directory: Path) -> None:
    """Copy the tokenizer and the model's other files without weights from `source`."""
    if source is None:
        return
    for pattern in ASSET_PATTERNS:
        for file in source.glob(pattern):
            if file.is_file() and file.suffix != ".py":
                shutil.copyfile(file, directory / file.name)


def write_config(spec: ModelSpec, directory: Path, dtype: torch.dtype) -> None:
    """Write `config.json`; ConfigError if transformers refuses the configuration."""
    try:
        save_config(spec, directory, dtype)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{directory}: {' '.join(str(error).split())}") from error
