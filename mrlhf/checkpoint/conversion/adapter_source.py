"""An adapter merged into its base: W + scale * B A in float32, one tensor at a time.

The adapter is a directory of peft's, or part of a training checkpoint. This file does not know the
format of the result.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mrlhf.checkpoint.conversion.model_files import HuggingFaceSource
from mrlhf.checkpoint.conversion.model_source import Description, ModelSource
from mrlhf.checkpoint.conversion.training_checkpoints import pick_role
from mrlhf.checkpoint.frozen import check_frozen, fingerprint
from mrlhf.checkpoint.manifest import WEIGHT, check_sizes, read_manifest
from mrlhf.checkpoint.slice_reader import SliceReader
from mrlhf.config.sections import LoraSection
from mrlhf.data.hub_files import read_object
from mrlhf.errors import ConfigError
from mrlhf.models.adapter_files import CONFIG, adapter_tensors, with_lora, with_stored_lora
from mrlhf.models.families import family_of
from mrlhf.models.lora import A, B
from mrlhf.models.spec import Head, Lora
from mrlhf.weights.boxes import whole
from mrlhf.weights.stored import OpenFiles


class MergedSource(ModelSource):
    """The model of a base and an adapter, of which a subclass reads the factors."""

    _base: HuggingFaceSource
    _lora: Lora | None

    def _factor(self, name: str) -> Tensor | None:
        """A factor, or a head that was trained; None if the adapter has none of that name."""
        raise NotImplementedError

    def read(self, name: str) -> Tensor:
        """One tensor; those with adapters are in float32, for the caller to round."""
        trained = self._factor(name)
        if trained is not None:
            return trained
        layer = name.removesuffix(".weight")
        weight = self._base.read(name)
        first = self._factor(layer + A)
        second = self._factor(layer + B)
        if first is None or second is None:
            return weight
        assert self._lora is not None
        return weight.float() + self._lora.scale_of(layer) * (second.float() @ first.float())


class CheckpointedAdapterSource(MergedSource):
    """The model of the adapter in a training checkpoint, and its base."""

    def __init__(self, directory: Path, role: str | None, base: Path | None) -> None:
        """Read the manifest, and the headers of the base's files.

        Args:
            role: as for `TrainingSource`.
            base: the base model; None for the one that the checkpoint's configuration names.

        Raises:
            CheckpointError: the checkpoint is not whole, or the base has other weights than the run
                began with.
            ConfigError, WeightError: the base is not there or not supported.
        """
        manifest = read_manifest(directory)
        check_sizes(directory, manifest.files)
        self._role = pick_role(directory, manifest, role)
        stored = manifest.models[self._role]
        section = manifest.config[self._role]
        path = base or Path(section["path"])
        if not path.is_dir():
            raise ConfigError(f"{directory}: the base {path} is no directory here; use --base")
        if self._role in manifest.frozen:
            check_frozen({self._role: manifest.frozen[self._role]}, {self._role: fingerprint(path)})

        head: Head = "scalar" if stored.head == "scalar" else "lm"
        self._base = HuggingFaceSource(path, head=head)
        self._lora = with_lora(self._base.spec, LoraSection(**section["lora"])).lora
        self._shapes = {name: tensor.shape for name, tensor in stored.tensors.items()}
        self._reader = SliceReader(directory, manifest)
        self.spec = self._base.spec
        self.tensors = self._base.tensors
        self.dtype = self._base.dtype
        self.assets = self._base.assets
        kind = f"training checkpoint ({self._role}), merged into {path}"
        left_out = [*self._base.description.left_out, "optimizer state and the state of the run"]
        self.description = Description(kind, manifest.step, left_out)

    def _factor(self, name: str) -> Tensor | None:
        if name not in self._shapes:
            return None
        return self._reader.read(self._role, WEIGHT, whole(name, tuple(self._shapes[name])))


class AdapterSource(MergedSource):
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

    def _factor(self, name: str) -> Tensor | None:
        if name not in self._factors:
            return None
        stored = self._factors[name]
        with OpenFiles([stored]) as files:
            values: Tensor = files.slice(stored)[:]
        return values
