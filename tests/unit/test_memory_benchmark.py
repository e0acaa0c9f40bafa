"""`benchmarks/memory.py` measures the bytes that it has planned."""

from __future__ import annotations

from tests.e2e.programs import run_program, succeed


def test_measured_is_planned() -> None:
    output = succeed(run_program(["benchmarks/memory.py", "--quick"]))
    rows = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 3 * 5
    assert all(measured == planned for _, _, measured, planned in rows[1:])
    most = {form: float(planned) for form, phase, _, planned in rows[1:] if phase == "gen"}
    assert most["nothing"] > most["grads"] > most["everything"]
