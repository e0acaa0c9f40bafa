"""`benchmarks/gpu.py` runs on a CPU at its tiny size, and a failure costs no other row."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu.py"


def _run(*arguments: str) -> None:
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(PROGRAM), *arguments], check=True, env=variables)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny size is for a CPU")
def test_the_tiny_size_measures_everything(tmp_path: Path) -> None:
    _run("--size", "tiny", "--json", str(tmp_path / "gpu.json"))

    rows = json.loads((tmp_path / "gpu.json").read_text())["benchmarks"]
    assert not [row for row in rows if "outcome" in row]
    assert [row["what"] for row in rows[:2]] == ["update", "log-probabilities"]
    assert [row["sequences"] for row in rows[2:]] == [1, 16]
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_a_measure_that_fails_leaves_its_rows_and_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    program = runpy.run_path(str(PROGRAM))

    def measure(size, device):
        yield {"what": "update", "size": size}
        raise RuntimeError("no kernel image is available")

    rows = list(program["_rows_or_reason"](measure, "0.5B", device=None))
    assert rows == [
        {"what": "update", "size": "0.5B"},
        {
            "what": "measure",
            "size": "0.5B",
            "outcome": "failed: RuntimeError: no kernel image is available",
        },
    ]
