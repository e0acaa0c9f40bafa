"""An export replaces an earlier one when it is whole; if it cannot be written, no model is lost."""

from __future__ import annotations

import resource
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.errors import CheckpointError
from mrlhf.run.export import ExportedModel, export_checkpoint, export_result
from mrlhf.training.engine import ModelEngine
from tests.dist.role_runs import Form, build_actor, save_inputs, settings
from tests.models.checkpoints import assert_same_tensors, convert_quietly
from tests.oracle.plain_ppo import Case
from tests.ranks import everyone, run_ranks
from tests.tiny_task import write_tiny_task

FORM = Form("sharded", 1000, distributed_optimizer=True)
SMALL_FILE = 16 * 1024  # bytes; less than the model


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_exports_that_succeed_and_that_fail(tmp_path: Path) -> None:
    save_inputs(tmp_path, models=["llama"])
    write_tiny_task(tmp_path / "data")

    for rank_messages in run_ranks(2, _in_ranks, tmp_path):
        for name, message in rank_messages.items():
            assert "\n" not in message, name

        full = rank_messages["full"]
        assert full.startswith(f"{tmp_path / 'run' / 'actor'} was not written: cannot write ")
        assert "File too large" in full
        assert "has room for 0 B, and the model takes " in rank_messages["no room"]
        assert "actor is a file; move it away" in rank_messages["a file"]

        assert "; the trained model was written to " in rank_messages["rescued"]
        assert rank_messages["rescued"].endswith("/actor instead: move it from there")
        assert "; nor could it be written to " in rank_messages["lost"]
        assert "there is no checkpoint of step 7; make room" in rank_messages["lost"]

        saved = tmp_path / "run" / "checkpoints" / "step_000007"
        assert (
            f"; the trained model is in {saved}: once the cause is gone, start"
            in (rank_messages["saved"])
        )
        assert f"tools/convert_checkpoint.py {saved} --to" in rank_messages["saved"]
        assert "actor was not written: TypeError: " in rank_messages["saved"]
    convert_quietly(saved, tmp_path / "converted")
    assert_same_tensors(tmp_path / "large_disk" / "actor", tmp_path / "converted")


def _in_ranks(rank: int, world_size: int, root: Path) -> dict[str, str]:
    tempfile.tempdir = str(root / "temporary")
    if rank == 0:
        (root / "temporary").mkdir()
    dist.barrier()

    setting = next(iter(settings(root, world_size, [FORM])))
    engine = build_actor(setting, Case("llama", "token-mean")).engine
    tokenizer = load_tokenizer(str(root / "data" / "tokenizer"), None)
    target = root / "run" / "actor"

    _replaces_an_earlier_one(engine, tokenizer, target)
    _goes_where_a_link_points(engine, tokenizer, root)
    return {
        "full": _keeps_the_earlier_one_on_a_full_disk(engine, tokenizer, target),
        **_says_where_the_model_is(engine, tokenizer, target),
    }


def _export(engine: ModelEngine, tokenizer: Tokenizer, target: Path) -> None:
    export_checkpoint(ExportedModel(engine, tokenizer, max_shard_mb=1), target)
    dist.barrier()


def _replaces_an_earlier_one(engine: ModelEngine, tokenizer: Tokenizer, target: Path) -> None:
    _export(engine, tokenizer, target)
    if dist.get_rank() == 0:
        (target / "notes.md").write_text("keep me")
        (target / "model-00001-of-00002.safetensors").write_bytes(b"of an earlier export")
        (target / "config.json").write_text("{}")
    dist.barrier()

    _export(engine, tokenizer, target)
    names = {path.name for path in target.iterdir()}
    assert {"config.json", "model.safetensors", "notes.md", "tokenizer.json"} <= names
    assert "model-00001-of-00002.safetensors" not in names
    assert sorted(path.name for path in target.parent.iterdir()) == ["actor"]
    assert len({path.stat().st_mode for path in target.iterdir()}) == 1

    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        target, output_loading_info=True
    )
    assert not any(told.values()), told
    assert model.config.architectures == ["LlamaForCausalLM"]
    dist.barrier()


def _goes_where_a_link_points(engine: ModelEngine, tokenizer: Tokenizer, root: Path) -> None:
    link = root / "linked" / "actor"
    if dist.get_rank() == 0:
        (root / "large_disk").mkdir()
        link.parent.mkdir()
        link.symlink_to(root / "large_disk" / "actor")
    dist.barrier()
    for _ in range(2):
        _export(engine, tokenizer, link)
        assert link.is_symlink()
        assert (root / "large_disk" / "actor" / "model.safetensors").is_file()
        assert [path.name for path in (root / "large_disk").iterdir()] == ["actor"]
        dist.barrier()  # the next export makes another directory there


def _keeps_the_earlier_one_on_a_full_disk(
    engine: ModelEngine, tokenizer: Tokenizer, target: Path
) -> str:
    before = load_file(target / "model.safetensors")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails instead
    error = _fails(engine, tokenizer, target, full_on=0)
    assert _fails(engine, tokenizer, target, full_on=1) != ""  # writes one of two files

    after = load_file(target / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [path.name for path in target.parent.iterdir()] == ["actor"]
    return error


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _fails(engine: ModelEngine, tokenizer: Tokenizer, target: Path, full_on: int) -> str:
    """The error of an export while one rank cannot write; rank 1 writes the second file."""
    if dist.get_rank() == full_on:
        _limit_files(SMALL_FILE)
    with (
        mock.patch("mrlhf.run.export._MEGABYTE", 25_000),  # a file of 1 "MB" for each rank
        pytest.raises(CheckpointError) as refusal,
    ):
        export_checkpoint(ExportedModel(engine, tokenizer, max_shard_mb=1), target)
    _limit_files(resource.RLIM_INFINITY)
    dist.barrier()
    return str(refusal.value)


def _says_where_the_model_is(
    engine: ModelEngine, tokenizer: Tokenizer, target: Path
) -> dict[str, str]:
    def cannot_save() -> None:
        raise CheckpointError("there is no room")

    def refusal(save: Callable[[], Any] = cannot_save, max_shard_mb: Any = 1) -> str:
        dist.barrier()
        with pytest.raises(CheckpointError) as error:
            export_result(ExportedModel(engine, tokenizer, max_shard_mb), target, 7, save)
        dist.barrier()
        return str(error.value)

    told = {}
    with mock.patch.object(shutil, "disk_usage", return_value=_Usage(9, 9, 0)):
        told["no room"] = told["lost"] = refusal()
    if dist.get_rank() == 0:
        shutil.rmtree(target)
        target.write_text("a file")
    told["a file"] = told["rescued"] = refusal()
    where = Path(told["rescued"].rpartition(" written to ")[2].partition(" instead")[0])
    transformers.AutoModelForCausalLM.from_pretrained(where)
    assert list(where.parent.parent.glob("mrlhf-*")) == [where.parent]  # failures left nothing

    saver = Saver(
        target.parent / "checkpoints", RunIdentity("test", {}), everyone(), asynchronous=False
    )
    contents = Contents(7, False, {"actor": engine}, {})
    if dist.get_rank() == 0:
        target.unlink()
    # No export foresees that a file has no largest size.
    told["saved"] = refusal(lambda: saver.save(contents), max_shard_mb=None)
    return told
