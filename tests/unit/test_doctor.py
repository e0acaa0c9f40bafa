"""The doctor: each thing that is broken is named, with what to do about it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mrlhf.commands import doctor
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.doctor import machine, model
from mrlhf.doctor.findings import Finding, examine, in_words
from mrlhf.doctor.machine import Measured
from mrlhf.doctor.model import chat_template, tokenizer
from mrlhf.doctor.versions import judge_versions, versions
from tests.oracle import plain_models
from tests.tiny_task import ppo_keys, sft_keys, write_tiny_task

THINKING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] if CONDITION else m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, data and a tokenizer of a tiny task."""
    root = tmp_path_factory.mktemp("doctor")
    plain_models.save_models(root)
    write_tiny_task(root / "data")
    return root


def worst(findings: Iterable[Finding]) -> Finding:
    order = ("ok", "look", "broken")
    return max(findings, key=lambda finding: order.index(finding.level))


@pytest.mark.parametrize(
    ("cuda", "driver", "available", "level", "words"),
    [
        (None, None, False, "ok", "a build for CPUs"),
        (None, "550.54", False, "broken", "without CUDA"),
        ("12.8", None, False, "look", "no NVIDIA driver"),
        ("12.8", "470.199", True, "broken", "needs driver 525.60"),
        ("13.0", "580.65", False, "broken", "finds no GPU"),
        ("13.0", "580.82", True, "ok", "driver 580.82"),
    ],
)
def test_torch_and_driver(
    cuda: str | None, driver: str | None, available: bool, level: str, words: str
) -> None:
    finding = machine.torch_build(cuda, driver, available)
    assert finding.level == level and words in finding.seen
    assert bool(finding.advice) == (level != "ok")


@pytest.mark.parametrize(
    ("version", "processor", "level"),
    [
        ((2, 29, 2), "x86_64", "broken"),
        ((2, 28, 9), "aarch64", "broken"),
        ((2, 25, 1), "x86_64", "look"),
        ((2, 28, 9), "x86_64", "ok"),
        ((2, 29, 3), "aarch64", "ok"),
    ],
)
def test_versions_of_nccl_that_hang(version: tuple[int, ...], processor: str, level: str) -> None:
    assert machine.nccl(version, processor).level == level


def test_versions_other_than_those_that_were_tested_are_named() -> None:
    tested = {"Python": "3.11", "torch": "2.13.0+cu130", "vllm": "0.32.0", "numpy": "9"}
    (finding,) = judge_versions(tested)
    assert finding.level == "ok" and "torch 2.13.0+cu130, vllm" in finding.seen

    found = list(judge_versions({**tested, "torch": "2.16.0a0+nv", "megatron-core": "0.19.2"}))
    torch, megatron, rest = found
    assert (torch.level, torch.seen) == ("look", "torch 2.16.0a0+nv was not tried")
    assert "2.13.0" in torch.advice
    assert (megatron.level, megatron.seen) == ("look", "megatron-core 0.19.2 was tested in part")
    assert rest.level == "ok" and "torch" not in rest.seen

    (read,) = judge_versions({"vllm": "0.33.0"})
    assert read.level == "look" and "read, but not run" in read.seen
    (newer,) = judge_versions({"megatron-core": "0.20.0"})
    assert newer.level == "broken" and "megatron-core>=0.16,<0.20" in newer.advice
    assert any("torch 2." in finding.seen for finding in versions())


def test_a_reward_model_and_an_adapter_are_looked_over_as_what_they_are(task: Path) -> None:
    """Runs leave both; an adapter is looked over beside its base."""
    found = list(model.model(task / "llama-critic"))
    assert "scalar head" in found[0].seen
    assert {finding.level for finding in found if finding.subject == "weights"} == {"ok"}

    adapter = task / "llama-adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(task / "llama")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    found = list(model.model(adapter))
    assert found[0].subject == "adapter" and str(task / "llama") in found[0].seen
    assert "broken" not in {finding.level for finding in found}

    config["base_model_name_or_path"] = str(task / "qwen2-tied")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    *_, broken = examine("model", lambda: model.model(adapter))
    assert broken.level == "broken"


def test_a_machine_without_a_compiler_or_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = machine.compiler()
    assert (finding.level, finding.subject) == ("look", "C++ compiler")
    assert "install g++" in finding.advice

    with monkeypatch.context() as gpu:
        gpu.setattr(torch.cuda, "is_available", lambda: True)
        gpu.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 3))
        gpu.setattr(machine, "_gpus", lambda: ())
        gpu.setattr(machine, "fault_of_compiler", lambda: ("there is none", "install gcc"))
        found = {finding.subject: finding for finding in machine.machine(tmp_path)}
    assert (found["C compiler"].level, found["C compiler"].advice) == ("broken", "install gcc")

    assert worst(machine.disk(tmp_path / "new" / "run")).level != "broken"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert "is no directory" in worst(machine.disk(tmp_path / "file")).seen

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    finding = worst(machine.disk(tmp_path))
    assert finding.level == "broken" and "No space left" in finding.seen
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_slow_ranks_and_late_clocks_are_named() -> None:
    every = [Measured(rank, f"node{rank // 2}", 80.0, 10.0, 0.0) for rank in range(6)]
    assert worst(machine.judge_ranks(every, {"all-reduce": 5.0})).level == "ok"

    every[3] = Measured(3, "node1", 80.0, 2.0, 0.0)
    every[4] = Measured(4, "node2", 30.0, 10.0, -2.5)
    looks = [finding for finding in machine.judge_ranks(every, {}) if finding.level == "look"]
    assert [(finding.subject, finding.seen.split("; ")[-1]) for finding in looks] == [
        ("product", "slow: rank 4 on node2 30.00"),
        ("link", "slow: rank 3 on node1 2.00"),
        ("clocks", "that of node2 is 2.5 s behind that of node0"),
    ]


def test_a_model_that_is_whole_and_one_that_is_not(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--out", str(tmp_path), "--model", str(task / "llama")]) == 0
    said = capsys.readouterr().out
    assert "every tensor is there" in said and "none beside the weights" in said

    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((task / "llama" / "config.json").read_bytes())
    tensors = load_file(task / "llama" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors")
    file = tmp_path / "found.json"
    assert doctor.main(["--model", str(broken), "--json", str(file)]) == 1
    assert "broken" in capsys.readouterr().out
    [found] = [one for one in json.loads(file.read_text()) if one["level"] == "broken"]
    assert "model.layers.1.mlp.up_proj.weight" in found["seen"]

    assert doctor.main(["--json", str(tmp_path / "absent" / "found.json")]) == 2
    assert "absent/found.json: No such file" in capsys.readouterr().err


def test_tokenizers_that_do_not_fit(task: Path) -> None:
    loaded = load_tokenizer(task / "data" / "tokenizer")
    findings = examine("tokenizer", lambda: tokenizer(loaded, 8, {}))
    assert "vocab_size is 8" in worst(findings).seen
    findings = examine("tokenizer", lambda: tokenizer(loaded, 99, {98: "config.json"}))
    assert any("98" in finding.seen and finding.level == "look" for finding in findings)


@pytest.mark.parametrize(
    ("condition", "level"), [("false", "ok"), ("not loop.last and messages|length > 2", "look")]
)
def test_a_template_that_drops_thinking(
    task: Path, tmp_path: Path, condition: str, level: str
) -> None:
    backend = AutoTokenizer.from_pretrained(task / "data" / "tokenizer")
    backend.chat_template = THINKING.replace("CONDITION", condition)
    backend.save_pretrained(tmp_path)
    [header, prefix] = chat_template(load_tokenizer(tmp_path))
    assert (header.level, prefix.level) == ("ok", level)
    assert ("change when another follows" in prefix.seen) == (level == "look")

    (tmp_path / "drops.jinja").write_text("{{ messages[0].content }}")
    finding = worst(chat_template(load_tokenizer(tmp_path, tmp_path / "drops.jinja")))
    assert finding.level == "broken" and "drops the message" in finding.seen


def test_a_reward_that_finds_no_answer_right(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def boxed(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float('boxed{' + ground_truth + '}' in solution_str)\n"
        "def never(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 0.0\n"
    )
    config = tmp_path / "run.yaml"
    keys = ppo_keys(task, {"ppo_mini_batch_size": 8})
    keys["data"]["val_files"] = keys["data"]["train_files"]
    keys["trainer"] = {"output_dir": str(tmp_path / "run"), "total_steps": 1}
    config.write_text(yaml.safe_dump(keys))

    def look(function: str) -> tuple[int, str]:
        terms = f"reward.terms=[{{name: {reward}:{function}}}]"
        code = doctor.main(["--config", str(config), terms, "--out", str(tmp_path)])
        return code, capsys.readouterr().out

    code, said = look("never")
    assert code == 1 and "no reference answer scores above 0" in said
    assert "of 40 rows of data.val_files are in data.train_files too" in said
    code, said = look("boxed")
    assert code == 0 and "40 of 40 reference answers score above 0, written as \\boxed" in said
    assert "fits 2 ranks" in said

    judge = "judge={address: 'http://127.0.0.1:9/v1', model: m, template: '{{ response }}'}"
    terms = "reward.terms=[{name: judge}]"
    arguments = ["--config", str(config), terms, judge, "--out", str(tmp_path)]
    assert doctor.main(arguments) == 0  # no answer is paid for
    assert "reference answers are not scored" in capsys.readouterr().out


def test_fine_tuning_and_mistakes(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(yaml.safe_dump(sft_keys(task, 32)))
    place = f"trainer.output_dir={tmp_path / 'run'}"
    assert doctor.main(["--config", str(config), place]) == 0
    assert "rows: 40, median" in capsys.readouterr().out

    assert doctor.main(["--config", str(config), place, "optim.lrr=1"]) == 2
    assert "did you mean 'optim.lr'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        doctor.main(["actor.tp=2"])
    assert "keys go with --config" in capsys.readouterr().err


def test_words_and_errors_of_checks() -> None:
    def fails() -> Iterable[Finding]:
        yield Finding("ok", "first", "seen")
        raise ValueError("unforeseen")

    findings = examine("second", fails)
    assert [finding.level for finding in findings] == ["ok", "broken"]
    assert in_words([("group", findings), ("empty", [])]).splitlines() == [
        "group",
        "  ok      first: seen",
        "  broken  second: ValueError: unforeseen",
        "",
        "1 ok, 0 look, 1 broken",
    ]
