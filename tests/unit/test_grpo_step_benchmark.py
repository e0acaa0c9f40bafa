"""A smoke run of the benchmark of a GRPO step with adapters."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.programs import run_program, succeed


def test_a_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    output = succeed(run_program(["benchmarks/grpo_step.py", "--quick", "--json", str(file)]))
    [row] = json.loads(file.read_text(encoding="utf-8"))
    assert row["contender"] == "ours" and len(row["seconds"]) == len(row["processor"]) == 1
    assert {"gen", "ref", "update_actor"} <= row["phases"][0].keys()
    assert "old_log_prob" not in row["phases"][0]  # one optimizer step a batch
    assert "| tiny | ours |" in output
