"""The benchmark of shared prompts: a smoke run, in which both forms have the same loss."""

from __future__ import annotations

from tests.e2e.programs import run_program, succeed


def test_a_quick_run() -> None:
    output = succeed(run_program(["benchmarks/shared_prompts.py", "--quick"]))
    rows = [line.split("|") for line in output.splitlines() if line.startswith("| tiny")]
    assert len(rows) == 9
    # Four responses of 64 tokens in the mean to a prompt of 256: 1280 tokens over 512.
    assert rows[0][4].strip() == "2.50"
