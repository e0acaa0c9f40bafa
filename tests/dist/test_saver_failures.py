"""What a saver does when a checkpoint is damaged or cannot be written: all ranks learn of it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from transformers import GenerationConfig

from mrlhf.checkpoint.manifest import MANIFEST, checkpoints_in
from mrlhf.checkpoint.restorer import newest_checkpoint, set_aside
from mrlhf.checkpoint.retention import delete_old
from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.errors import CheckpointError
from mrlhf.run.export import ExportedModel, export_checkpoint
from tests.dist.role_runs import Form, build_actor, save_inputs, settings
from tests.oracle.plain_ppo import Case
from tests.ranks import everyone, run_ranks
from tests.tiny_task import write_tiny_task

FORM = Form("sharded", 1000, distributed_optimizer=True)
SMALL_FILE = 16 * 1024  # bytes; less than the model, more than a manifest's neighbours


def test_damage_and_a_full_disk_in_an_export(tmp_path: Path) -> None:
    save_inputs(tmp_path, models=["llama"])
    write_tiny_task(tmp_path / "data")
    for messages in run_ranks(2, _in_ranks, tmp_path):
        assert len(messages) == 1 and "was not saved" in messages[0]
        assert "hf" in messages[0] and "\n" not in messages[0]


def _in_ranks(rank: int, world_size: int, root: Path) -> list[str]:
    setting = next(iter(settings(root, world_size, [FORM])))
    engine = build_actor(setting, Case("llama", "token-mean")).engine
    directory = root / "checkpoints"
    saver = Saver(directory, RunIdentity("test", {}), everyone(), asynchronous=False)
    for step in (1, 2, 3):
        saver.save(Contents(step, False, {"actor": engine}, {}))

    if rank == 0:
        _damage_all_but_the_first(directory)
    dist.barrier()
    damaged: list[Path] = []
    checkpoint = newest_checkpoint(directory, everyone(), damaged)
    assert checkpoint is not None and checkpoint.path.name == "step_000001"
    assert [path.name for path in damaged] == [f"step_00000{number}" for number in (5, 4, 3, 2)]
    assert all(path.is_dir() for path in damaged)
    dist.barrier()
    if rank == 0:
        for path in damaged:
            set_aside(path)
    dist.barrier()

    # The damaged ones must not count: the checkpoint that is saved next stays.
    saver.save(Contents(3, False, {"actor": engine}, {}))
    if rank == 0:
        delete_old(directory, max_to_keep=1, best_step=None)
        assert [path.name for path in checkpoints_in(directory)] == ["step_000003"]
        assert "damaged_1.step_000005" in os.listdir(directory)
    dist.barrier()
    _save_while_training_goes_on(root / "thread", Contents(3, False, {"actor": engine}, {}))
    return _export_on_a_full_disk(root, saver, engine)


def _save_while_training_goes_on(directory: Path, contents: Contents) -> None:
    """The time that a save has taken does not count the step after which it is noticed."""
    saver = Saver(directory, RunIdentity("test", {}), everyone(), asynchronous=True)
    saver.save(contents)
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    now = time.monotonic
    with mock.patch("time.monotonic", lambda: now() + 10_000):
        saver.finish(wait=True)
    assert saver.longest_s < 10_000


def _damage_all_but_the_first(directory: Path) -> None:
    """A file too short, a flipped bit of a manifest, a copy under another name, no manifest."""
    file = next((directory / "step_000002" / "actor").iterdir())
    os.truncate(file, file.stat().st_size // 2)

    manifest = directory / "step_000003" / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"step":3', b'"step":2'))

    shutil.copytree(directory / "step_000001", directory / "step_000004")
    shutil.copytree(directory / "step_000001", directory / "step_000005")
    (directory / "step_000005" / MANIFEST).unlink()


def _export_on_a_full_disk(root: Path, saver: Saver, engine: object) -> list[str]:
    tokenizer = load_tokenizer(str(root / "data" / "tokenizer"), None)
    generation = '{"eos_token_id": [2, 7],  "temperature": 0.6, "do_sample": true}'
    model = ExportedModel(engine, tokenizer, 100, generation)  # type: ignore[arg-type]
    exports = {"hf": lambda path: export_checkpoint(model, path)}
    contents = Contents(4, False, {"actor": engine}, {}, {}, exports)  # type: ignore[dict-item]

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails instead
    if dist.get_rank() == 0:  # one rank alone cannot write
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as refusal:
        saver.save(contents)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    assert not list(saver.directory.glob(".*")), "a part of it is left"
    dist.barrier()  # the next save makes such a directory again

    saver.save(contents)
    exported = saver.directory / "step_000004" / "hf"
    assert (exported / "model.safetensors").is_file()
    assert (exported / "generation_config.json").read_text() == generation
    assert GenerationConfig.from_pretrained(exported).eos_token_id == [2, 7]
    return [str(refusal.value)]
