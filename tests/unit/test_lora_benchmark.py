"""A smoke run of the benchmark of low-rank adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.programs import run_program, succeed

TRAINED = ["full", "rank 8", "rank 32"]


def test_a_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    output = succeed(run_program(["benchmarks/lora.py", "--quick", "--json", str(file)]))

    rows = json.loads(file.read_text(encoding="utf-8"))
    assert [row["trained"] for row in rows] == TRAINED
    for row in rows:
        assert [len(row["seconds"][case]) for case in ("update", "step")] == [1, 1]
        assert row["peak_bytes"] > row["bytes"]["params"] > 0

    full, low, high = rows
    for kind in ("grads", "optimizer"):
        assert low["bytes"][kind] < full["bytes"][kind]
        assert high["bytes"][kind] - low["bytes"][kind] == pytest.approx(
            24 / 8 * low["bytes"][kind], rel=0.1
        )
    assert low["hand_over"] < high["hand_over"] < full["hand_over"]
    assert "| tiny | rank 32 |" in output
    assert "TRL was left out" in output
