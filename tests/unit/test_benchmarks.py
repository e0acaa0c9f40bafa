"""Each benchmark makes a small run on a CPU, and counts for its limits what is there."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrlhf.gpu import library
from tests.e2e.programs import ROOT, run_program, succeed

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny size is for a CPU")
# What a small run is given, the contenders that it has in its rows, and a row of its table.
RUNS = [
    ("train_step", ["--quick"], ["ours", "ours", "plain"], "| tiny | float32 | spread | step |"),
    ("grpo_step", ["--quick"], ["ours"], "| tiny | ours |"),
    ("grpo_step", ["--quick", "--distil", "1"], ["ours"], "first divergence 0.013"),
    ("episodes", ["--quick", "--work", "WORK"], ["ours"], "| 0.01 | ours | 1 x 2 |"),
    pytest.param("gpu", ["--size", "tiny"], [None] * 5, "'what': 'decode'", marks=ON_CPU),
]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(("name", "arguments", "contenders", "line"), RUNS)
def test_a_small_run(
    name: str, arguments: list[str], contenders: list[str | None], line: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    words = [word.replace("WORK", str(tmp_path)) for word in arguments]
    output = succeed(run_program([f"benchmarks/{name}.py", *words, "--json", str(file)]))

    found = json.loads(file.read_text(encoding="utf-8"))
    rows = found["benchmarks"] if name == "gpu" else found
    rows = [row for row in rows if "compilations" not in row]
    assert [row.get("contender") for row in rows] == contenders
    assert all("outcome" not in row and _speed(row) > 0 for row in rows)
    assert line in output


def _speed(row: dict[str, Any]) -> float:
    """Tokens or steps a second."""
    if "tokens_per_s" in row:
        return float(row["tokens_per_s"])
    [seconds] = row["seconds"] if "seconds" in row else [row["steps"][0]["seconds"]]
    return 1 / float(seconds)


def test_of_a_mixture_few_experts_are_computed_and_all_are_read() -> None:
    from generation_limits import work

    config = SimpleNamespace(
        hidden_size=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=3,
        num_hidden_layers=1,
        vocab_size=10,
    )
    attention = 4 * 4 + 4 * 4 + 2 * (4 * 2)

    # One prompt token, one drawn token, none decoded: attention sees one pair of width 4.
    operations, read = work(config, 1, [1], itemsize=4)
    assert operations == 2 * (attention + 3 * 4 * 2 * 3) + 2 * 40 + 2 * 2 * 4
    assert read == (attention + 3 * 4 * 5 * 3 + 40) * 4


def test_a_measure_that_fails_leaves_its_rows_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = runpy.run_path(str(ROOT / "benchmarks" / "gpu.py"))

    def measure(size, device):
        yield {"what": "update", "size": size}
        raise RuntimeError("no kernel image is available")

    first, last = program["_rows_or_reason"](measure, "0.5B", device=None)
    assert first == {"what": "update", "size": "0.5B"}
    assert last["outcome"] == "failed: RuntimeError: no kernel image is available"

    monkeypatch.setitem(library._faults, "draw", "OutOfResources")
    (refused,) = program["_rows_or_reason"](measure, "0.5B", device=None, strict=True)
    assert "1 of" in refused["outcome"] and "draw (OutOfResources)" in refused["outcome"]
