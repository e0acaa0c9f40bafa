"""Adapters that peft or mrlhf has written, and any adapters merged into their base.

A merged weight is W + scale * B A in float32. This file does not know the format of the result.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mrlhf.checkpoint.conversion.model_files import HuggingFaceSource
from mrlhf.checkpoint.conversion.model_source import Description, ModelSource, TensorForm
from mrlhf.checkpoint.frozen import check_base
from mrlhf.data.hub import base_of_adapter
from mrlhf.data.hub_files import read_object
from mrlhf.errors import ConfigError
from mrlhf.models.adapter_choice import with_stored_lora
from mrlhf.models.adapter_files import CONFIG, adapter_tensors, stored_labels
from mrlhf.models.families import family_of
from mrlhf.models.lora import A, B
from mrlhf.models.spec import Head
from mrlhf.weights.stored import DTYPES, read_tensor


class AdapterSource(ModelSource):
    """The adapters in a directory of peft, and a head that was trained beside them."""

    def __init__(self, directory: Path, base: Path | None, step: int | None) -> None:
        """Read the headers of the files.

        Args:
            base: the base model; None for the one that the adapter names.
            step: that of the adapter, if it is known.

        Raises:
            ConfigError, WeightError: the base is not there or not supported, or the adapter is not
                plain LoRA, or of another base.
        """
        config = read_object(directory / CONFIG, ConfigError)
        path = base or Path(base_of_adapter(config))
        if not path.is_dir():
            raise ConfigError(
                f"{directory}: the base of the adapter, {path}, is no directory here; name it with "
                "--base"
            )
        head: Head | None = "scalar" if config.get("task_type") == "SEQ_CLS" else None
        self.base = HuggingFaceSource(path, head=head, labels=stored_labels(directory))
        self.spec = with_stored_lora(self.base.spec, directory)
        check_base(directory, path)
        self._stored = adapter_tensors(directory, self.spec)
        head_name = family_of(self.spec).scalar_head
        if head is not None and not {head_name} & (self._stored.keys() | self.base.held):
            raise ConfigError(f"{directory}: neither the adapter nor {path} has {head_name}")

        self.tensors = {}
        for name, stored in self._stored.items():
            self.tensors[name] = TensorForm(stored.shape, DTYPES[stored.dtype])
        self.dtype = self.base.dtype
        has_tokenizer = any(directory.glob("tokenizer*"))
        self.assets = directory if has_tokenizer else self.base.assets
        self.description = Description("adapter", step, [])

    def read(self, name: str) -> Tensor:
        """A factor, or the head."""
        return read_tensor(self._stored[name])


class MergedSource(ModelSource):
    """The whole model of adapters and their base."""

    def __init__(self, adapters: ModelSource) -> None:
        """Merge what a source of adapters alone gives."""
        assert adapters.base is not None and adapters.spec.lora is not None, "a whole model"
        self._adapters = adapters
        self._base = adapters.base
        self._lora = adapters.spec.lora
        self.spec = self._base.spec
        self.tensors = self._base.tensors
        self.dtype = self._base.dtype
        own = adapters.description
        left_out = [*own.left_out, *self._base.description.left_out]
        kind = f"{own.kind}, merged into {self._base.assets}"
        self.description = Description(kind, own.step, left_out)

    def read(self, name: str) -> Tensor:
        """One tensor; those with adapters are in float32, for the caller to round."""
        if name in self._adapters.tensors:  # a head that was trained
            return self._adapters.read(name)
        weight = self._base.read(name)
        layer = name.removesuffix(".weight")
        if layer + A not in self._adapters.tensors:
            return weight
        first = self._adapters.read(layer + A).float()
        second = self._adapters.read(layer + B).float()
        return weight.float() + self._lora.scale_of(layer) * (second @ first)

    def write_assets(self, directory: Path) -> None:
        """Write them as the source of the adapters does."""
        self._adapters.write_assets(directory)
