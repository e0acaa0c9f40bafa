"""Log-probabilities of preference pairs under a frozen reference, kept in the run's directory.

They are computed once, and the reference is in memory only meanwhile. A run that starts again reads
the stored numbers, unless they are of another reference or of other pairs. This file knows no loss.
"""

from __future__ import annotations

import gc
import logging
import time
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from mrlhf.checkpoint.frozen import fingerprint
from mrlhf.checkpoint.output_files import REFERENCE_LOGPROBS
from mrlhf.config.sections import AdaptedSection, RoleSection
from mrlhf.data.preferences import PreferenceRows
from mrlhf.data.sample_table import written_whole
from mrlhf.device import dtype_on
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.parallel.collectives import from_first
from mrlhf.roles.response_logprobs import ResponseLogprobs
from mrlhf.run.startup import Run
from mrlhf.training.engine import ModelEngine

logger = logging.getLogger(__name__)


def reference_logprobs(
    section: RoleSection, run: Run, data: Sequence[PreferenceRows], seed: int
) -> list[Tensor]:
    """The log-probabilities of all responses under the reference; every rank calls it.

    They are stored when the run begins. Each set of pairs in `data` has a table float64 [pairs, 2]
    on the host, the chosen responses first.
    """
    began = time.monotonic()
    sizes = [len(pairs) for pairs in data]
    file = run.output_dir / REFERENCE_LOGPROBS
    key = ""
    stored = None
    if run.is_main_rank:
        key = _key(section, run, data)
        stored = _read(file, key)

    table = _on_every_rank(stored, sum(sizes))
    if table is not None:
        if run.is_main_rank:
            logger.info("reference log-probabilities of %d pairs: from %s", len(table), file)
        return list(table.split(sizes))

    tables = _ask(section, run, data, seed)
    gc.collect()  # the modules of a model refer to each other, so its memory is not freed at once
    if run.is_main_rank:
        run.changes.append(partial(_write, file, key, torch.cat(tables)))
        logger.info(
            "reference log-probabilities of %d pairs: %.1f s", sum(sizes), time.monotonic() - began
        )
    return tables


def _ask(section: RoleSection, run: Run, data: Sequence[PreferenceRows], seed: int) -> list[Tensor]:
    """Build the reference and run it over all pairs."""
    spec = spec_of_role(section, "lm")
    groups = run.groups("reference", section)
    engine = ModelEngine(section, spec, groups, run.device, run.phases, "reference")
    engine.load(section.path, seed)
    logprobs = ResponseLogprobs(engine)
    tables = [logprobs.of_pairs(pairs) for pairs in data]
    engine.residency.close()
    return tables


def _key(section: RoleSection, run: Run, data: Sequence[PreferenceRows]) -> str:
    """A hash of all that the numbers depend on, except the layout, which changes only rounding."""
    dtype = dtype_on(section.dtype, run.device.kind)
    digest = xxhash.xxh3_128(f"{fingerprint(section.path)['files']} {dtype}".encode())
    digest.update((Path(section.path) / "config.json").read_bytes())
    if isinstance(section, AdaptedSection) and section.lora.path is not None:
        digest.update(str(fingerprint(section.lora.path)["files"]).encode())
    for pairs in data:
        for prompt_length, sides in zip(pairs.prompt_lengths, pairs.responses, strict=True):
            chosen, rejected = sides
            numbers = [prompt_length, len(chosen), len(rejected), *chosen, *rejected]
            digest.update(np.asarray(numbers, dtype=np.int32).tobytes())
    return digest.hexdigest()


def _read(file: Path, key: str) -> Tensor | None:
    """The stored table; None if there is none, or if it has another key or is damaged."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            if str(stored["key"]) == key:
                return torch.from_numpy(stored["logprobs"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        logger.warning("%s cannot be read and is computed again: %s", file, error)
        return None
    logger.info("%s is of another reference or of other pairs, and is computed again", file)
    return None


def _write(file: Path, key: str, table: Tensor) -> None:
    """Store the table whole or not at all; with a full disk the next start computes it again."""
    try:
        with written_whole(file) as temporary, temporary.open("wb") as stream:
            np.savez(stream, key=np.array(key), logprobs=table.numpy())
    except OSError as error:
        logger.warning("%s is not stored: %s; the next start computes it again", file, error)


def _on_every_rank(stored: Tensor | None, pairs: int) -> Tensor | None:
    """The table that rank 0 has read."""
    if not from_first(stored is not None, None):
        return None

    table = torch.zeros((pairs, 2), dtype=torch.float64, device="cpu") if stored is None else stored
    dist.broadcast(table, src=0)
    return table
