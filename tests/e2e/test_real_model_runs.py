"""A real language model through the programs: GRPO, resumed on its own and on another layout, what
the report shows of its answers, and the way to Megatron-LM and back.
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrlhf.commands import convert_checkpoint, report
from mrlhf.config import PPOConfig, load_config
from mrlhf.data.rows import write_rows
from mrlhf.data.sample_table import read_samples
from mrlhf.preflight.footprint import footprint, update_of
from mrlhf.preflight.model_checks import check_models
from tests.faults.runs import Sequel, Setting
from tests.models.smollm2 import CHATS

REWARD = """
def letters(data_source, solution_str, ground_truth, extra_info):
    return sum(character.isalpha() for character in solution_str) / len(solution_str or " ")
"""
ASKED = [*CHATS[1:8], "<b>Say</b> \\n & \U0001f389 again"]
ELSEWHERE = ["actor.pp=2"]
Runs = dict[str, Sequel]


@pytest.fixture(scope="module")
def runs(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Two steps; and the second of them resumed on the same layout, and on another."""
    root = tmp_path_factory.mktemp("real")
    (root / "rewards.py").write_text(REWARD)
    rows = [{"prompt": [{"role": "user", "content": chat}], "answer": ""} for chat in ASKED]
    write_rows(root / "chats.jsonl", rows)
    (root / "grpo.yaml").write_text(yaml.safe_dump(_keys(root, smollm2)))

    setting = Setting("real", "ppo", ["--config", str(root / "grpo.yaml")])
    undisturbed = Sequel(setting, root / "runs" / "undisturbed")
    undisturbed.finish()
    resume = f"trainer.resume={undisturbed.directory / 'checkpoints' / 'step_000001'}"
    found = {"undisturbed": undisturbed}
    for name, keys in (("again", []), ("elsewhere", ELSEWHERE)):
        found[name] = Sequel(setting, root / "runs" / name, [resume, *keys])
        found[name].finish()
    return found


def _keys(root: Path, model: Path) -> dict[str, Any]:
    optim = {"lr": 1e-5, "use_distributed_optimizer": False}  # so that no buffer is padded
    return {
        "seed": 3,
        "actor": {
            "path": str(model),
            "dtype": "bfloat16",
            "ppo_mini_batch_size": 4,
            "use_kl_loss": True,
            "optim": optim,
        },
        "reference": {"dtype": "bfloat16"},
        "algorithm": {"adv_estimator": "grpo"},
        "reward": {"terms": [{"name": f"{root / 'rewards.py'}:letters"}]},
        "rollout": {"n": 2, "dump_freq": 1},
        "data": {
            "train_files": str(root / "chats.jsonl"),
            "train_batch_size": 4,
            "max_prompt_length": 96,
            "max_response_length": 12,
        },
        "trainer": {
            "total_steps": 2,
            "save_freq": 1,
            "max_to_keep": None,
            "output_dir": "given by each test",
        },
    }


def _samples(run: Sequel, step: int) -> Any:
    return read_samples(run.directory / "rollouts" / f"step_{step:06d}.parquet")


def test_a_step_that_was_resumed_is_the_same_step(runs: Runs) -> None:
    undisturbed = runs["undisturbed"]
    again = runs["again"]
    last = undisturbed.rows()[-1]
    assert last["step"] == 2 and last["actor/grad_norm"] > 0
    assert again.rows() == undisturbed.rows()  # it takes over the rows before
    assert again.weights() == undisturbed.weights() != {}

    # On another layout the engine has the same weights, and so draws the same responses.
    elsewhere = runs["elsewhere"]
    for name in ("prompt_ids", "response", "uid"):
        wanted = _samples(undisturbed, 2).texts[name]
        assert _samples(elsewhere, 2).texts[name] == wanted, name
    row = elsewhere.rows()[-1]
    for name in ("actor/entropy", "actor/grad_norm", "actor/kl_loss", "critic/score/mean"):
        assert row[name] == pytest.approx(last[name], rel=0.05, abs=1e-3), name


@pytest.mark.parametrize(("name", "keys"), [("undisturbed", []), ("elsewhere", ELSEWHERE)])
def test_a_run_holds_the_bytes_of_its_plan(runs: Runs, name: str, keys: list[str]) -> None:
    run = runs[name]
    config = load_config(PPOConfig, run.setting.arguments[1], keys)
    specs = {role: spec for role, spec in check_models(config).items() if spec is not None}
    plan = footprint(config, specs, 2)
    row = run.rows(free=())[-1]
    wanted = plan.ranks[0].owned(update_of("actor")) / 1e9
    assert math.isclose(row["perf/memory_in/update_actor"], wanted)


def test_the_report_shows_the_answers_as_they_were_written(runs: Runs, tmp_path: Path) -> None:
    run = runs["undisturbed"]
    output = tmp_path / "report.html"
    with redirect_stdout(StringIO()):
        assert report.main([str(run.directory), "--out", str(output)]) == 0
    page = output.read_text(encoding="utf-8")
    assert "<b>Say" not in page and "<script>alert" not in page

    shown = dict(_texts(page))
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "actor")
    asked = {
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], tokenize=False, add_generation_prompt=True
        )
        for chat in ASKED
    }
    assert asked == set(shown)
    for step in (1, 2):
        table = _samples(run, step)
        for tokens, text in zip(
            table.texts["response_tokens"], table.texts["response"], strict=True
        ):
            assert "".join(tokens).removesuffix("<|im_end|>") == text
            assert not re.search("[ĠĊÃâ]", text), text
    assert any(not text.isascii() for text in shown.values())


def _texts(page: str) -> list[list[str]]:
    """Prompt and response of each sample, out of the page alone."""
    pattern = r'<script type="application/octet-stream" id="texts-0-\d+">([^<]+)</script>'
    blocks = re.findall(pattern, page)
    return [
        text for block in blocks for text in json.loads(zlib.decompress(base64.b64decode(block)))
    ]


def test_transformers_reads_what_was_trained(runs: Runs, smollm2: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(runs["undisturbed"].directory / "actor")
    started = load_file(smollm2 / "model.safetensors")
    weight = trained.model.embed_tokens.weight
    assert trained.lm_head.weight is weight and weight.dtype == torch.bfloat16
    assert not torch.equal(weight, started["model.embed_tokens.weight"])
    torch.testing.assert_close(
        weight.float(), started["model.embed_tokens.weight"].float(), rtol=0.02, atol=2e-3
    )


def test_it_goes_to_megatron_lm_and_back_bit_for_bit(smollm2: Path, tmp_path: Path) -> None:
    def convert(source: Path, to: str, target: Path, *options: str) -> None:
        words = [str(source), "--to", to, "--out", str(target), *options]
        with redirect_stdout(StringIO()):
            assert convert_checkpoint.main(words) == 0

    convert(smollm2, "megatron", tmp_path / "megatron", "--verify")
    convert(tmp_path / "megatron", "huggingface", tmp_path / "back", "--like", str(smollm2))
    found = load_file(tmp_path / "back" / "model.safetensors")
    wanted = load_file(smollm2 / "model.safetensors")
    assert found.keys() == wanted.keys() and len(wanted) == 272
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
