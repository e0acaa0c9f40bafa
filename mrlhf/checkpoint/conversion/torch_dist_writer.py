"""Writes the `torch_dist` format, which `torch_dist` describes and reads.

Boxes of tensors are written one at a time, in one process and without process groups, for
megatron-core's `dist_checkpointing.load`. This file knows neither models nor the names of their
tensors.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from mrlhf.checkpoint.conversion.torch_dist import COMMON_FILE, FORMAT, FORMAT_FILE, INDEX_FILE
from mrlhf.weights.shard import Shape


class TorchDistWriter:
    """Writes a `torch_dist` checkpoint box by box, and keeps none in memory."""

    def __init__(self, directory: Path, max_file_bytes: int) -> None:
        """Write to the empty `directory`, in files that end once they have `max_file_bytes`."""
        self._directory = directory
        self._max_file_bytes = max_file_bytes
        self._entries: dict[str, Any] = {}
        self._places: dict[metadata.MetadataIndex, filesystem._StorageInfo] = {}
        self._resources = ExitStack()
        self._file: BinaryIO | None = None
        self._file_count = 0

    def write_box(self, name: str, full_shape: Shape, offsets: Shape, values: Tensor) -> None:
        """Write the box of tensor `name` that begins at `offsets`; `values` has its shape."""
        # torch.save would write the whole storage of a view.
        values = values.detach().contiguous()
        if values.untyped_storage().nbytes() != values.nbytes:
            values = values.clone()

        if name not in self._entries:
            self._entries[name] = metadata.TensorStorageMetadata(
                metadata.TensorProperties.create_from_tensor(values), torch.Size(full_shape), []
            )
        box = metadata.ChunkStorageMetadata(torch.Size(offsets), values.shape)
        self._entries[name].chunks.append(box)
        self._store(metadata.MetadataIndex(name, offsets), values)

    def write_object(self, name: str, value: Any) -> None:
        """Write an object that is no tensor, in a list of one, as megatron-core does."""
        self._entries[name] = metadata.BytesStorageMetadata()
        self._store(metadata.MetadataIndex(name), [value])

    def finish(self, common: Mapping[str, Any]) -> None:
        """Write the index and `common`, of plain types; `metadata.json` comes last."""
        self._close_file()
        torch.save(dict(common), self._directory / COMMON_FILE)
        index = metadata.Metadata(
            state_dict_metadata=self._entries,
            storage_data=self._places,
            storage_meta=metadata.StorageMeta(),
            version=filesystem.CURRENT_DCP_VERSION,
        )
        with (self._directory / INDEX_FILE).open("wb") as file:
            pickle.dump(index, file)

        content = {
            "sharded_backend": FORMAT,
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        (self._directory / FORMAT_FILE).write_text(json.dumps(content), encoding="utf-8")

    def _store(self, index: metadata.MetadataIndex, value: Any) -> None:
        file = self._open_file()
        offset = file.tell()
        try:
            torch.save(value, file)
        except RuntimeError as error:
            # torch closes its archive after an error of the file system, and fails once more.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        self._places[index] = filesystem._StorageInfo(
            Path(file.name).name, offset, file.tell() - offset
        )
        if file.tell() >= self._max_file_bytes:
            self._close_file()

    def _open_file(self) -> BinaryIO:
        if self._file is None:
            name = f"__0_{self._file_count}.distcp"
            self._file = self._resources.enter_context((self._directory / name).open("wb"))
            self._file_count += 1
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._resources.close()
        self._file = None
