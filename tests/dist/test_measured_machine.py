"""What `mrlhf plan --measure` measures of ranks of this machine, in a shortened form."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from mrlhf.commands.plan import main
from mrlhf.device import pick_device
from mrlhf.planning.gpus import Gpu
from mrlhf.planning.machine_file import machine_text
from mrlhf.planning.measure import Effort, measure
from tests.pages import ROOT, commands_of
from tests.ranks import run_ranks

SHORT = Effort(
    rows=(16, 64), engine_rows=(1, 8), sizes=(32, 64), length=32, logits=(64, 128),
    streamed=2**16, exchanged=2**14, sweeps=1, rounds=1, least_s=1e-4,
)  # fmt: skip


def _measured(rank: int, world_size: int) -> Gpu:
    return measure(pick_device("cpu", local_rank=rank), SHORT)


def test_a_machine_is_measured_and_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    gpu, same = run_ranks(2, _measured)
    assert gpu == same
    assert (gpu.device, gpu.dtype, gpu.per_machine) == ("cpu", "float32", 2)
    kernels = gpu.measured
    assert kernels is not None
    tables = (kernels.products, kernels.engine_products)
    assert all(table.is_grid and len(table.products) == 8 for table in tables)
    assert {product.rows for product in kernels.engine_products.products} == {1, 8}
    numbers = [value for value in astuple(kernels) if isinstance(value, float)]
    assert min(numbers) > 0 and len(numbers) == 16

    monkeypatch.chdir(tmp_path)
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False,
    ).save_pretrained(tmp_path / "small")  # fmt: skip
    Path("here.yaml").write_text(machine_text(gpu, "two ranks"), encoding="utf-8")
    text = {
        "actor": {"path": "small"},
        "reward": {"terms": [{"name": "exact_match"}]},
        "data": {"train_files": "train.jsonl", "max_response_length": 64},
        "trainer": {"output_dir": "run", "total_steps": 1},
    }
    Path("ppo.yaml").write_text(yaml.safe_dump(text), encoding="utf-8")
    assert main(["--config", "ppo.yaml", "--gpus", "2", "--gpu", "here.yaml"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 x here of ")
    assert "update of critic s" in said


def test_the_commands_of_its_page() -> None:
    measure_it, plan_with_it = commands_of("docs/sizing.md", "runs/here.yaml")
    for command, words in ((measure_it, "wrote runs/here.yaml"), (plan_with_it, "2 x here of ")):
        done = subprocess.run(
            [sys.executable, *shlex.split(command)[1:]],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith(words)
