"""docs/generation.md and docs/engine.md are right: command and program run, keys and metrics exist,
and the benchmark runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mrlhf.config import PPOConfig
from mrlhf.config.tree import nodes
from mrlhf.inference.base import EngineStats
from mrlhf.metrics.table import names_of
from mrlhf.rollout.generator import engine_metrics
from tests.e2e.programs import ROOT, run_commands, run_program, succeed
from tests.pages import commands_of

PAGE = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
INSIDE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")


def test_its_command_says_what_a_sequence_takes() -> None:
    # `make demo` writes the data and the tokenizer that it names.
    output = succeed(run_commands(commands_of("docs/generation.md"), "--allow-missing"))
    # 13 tokens take one block of 16.
    factors = "2 x 4 layers x 2 KV heads x 16 x 4 bytes x 16 tokens"
    assert f"a sample at full length: {factors} = 16.38 kB" in output
    assert "rollout.kv_cache_mb 1 = 1.049 MB: 64 samples at full length" in output


def test_its_program_prints_what_the_page_says() -> None:
    (program,) = re.findall(r"^```python\n(.+?)^```", INSIDE, re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^It prints:\n\n```\n(.+?)^```", INSIDE, re.MULTILINE | re.DOTALL)
    done = run_program(["-c", program])
    succeed(done)
    assert done.stdout == printed


def test_its_keys_and_metrics_exist() -> None:
    known = set(nodes(PPOConfig))
    named = set(re.findall(r"`((?:rollout|data|actor)\.\w+)`", PAGE))
    assert len(named) > 10 and named <= known
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
