"""docs/conversion.md is right: its commands run, one after the other, and its options exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.commands import convert_checkpoint
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import ParallelLayout
from tests.dist.role_runs import Form, Setting, build_actor, build_critic, save_inputs
from tests.e2e.programs import ROOT, run_program, succeed
from tests.models.checkpoints import assert_same_tensors
from tests.oracle.plain_lora import adapter_of
from tests.oracle.plain_ppo import Case
from tests.pages import commands_of
from tests.ranks import everyone, run_ranks

PAGE = (ROOT / "docs" / "conversion.md").read_text(encoding="utf-8")
PROGRAM = "python tools/convert_checkpoint.py "
COMMANDS = commands_of("docs/conversion.md")


def _save_run(rank: int, world_size: int, root: Path) -> None:
    """What a run with an actor and a critic leaves behind."""
    groups = GroupFactory(timeout_s=600.0).role_groups(ParallelLayout(tp=1, pp=1, dp=1))
    setting = Setting(root, groups, Form("plain", 1000, False))
    case = Case("qwen2-tied", "token-mean")
    models = {
        "actor": build_actor(setting, case).engine,
        "critic": build_critic(setting, case).engine,
    }
    identity = RunIdentity("PPOConfig", {"actor": {"path": str(root / case.model)}})
    saver = Saver(root / "runs" / "ppo" / "checkpoints", identity, everyone(), asynchronous=False)
    for step in (20, 40):
        saver.save(Contents(step, False, models, {}))


def _save_adapter(model: Path, directory: Path) -> None:
    """What a run with adapters leaves behind."""
    shutil.copytree(adapter_of(model), directory)
    file = directory / "adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": str(model)}
    file.write_text(json.dumps(config))


def test_its_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_inputs(tmp_path, models=["qwen2-tied"])
    run_ranks(1, _save_run, tmp_path)
    monkeypatch.chdir(tmp_path)

    runs = tmp_path / "runs"
    (runs / "qwen").symlink_to(runs / "ppo")
    _save_adapter(tmp_path / "qwen2-tied", runs / "lora" / "actor")

    said = {}
    for command in [*COMMANDS, *commands_of("README.md", "convert_checkpoint")]:
        arguments = command.removeprefix(PROGRAM)
        with redirect_stdout(StringIO()) as output:
            assert convert_checkpoint.main(shlex.split(arguments)) == 0, command
        said[arguments] = output.getvalue()
    assert len(said) == 7
    assert AutoModelForCausalLM.from_pretrained(runs / "merged") is not None
    assert_same_tensors(runs / "policy", tmp_path / "policy")

    assert AutoModelForCausalLM.from_pretrained(runs / "policy") is not None
    critic = AutoModelForSequenceClassification.from_pretrained(runs / "critic")
    assert critic.config.num_labels == 1
    assert_same_tensors(runs / "policy", runs / "back")
    assert "checkpoint: runs/ppo/checkpoints/step_000040" in said["--inspect runs/ppo"]
    for name in ("pretrain_gpt_options.txt", "latest_checkpointed_iteration.txt", "huggingface"):
        assert (runs / "megatron" / name).exists() and name in PAGE


def test_its_options_exist() -> None:
    said = succeed(run_program(["tools/convert_checkpoint.py", "--help"]))
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    of_megatron = ("--load", "--save", "--tokenizer-model", "--ckpt-format", "--moe-layer-freq")
    named -= set(of_megatron)
    assert len(named) > 7
    assert {option for option in named if option not in said} == set()
