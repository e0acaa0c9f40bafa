"""The benchmark of the axes of parallelism: its table, and a smoke run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT, run_program, succeed


def test_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from parallel_overhead import table

    one = {
        "model": "dense",
        "ranks": 1,
        "axes": "one rank",
        "seconds": 2.0,
        "cpu_seconds": 1.5,
        "waiting": 0.0,
    }
    two = {**one, "ranks": 2, "axes": "tp", "seconds": 1.2, "cpu_seconds": 1.8, "waiting": 0.25}
    other = {**two, "model": "mixture", "ranks": 1}
    assert table([one, two, other])[2:] == [
        "| dense | 1 | one rank | 2.00 | 1.00 | 1.50 | 1.00 | 0.00 | 0% |",
        "| dense | 2 | tp | 1.20 | 0.60 | 1.80 | 1.20 | 0.30 | 25% |",
        "| mixture | 1 | tp | 1.20 | 1.00 | 1.80 | 1.00 | 0.30 | 25% |",
    ]


def test_a_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = ["benchmarks/parallel_overhead.py", "--quick", "--json", str(file)]
    output = succeed(run_program(command))

    rows = json.loads(file.read_text())
    dense = ["dp", "tp", "tp, sequence parallel", "cp", "pp", "pp, vpp 2"]
    mixture = ["dp", "ep", "tp, ep", "tp, etp"]
    assert [(row["model"], row["ranks"], row["axes"]) for row in rows] == [
        ("dense", 1, "one rank"),
        ("mixture", 1, "one rank"),
        *(("dense", 2, axes) for axes in dense),
        *(("mixture", 2, axes) for axes in mixture),
    ]
    for row in rows:
        assert row["cpu_seconds"] > 0
        assert len(row["profile_of_ranks"]) == row["ranks"]
        if row["ranks"] == 2:
            assert 0 < row["waiting"] < 1, row["axes"]
        assert f"| {row['model']} | {row['ranks']} | {row['axes']} |" in output
