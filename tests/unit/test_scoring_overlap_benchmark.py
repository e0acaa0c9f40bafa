"""The benchmark of scoring during generation: a smoke run, in which both forms score alike."""

from __future__ import annotations

from tests.e2e.programs import run_program, succeed


def test_a_quick_run() -> None:
    output = succeed(run_program(["benchmarks/scoring_overlap.py", "--quick"]))
    rows = [line.split("|") for line in output.splitlines() if line.startswith(("| t", "| f"))]
    assert [row[1].strip() for row in rows] == ["false", "true"]
    assert rows[0][5].strip() == "0.00" and float(rows[1][5]) > 0
