"""docs/generation.md is right: its commands run, its keys and metrics exist."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from mrlhf.inference.base import EngineStats
from mrlhf.metrics.table import names_of
from mrlhf.rollout.generator import engine_metrics
from tests.e2e.programs import ROOT, read_lines, run_commands, run_program, succeed
from tests.oracle import plain_models
from tests.pages import commands_of
from tests.tiny_task import write_tiny_task

PAGE = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")


def test_its_command_says_what_a_sequence_takes() -> None:
    # `make demo` writes the data and the tokenizer that it names.
    output = succeed(
        run_commands(commands_of("docs/generation.md", "kv_cache_mb"), "--allow-missing")
    )
    # 13 tokens take one block of 16.
    factors = "2 x 4 layers x 2 KV heads x 16 x 4 bytes x 16 tokens"
    assert f"a sample at full length: {factors} = 16.38 kB" in output
    assert "rollout.kv_cache_mb 1 = 1.049 MB: 64 samples at full length" in output


def test_a_run_answers_as_the_page_says(tmp_path: Path) -> None:
    plain_models.save_models(tmp_path / "models")
    write_tiny_task(tmp_path / "data", train=5)
    run = tmp_path / "runs" / "mine"  # as a run leaves it that has ended
    shutil.copytree(tmp_path / "models" / "llama", run / "actor")
    shutil.copytree(tmp_path / "data" / "tokenizer", run / "actor", dirs_exist_ok=True)
    (run / "summary.json").write_text(json.dumps({"checkpoint": "elsewhere/actor", "steps": 7}))
    (tmp_path / "data" / "train.jsonl").rename(tmp_path / "prompts.jsonl")
    keys = {
        "actor": {"path": "another", "tp": 2, "lora": {"rank": 4}},
        "reward": {"terms": [{"name": "exact_match"}]},
        "data": {"train_files": "none.jsonl", "max_prompt_length": 6, "max_response_length": 5},
        "trainer": {"output_dir": "none", "total_steps": 5},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(keys))

    answer = commands_of("docs/generation.md", "mrlhf generate")
    output = succeed(run_commands(answer, cwd=tmp_path))
    assert "best_of_n: " in output and "samples: answers.jsonl" in output
    samples = read_lines(tmp_path / "answers.jsonl")
    columns = {name for names in re.findall(r"^\| (`.+`) \|", PAGE, re.M) for name in names.split()}
    assert {f"`{name}`" for name in samples[0]} <= {name.rstrip(",") for name in columns}
    assert len(samples) == 4 * 5 and len(read_lines(tmp_path / "best.jsonl")) == 5
    summary = json.loads((tmp_path / "best.summary.json").read_text())
    assert summary["model"] == str(Path("runs/mine/actor")) and summary["n"] == 4

    # What is there is not overwritten; a mistake in the prompts is one line on several ranks.
    refused = run_commands(answer[:1], cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.splitlines() == [
        "error: --out answers.jsonl is there already; name another, or add --overwrite"
    ]
    (tmp_path / "prompts.jsonl").write_text('{"promt": "1+2="}\n')
    refused = run_commands(answer[:1], "--overwrite", cwd=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("ERROR") == 1
    assert "prompts.jsonl:1: no value for 'prompt'; did you mean 'promt'?" in refused.stderr
    assert read_lines(tmp_path / "answers.jsonl") == samples


def test_its_metrics_exist() -> None:
    metrics = set(engine_metrics([EngineStats(1, 1, 1, 1, 1, 1, 1)]))
    assert set(re.findall(r"`(rollout/\w+)`", PAGE)) <= metrics == set(names_of("rollout"))


def test_the_benchmark_runs(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = ["--quick", "--contenders", "native,transformers", "--json", str(file)]
    output = succeed(run_program(["benchmarks/generate.py", *options]))
    assert "| 3M | float32 | 1 | 8 x 16 |" in output

    (result,) = json.loads(file.read_text())
    assert result["failed"] == {}
    assert result["greedy_agreement"] == {"native": 1.0, "transformers": 1.0}

    even, spread = result["workloads"]
    for run in even["contenders"].values():
        assert (run["tokens"], run["shortest"], run["longest"]) == (128, 16, 16)
        assert run["tokens_per_second"] == pytest.approx(sum(run["all"]) / 2)
        assert run["gemm_share"] > 0
        assert run["memory_share"] > 0
    for run in spread["contenders"].values():
        assert run["longest"] >= 10 * run["shortest"]
