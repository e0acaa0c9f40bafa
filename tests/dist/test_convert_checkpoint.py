"""Checkpoints that sharded models saved, over either layout of two ranks, become policies.

One of them holds adapters: it becomes what the run exports, and with `merge` the merged model.
Commands that ask a policy take the same from the run as it is, in another layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrlhf.checkpoint.conversion.identify import examine
from mrlhf.checkpoint.frozen import fingerprint
from mrlhf.checkpoint.manifest import read_manifest
from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.config.sections import LoraSection
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.models.adapter_files import CONFIG, WEIGHTS, write_adapter_config
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.run.startup import Run
from mrlhf.trainers.policy import build_policy, policy_config
from mrlhf.training.merging import export_merged
from tests.dist.role_runs import (
    CPU,
    Form,
    Setting,
    build_actor,
    load_experience,
    save_inputs,
    update_actor,
)
from tests.models.checkpoints import assert_same_tensors, convert_quietly
from tests.oracle import plain_ppo
from tests.oracle.plain_lora import adapter_of
from tests.oracle.plain_models import FROZEN, is_frozen
from tests.oracle.plain_ppo import Case
from tests.ranks import everyone, run_ranks

CASES = {
    "float32": Case("qwen2-tied", "token-mean"),
    "bfloat16": Case("llama", "token-mean", {"dtype": "bfloat16"}),
    "adapters": Case("llama", "token-mean", {"dtype": "bfloat16"}, lora=True),
    "stacks": Case("gpt-oss", "token-mean", {"dtype": "bfloat16"}, lora=True),
    "frozen": Case("phi3", "token-mean", {"dtype": "bfloat16"}, freeze=True),
}
LAYOUTS = {
    "float32": ParallelLayout(tp=2, pp=1, dp=1),
    "bfloat16": ParallelLayout(tp=1, pp=2, dp=1),
    "adapters": ParallelLayout(tp=2, pp=1, dp=1),
    "stacks": ParallelLayout(tp=2, pp=1, dp=1),
    "frozen": ParallelLayout(tp=2, pp=1, dp=1),
}


def _actor(root: Path, case: Case, layout: ParallelLayout) -> Any:
    groups = GroupFactory(timeout_s=600.0).role_groups(layout)
    return build_actor(Setting(root, groups, Form("plain", 1000, True)), case)


def _train_and_save(rank: int, world_size: int, root: Path) -> None:
    for dtype, case in CASES.items():
        actor = _actor(root, case, LAYOUTS[dtype])
        update_actor(actor, load_experience(root, case), plain_ppo.MINI_BATCH)
        model = root / case.model
        lora = LoraSection(path=str(adapter_of(model)) if case.lora else None)
        section = {"path": str(model), "lora": lora.model_dump()}
        if case.freeze:
            section["freeze"] = [*FROZEN]
        if case.lora:
            export_merged(actor.engine, root / dtype / "exported_merged", 10**9)
        frozen = {"actor": fingerprint(model)} if case.lora or case.freeze else {}
        data = {"tokenizer": str(model), "chat_template": None}
        identity = RunIdentity("test", {"actor": section, "data": data}, frozen)
        saver = Saver(root / dtype / "checkpoints", identity, everyone(), asynchronous=False)
        saver.save(Contents(3, False, {"actor": actor.engine}, {"numbers": [1]}))

        actor.engine.export(root / dtype / "exported", 10**9)
        if case.lora and rank == 0:
            write_adapter_config(actor.engine.spec, str(model), root / dtype / "exported")


def _ask(rank: int, world_size: int, root: Path) -> None:
    """Take each policy from its run's newest checkpoint, in another layout, and write it."""
    groups = GroupFactory(timeout_s=600.0)
    for dtype, case in CASES.items():
        layout = LAYOUTS[dtype]
        keys = [f"actor.tp={layout.pp}", f"actor.pp={layout.tp}", "rollout.tp=1"]
        keys.append(f"actor.dtype={case.settings.get('dtype', 'float32')}")
        config = policy_config(str(root / dtype), None, keys)
        run = Run(CPU, rank, world_size, groups, root)
        build_policy(config, run).export(root / dtype / "asked", 10**9)


def test_checkpoints_of_sharded_models_become_policies(tmp_path: Path) -> None:
    save_inputs(tmp_path, models=["llama", "phi3", "qwen2-tied", "gpt-oss"])
    run_ranks(2, _train_and_save, tmp_path)
    run_ranks(2, _ask, tmp_path)
    for dtype in CASES:
        root = tmp_path / dtype
        for file in (root / "exported").glob("*.safetensors"):
            assert (root / "asked" / file.name).read_bytes() == file.read_bytes()
        facts = dict(examine(root, every_byte=True).facts)
        assert facts["step"] == "3" and "exp_avg_sq" in facts["actor"]

        said = convert_quietly(root, root / "policy")
        assert "optimizer state of actor: exp_avg, exp_avg_sq" in said
        assert "the state of the run: schedules, sampler, counters, random numbers" in said
        if CASES[dtype].lora:
            _check_adapters(root)
            continue
        assert_same_tensors(root / "exported", root / "policy")
        if CASES[dtype].freeze:
            saved = read_manifest(root / "checkpoints" / "step_000003").models["actor"].tensors
            assert not any(map(is_frozen, saved)) and "model.norm.weight" in saved
        step = root / "checkpoints" / "step_000003"
        assert (root / "policy" / "tokenizer.json").exists() == _has_tokenizer(step)
        assert load_file(root / "policy" / "model.safetensors")


def _check_adapters(root: Path) -> None:
    """The result is the run's export bit for bit, and merged the run's merged export."""
    weights = [load_file(root / name / WEIGHTS) for name in ("exported", "policy")]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, weights[1][name]), name
    assert (root / "exported" / CONFIG).read_bytes() == (root / "policy" / CONFIG).read_bytes()

    convert_quietly(root, root / "merged", merge=True)
    assert_same_tensors(root / "exported_merged", root / "merged")
    convert_quietly(root, root / "megatron", "megatron", merge=True)
    convert_quietly(root / "megatron", root / "back")
    assert_same_tensors(root / "merged", root / "back")
    convert_quietly(root / "policy", root / "from_adapter", "megatron", merge=True)
    with pytest.raises(ConfigError, match=r"no form for adapters alone; add --merge"):
        convert_quietly(root, root / "none", "megatron")

    base = Path(read_manifest(root / "checkpoints" / "step_000003").config["actor"]["path"])
    file = base / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for merge in (None, True):
        with pytest.raises(CheckpointError, match=r"actor.path .* does not hold the weights"):
            convert_quietly(root, root / "none", merge=merge)
    with pytest.raises(CheckpointError, match=r"actor.path .* does not hold the weights"):
        policy_config(str(root), None)
    base.rename(base.with_name("gone"))
    with pytest.raises(
        ConfigError, match=r"is no directory here; mrlhf convert .*step_000003 --to"
    ):
        policy_config(str(root), None)
    base.with_name("gone").rename(base)


def _has_tokenizer(step: Path) -> bool:
    path = Path(read_manifest(step).config["actor"]["path"])
    return (path / "tokenizer.json").exists()
