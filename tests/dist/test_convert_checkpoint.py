"""Checkpoints that sharded models saved are converted in one process, and loaded by others.

An actor with its optimizer is saved by two ranks in one layout, cut for another, and loaded there;
and a Hugging Face model becomes a checkpoint from which two ranks load their weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mrlhf.checkpoint.conversion.convert import SourceOptions, TargetOptions, convert, relayout
from mrlhf.checkpoint.conversion.identify import examine
from mrlhf.checkpoint.manifest import WEIGHT, read_manifest
from mrlhf.checkpoint.model_slices import slices_to_save
from mrlhf.checkpoint.restorer import open_checkpoint
from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from tests import plain_ppo
from tests.checkpoint_models import assert_same_tensors
from tests.dist.role_runs import (
    Form,
    Setting,
    build_actor,
    load_experience,
    save_inputs,
    update_actor,
)
from tests.plain_ppo import Case
from tests.ranks import run_ranks

CASES = {
    "float32": Case("qwen2-tied", "token-mean"),
    "bfloat16": Case("llama", "token-mean", {"dtype": "bfloat16"}),
}
SAVED = ParallelLayout(tp=2, pp=1, dp=1)
CUT = ParallelLayout(tp=1, pp=2, dp=1)


def _actor(root: Path, case: Case, layout: ParallelLayout) -> Any:
    groups = GroupFactory(timeout_s=600.0).role_groups(layout)
    return build_actor(Setting(root, groups, Form("plain", 1000, True)), case)


def _train_and_save(rank: int, world_size: int, root: Path) -> None:
    world = dist.group.WORLD
    assert world is not None
    for dtype, case in CASES.items():
        actor = _actor(root, case, SAVED)
        update_actor(actor, load_experience(root, case), plain_ppo.MINI_BATCH)
        identity = RunIdentity("test", {"actor": {"path": str(root / case.model)}})
        saver = Saver(root / dtype / "checkpoints", identity, world, asynchronous=False)
        saver.save(Contents(3, False, {"actor": actor.engine}, {"numbers": [1]}))
        actor.engine.export(root / dtype / "exported", 10**9)


def _slices(actor: Any) -> dict[str, torch.Tensor]:
    """What this rank would save, by kind and box."""
    slices = {}
    for source in slices_to_save(actor.engine).sources:
        slices[source.key] = torch.cat([run.clone() for run in source.runs()])
    return slices


def _load(rank: int, world_size: int, root: Path) -> int:
    world = dist.group.WORLD
    assert world is not None
    compared = 0
    for dtype, case in CASES.items():
        original = _actor(root, case, CUT)
        saved = open_checkpoint(root / dtype / "checkpoints" / "step_000003", world)
        saved.load_models({"actor": original.engine})

        cut = open_checkpoint(root / dtype / "cut", world)
        assert cut.state == {"numbers": [1]} and cut.manifest.step == 3
        actor = _actor(root, case, CUT)
        cut.load_models({"actor": actor.engine})
        wanted = _slices(original)
        found = _slices(actor)
        assert found.keys() == wanted.keys() and any(key.startswith("exp_avg:") for key in found)
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in found.items())
        compared += len(found)

        weights = _actor(root, case, CUT)
        open_checkpoint(root / dtype / "weights", world).load_models({"actor": weights.engine})
        weights.engine.export(root / dtype / "exported again", 10**9)
    return compared


def test_checkpoints_of_sharded_models_come_and_go(tmp_path: Path) -> None:
    save_inputs(tmp_path, models=["llama", "qwen2-tied"])
    run_ranks(2, _train_and_save, tmp_path)
    for dtype in CASES:
        _convert_all(tmp_path / dtype)
    assert min(run_ranks(2, _load, tmp_path)) > 60

    for dtype in CASES:
        assert_same_tensors(tmp_path / dtype / "exported", tmp_path / dtype / "exported again")


def _convert_all(root: Path) -> None:
    """A copy cut for another layout, a policy to serve, and weights made of that policy."""
    step = root / "checkpoints" / "step_000003"
    target = TargetOptions("training", layout=CUT)
    relayout(root, root / "cut", target, role=None, verify=True, start=_start)
    assert read_manifest(root / "cut").models["actor"].layout == {"tp": 1, "pp": 2, "dp": 1}
    facts = dict(examine(root / "cut", every_byte=True).facts)
    assert facts["step"] == "3" and "exp_avg_sq" in facts["actor"]

    said = _convert(root, root / "policy", "huggingface")
    assert "optimizer state of actor: exp_avg, exp_avg_sq" in said
    assert "the state of the run: schedules, sampler, counters, random numbers" in said
    assert_same_tensors(root / "exported", root / "policy")
    assert (root / "policy" / "tokenizer.json").exists() == _has_tokenizer(step)

    _convert(root / "policy", root / "weights", "training", layout=SAVED)
    assert read_manifest(root / "weights").models["actor"].kinds == (WEIGHT,)
    _convert(root / "weights", root / "policy again", "huggingface")
    assert_same_tensors(root / "policy", root / "policy again")
    assert load_file(root / "policy" / "model.safetensors")


def _start(task: str, nbytes: int) -> Any:
    return lambda done: None


def _has_tokenizer(step: Path) -> bool:
    path = Path(read_manifest(step).config["actor"]["path"])
    return (path / "tokenizer.json").exists()


def _convert(source: Path, target: Path, to: Any, **options: Any) -> list[str]:
    report = convert(
        source,
        target,
        SourceOptions(),
        TargetOptions(to, **options),
        verify=True,
        start=_start,
    )
    return report.left_out
