"""Traces of chosen training steps, and a picture of a GPU's memory when there is no more of it.

Both are files for viewers of torch's own formats. This file does not know what a step does.
"""

from __future__ import annotations

import gzip
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from mrlhf.checkpoint.output_files import PROFILES
from mrlhf.config.trainer import ProfileSection
from mrlhf.device import Kind

logger = logging.getLogger(__name__)

# As many of the last allocations are remembered, each with the lines of Python that made it.
_ALLOCATIONS = 50_000


class Profiles:
    """The traces of one rank, and what it leaves when its device has no memory."""

    def __init__(
        self,
        section: ProfileSection | None = None,
        kind: Kind = "cpu",
        rank: int = 0,
        directory: Path = Path(),
    ) -> None:
        """Without a `section`, trace nothing; `directory` is the run's output directory."""
        chosen = section is not None and rank in section.ranks
        self._steps = frozenset(section.steps) if section is not None and chosen else frozenset()
        self._stacks = section is not None and section.stacks
        self._kind = kind
        self._rank = rank
        self._folder = directory / PROFILES
        self._remembers = kind == "cuda" and hasattr(torch._C, "_cuda_record_memory_history")
        if self._remembers:
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_ALLOCATIONS)

    @contextmanager
    def of_step(self, number: int) -> Iterator[None]:
        """Trace training step `number`, the body of the `with` statement, if it is chosen.

        A body that raises leaves no trace; one that is done again replaces the earlier trace. A
        trace that cannot be written is a warning.
        """
        if number not in self._steps:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if self._kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, with_stack=self._stacks) as trace:
            yield

        file = self._folder / f"step_{number:06d}_rank_{self._rank}.json.gz"
        try:
            self._folder.mkdir(exist_ok=True)
            # torch leaves files behind where it finds no room, and does not say so.
            with TemporaryDirectory(prefix=f".{file.name}.", dir=self._folder) as scratch:
                text = Path(scratch) / "trace.json"
                trace.export_chrome_trace(str(text))
                if not text.is_file():
                    raise OSError(f"torch could not write it; has {self._folder} room?")
                packed = text.with_suffix(".gz")
                with text.open("rb") as whole, gzip.open(packed, "wb") as smaller:
                    shutil.copyfileobj(whole, smaller)
                packed.replace(file)
        except (OSError, RuntimeError) as error:
            logger.warning("step %d is not traced: %s", number, error)
            return
        logger.info("traced step %d of rank %d: %s", number, self._rank, file)

    def after(self, error: BaseException) -> str:
        """A sentence for the message of `error`: where the memory's picture is, if at all."""
        if not isinstance(error, torch.OutOfMemoryError) or not self._remembers:
            return ""
        file = self._folder / f"out_of_memory_rank_{self._rank}.pickle"
        try:
            self._folder.mkdir(exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(file))
        except OSError as problem:
            file.unlink(missing_ok=True)
            return f"; its memory could not be written down: {problem}"
        return f"; what holds its memory is in {file}: 'mrlhf docs profiling#memory' says more"
