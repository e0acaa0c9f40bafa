"""An adapter merged into its base: W + scale * B A in float32, one tensor at a time.

This file does not know the format of the result.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mrlhf.checkpoint.conversion.model_files import HuggingFaceSource
from mrlhf.checkpoint.conversion.model_source import Description, ModelSource
from mrlhf.data.hub_files import read_object
from mrlhf.errors import ConfigError
from mrlhf.models.adapter_files import CONFIG, adapter_tensors, with_stored_lora
from mrlhf.models.families import family_of
from mrlhf.models.lora import A, B
from mrlhf.models.spec import Head
from mrlhf.weights.stored import OpenFiles


class AdapterSource(ModelSource):
    """The model of an adapter that peft or mrlhf has written, and its base."""

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
        path = base or Path(str(config.get("base_model_name_or_path")))
        if not path.is_dir():
            raise ConfigError(
                f"{directory}: the base of the adapter, {path}, is no directory here; name it with "
                "--base"
            )
        head: Head | None = "scalar" if config.get("task_type") == "SEQ_CLS" else None
        self._base = HuggingFaceSource(path, head=head)
        spec = with_stored_lora(self._base.spec, directory)
        self._lora = spec.lora
        self._factors = adapter_tensors(directory, spec)
        head_name = family_of(spec).scalar_head
        if head is not None and not {head_name} & (self._factors.keys() | self._base.held):
            raise ConfigError(f"{directory}: neither the adapter nor {path} has {head_name}")

        self.spec = self._base.spec
        self.tensors = self._base.tensors
        self.dtype = self._base.dtype
        has_tokenizer = any(directory.glob("tokenizer*"))
        self.assets = directory if has_tokenizer else self._base.assets
        description = self._base.description
        kind = f"adapter, merged into {path}"
        self.description = Description(kind, step, description.left_out)

    def read(self, name: str) -> Tensor:
        """One tensor; those with adapters are in float32, for the caller to round."""
        if name in self._factors:  # a head that was trained
            return self._factor(name)
        layer = name.removesuffix(".weight")
        weight = self._base.read(name)
        if layer + A not in self._factors:
            return weight
        assert self._lora is not None
        product = self._factor(layer + B).float() @ self._factor(layer + A).float()
        return weight.float() + self._lora.scale_of(layer) * product

    def _factor(self, name: str) -> Tensor:
        stored = self._factors[name]
        with OpenFiles([stored]) as files:
            values: Tensor = files.slice(stored)[:]
        return values
