"""What `checkpoint.py` measures in one rank: a trained model and the contenders that save it.

It knows how state is saved, loaded and compared. It starts no ranks and prints nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from model_sizes import model_config
from torch import Tensor

from mrlhf.checkpoint.manifest import read_manifest
from mrlhf.checkpoint.restorer import open_checkpoint
from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.device import pick_device
from mrlhf.models.families import FAMILIES
from mrlhf.parallel.groups import RoleGroups
from mrlhf.training.engine import ModelEngine

_BLOCK = 8 * 2**20  # bytes of one plain write or read


def build_engine(size: str, dtype: str, groups: RoleGroups) -> ModelEngine:
    """A model with random weights and random moments, as after one optimizer step."""
    spec = FAMILIES["llama"].read_config(model_config(size).to_dict(), "lm")
    section = ActorSection(path="unused", dtype=dtype)
    engine = ModelEngine(section, spec, groups, pick_device("cpu", 0))
    engine.initialise(seed=1)
    engine.attach_optimizer(ActorOptimSection(), total_updates=1)

    assert engine.optimizer is not None
    engine.optimizer.make_moments(1)
    generator = torch.Generator().manual_seed(1)  # tensor-parallel ranks hold the same norms
    for tensor in state_of(engine):
        tensor.normal_(generator=generator)
    return engine


def state_of(engine: ModelEngine) -> list[Tensor]:
    """This rank's main weights and moments; flat views."""
    assert engine.optimizer is not None
    parameters = {id(slot.parameter): slot.parameter for slot in engine.slots}
    tensors = []
    for held in engine.optimizer.ranges(list(parameters.values())):
        if held is not None:
            tensors += [held.main, *held.moments.values()]
    return tensors


@dataclass
class Case:
    """One row of the table, in one rank."""

    engine: ModelEngine  # the model
    root: Path  # an empty directory
    saver: Saver  # writes at once
    background: Saver  # writes in a thread
    # what `torch.save` writes: the rank's state, each tensor in memory of its own
    copies: list[Tensor]
    nbytes: int  # the bytes of `copies`

    @staticmethod
    def of(engine: ModelEngine, root: Path) -> Case:
        """Copy the state, and write nothing yet."""
        copies = [tensor.clone() for tensor in state_of(engine)]
        nbytes = sum(tensor.nbytes for tensor in copies)
        return Case(
            engine,
            root,
            make_saver(root / "ours", asynchronous=False),
            make_saver(root / "background", asynchronous=True),
            copies,
            nbytes,
        )

    @property
    def contents(self) -> Contents:
        """The checkpoint of step 1."""
        return Contents(1, False, {"actor": self.engine}, {"numbers": [1]})

    def savers(self) -> dict[str, Callable[[], object]]:
        """The contenders that write; all wait until the disk has the bytes."""
        return {
            "ours": lambda: self.saver.save(self.contents),
            "torch": self._torch_save,
            "disk": self._plain_write,
        }

    def loaders(self) -> dict[str, Callable[[], object]]:
        """The contenders that read what those of the same name have written."""
        return {
            "ours": lambda: load(self.engine, self.root / "ours"),
            "torch": self._torch_load,
            "disk": self._plain_read,
        }

    def bytes_written(self) -> int:
        """Bytes of our checkpoint, of all ranks."""
        return sum(file.nbytes for file in read_manifest(self.root / "ours/step_000001").files)

    def forget_files(self) -> None:
        """Have the operating system forget what the files hold, so that reading reads the disk."""
        dist.barrier()
        if dist.get_rank() == 0:
            for file in self.root.rglob("*"):
                if file.is_file():
                    with file.open("rb") as stream:
                        os.fsync(stream.fileno())
                        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()

    def delete_files(self) -> None:
        """Begin the next round with an empty directory."""
        dist.barrier()
        if dist.get_rank() == 0:
            for path in self.root.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        dist.barrier()

    def assert_equal(self) -> None:
        """The state is what it was when the case was made, bit for bit."""
        for tensor, copy in zip(state_of(self.engine), self.copies, strict=True):
            assert torch.equal(tensor, copy), "the loaded state differs"

    def _torch_save(self) -> None:
        with self._file("torch").open("wb") as stream:
            torch.save(self.copies, stream)
            stream.flush()
            os.fsync(stream.fileno())

    def _torch_load(self) -> None:
        loaded = torch.load(self._file("torch"), weights_only=True)
        for copy, tensor in zip(self.copies, loaded, strict=True):
            copy.copy_(tensor)

    def _plain_write(self) -> None:
        block = memoryview(bytearray(os.urandom(2**20) * (_BLOCK // 2**20)))
        with self._file("disk").open("wb", buffering=0) as stream:
            for place in range(0, self.nbytes, _BLOCK):
                stream.write(block[: min(_BLOCK, self.nbytes - place)])
            os.fsync(stream.fileno())

    def _plain_read(self) -> None:
        block = bytearray(_BLOCK)
        with self._file("disk").open("rb", buffering=0) as stream:
            while stream.readinto(block):
                pass

    def _file(self, name: str) -> Path:
        return self.root / f"{name}_{dist.get_rank()}"


def make_saver(directory: Path, asynchronous: bool) -> Saver:
    """A saver of all ranks."""
    return Saver(directory, RunIdentity("benchmark", {}), _world(), asynchronous)


def load(engine: ModelEngine, directory: Path) -> None:
    """Check and load the checkpoint of step 1 in `directory`, as a resumed run does."""
    checkpoint = open_checkpoint(directory / "step_000001", _world())
    checkpoint.load_models({"actor": engine})


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
