"""Checkpoints that sharded models saved, over either layout of two ranks, become policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from mrlhf.checkpoint.conversion.convert import SourceOptions, TargetOptions, convert
from mrlhf.checkpoint.conversion.identify import examine
from mrlhf.checkpoint.manifest import read_manifest
from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from tests.dist.role_runs import (
    Form,
    Setting,
    build_actor,
    load_experience,
    save_inputs,
    update_actor,
)
from tests.models.checkpoints import assert_same_tensors
from tests.oracle import plain_ppo
from tests.oracle.plain_ppo import Case
from tests.ranks import run_ranks

CASES = {
    "float32": Case("qwen2-tied", "token-mean"),
    "bfloat16": Case("llama", "token-mean", {"dtype": "bfloat16"}),
}
LAYOUTS = {
    "float32": ParallelLayout(tp=2, pp=1, dp=1),
    "bfloat16": ParallelLayout(tp=1, pp=2, dp=1),
}


def _actor(root: Path, case: Case, layout: ParallelLayout) -> Any:
    groups = GroupFactory(timeout_s=600.0).role_groups(layout)
    return build_actor(Setting(root, groups, Form("plain", 1000, True)), case)


def _train_and_save(rank: int, world_size: int, root: Path) -> None:
    world = dist.group.WORLD
    assert world is not None
    for dtype, case in CASES.items():
        actor = _actor(root, case, LAYOUTS[dtype])
        update_actor(actor, load_experience(root, case), plain_ppo.MINI_BATCH)
        identity = RunIdentity("test", {"actor": {"path": str(root / case.model)}})
        saver = Saver(root / dtype / "checkpoints", identity, world, asynchronous=False)
        saver.save(Contents(3, False, {"actor": actor.engine}, {"numbers": [1]}))
        actor.engine.export(root / dtype / "exported", 10**9)


def test_checkpoints_of_sharded_models_become_policies(tmp_path: Path) -> None:
    save_inputs(tmp_path, models=["llama", "qwen2-tied"])
    run_ranks(2, _train_and_save, tmp_path)
    for dtype in CASES:
        root = tmp_path / dtype
        facts = dict(examine(root, every_byte=True).facts)
        assert facts["step"] == "3" and "exp_avg_sq" in facts["actor"]

        said = _convert(root, root / "policy")
        assert "optimizer state of actor: exp_avg, exp_avg_sq" in said
        assert "the state of the run: schedules, sampler, counters, random numbers" in said
        assert_same_tensors(root / "exported", root / "policy")
        step = root / "checkpoints" / "step_000003"
        assert (root / "policy" / "tokenizer.json").exists() == _has_tokenizer(step)
        assert load_file(root / "policy" / "model.safetensors")


def _start(task: str, nbytes: int) -> Any:
    return lambda done: None


def _has_tokenizer(step: Path) -> bool:
    path = Path(read_manifest(step).config["actor"]["path"])
    return (path / "tokenizer.json").exists()


def _convert(source: Path, target: Path) -> list[str]:
    options = TargetOptions("huggingface")
    report = convert(source, target, SourceOptions(), options, verify=True, start=_start)
    return report.left_out
