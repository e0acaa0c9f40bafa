"""`make gpu-hour` runs on a CPU at its tiny size: it goes on, and a failure costs no other step."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from tests.pages import ROOT, commands_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the trial is for a CPU")


@pytest.fixture(autouse=True)
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def _start(command: str, out: Path) -> subprocess.Popen[str]:
    """A command of the page, with another directory for what it finds."""
    words = shlex.split(command.replace("runs/trial", str(out)))
    # Beneath another make, make would tell which directory it enters.
    variables = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if words[0] == "python":
        words[0] = sys.executable
    else:
        words.append(f"GPU_PYTHON={sys.executable}")
    return subprocess.Popen(words, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)


def _wait_for(file: Path) -> None:
    end = time.monotonic() + 600
    while not file.exists():
        assert time.monotonic() < end, f"there is no {file}"
        time.sleep(0.05)


def test_without_a_gpu_one_line_says_what_is_missing(tmp_path: Path) -> None:
    for command in commands_of("docs/gpu.md", "make gpu-hour"):
        process = _start(command, tmp_path)
        output, _ = process.communicate()
        assert process.returncode == 0
        assert len(output.splitlines()) == 1
        assert torch.__version__ in output and "CUDA" in output


def test_the_trial_is_killed_in_the_middle_and_goes_on(tmp_path: Path) -> None:
    [command] = commands_of("docs/gpu.md", "--size tiny")
    log = tmp_path / "steps" / "checks.log"
    first = _start(command, tmp_path)
    _wait_for(log)
    first.kill()
    first.communicate()
    assert set(json.loads((tmp_path / "results.json").read_text())["steps"]) == {"facts"}

    second = _start(command, tmp_path)
    _wait_for(tmp_path / "steps" / "ppo-large.log")
    second.send_signal(signal.SIGTERM)
    assert "the same command goes on" in second.communicate()[0]
    assert second.returncode == 130

    # No time is left for a step.
    output, _ = _start(f"{command} --minutes 0.5", tmp_path).communicate()
    assert "steps are left; the same command goes on" in output

    third = _start(command, tmp_path)
    output, _ = third.communicate()
    assert third.returncode == 0, output
    recorded = [line for line in output.splitlines() if "recorded: done" in line]
    assert [line.split()[1] for line in recorded] == ["facts:", "checks:", "inputs:"]

    found = {
        name: step["found"]
        for name, step in json.loads((tmp_path / "results.json").read_text())["steps"].items()
    }
    assert [row["step"] for row in found["ppo-small"]] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in found["ppo-resumed"]] == [3, 4]
    assert all("timing_s/save_checkpoint" in row for row in found["ppo-resumed"])
    assert found["decode-native"]["failed"] == {}
    assert [row.get("KEYS") for row in found["paged"]] == [None, 32, 64, None, 16]
    assert all(row["bytes_per_s"] > 0 for row in found["paged"])
    assert len(found["profile"]["costs"]) == 10
    assert {"gen", "update_actor", "step"} <= found["profile"]["phases"].keys()
    assert "| failed checks of tests/gpu | 0 | none | met |" in (tmp_path / "report.md").read_text()


def test_a_step_that_is_cut_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_hour
    from gpu_hour_steps import Step

    monkeypatch.setattr(gpu_hour, "_GRACE_S", 0.0)
    monkeypatch.setattr(gpu_hour, "_LEAST_S", 0.5)
    may_end = tmp_path / "may_end"
    program = f"import os, time; time.sleep(0 if os.path.exists({str(may_end)!r}) else 600)"
    steps = [Step(name, ["-c", program], tmp_path / "found.json") for name in ("a", "b")]
    results = {"machine": {"gpus": [], "torch": torch.__version__}, "steps": {}}
    gpu_hour.run_steps(steps, tmp_path, results, time.monotonic() + 1.0)
    assert results["steps"].keys() == {"a"}
    assert results["steps"]["a"]["outcome"].startswith("cut off after 1 s")

    may_end.touch()
    gpu_hour.run_steps(steps, tmp_path, results)
    assert [step["outcome"] for step in results["steps"].values()] == ["done", "done"]


def test_a_step_that_fails_or_hangs_leaves_the_reason(tmp_path: Path) -> None:
    from gpu_hour import run
    from gpu_hour_steps import Step

    output = tmp_path / "found.json"
    fails = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('[1]'); {}['no such key']"
    found = run(Step("fails", ["-c", fails, str(output)], output), tmp_path / "fails.log")
    assert "KeyError: 'no such key'" in found["outcome"]
    assert found["found"] == [1]

    hangs = "print('a kernel runs more slowly', flush=True); import time; time.sleep(600)"
    step = Step("hangs", ["-c", hangs], output)
    found = run(step, tmp_path / "hangs.log", limit_s=2.0)
    assert "stopped after 2 s" in found["outcome"]
    assert found["slow"] == ["a kernel runs more slowly"]
    assert found["found"] is None  # that of an earlier attempt is deleted


def test_figures_stand_beside_their_targets() -> None:
    from gpu_hour_table import targets

    def decoding(engine: str, speeds: list[float]) -> dict[str, object]:
        workloads = [
            {"name": str(place), "contenders": {engine: {"tokens_per_second": speed}}}
            for place, speed in enumerate(speeds)
        ]
        return {"slow": [], "found": {"workloads": workloads, "failed": {}}}

    peaks = [{"step": step, "perf/max_memory_allocated_gb": 2.0} for step in range(1, 50)]
    peaks.append({"step": 50, "perf/max_memory_allocated_gb": 2.5})
    speed = {
        "benchmarks": [
            {"what": "update", "mfu": 0.36},
            {"what": "mixed", "eager_share": 0.02},
            {"what": "mixed", "compilations": 0},
        ]
    }
    steps = {
        "decode-native": decoding("native", [90.0, 85.0]),
        "decode-vllm": decoding("vllm", [100.0, 100.0]),
        "ppo-small": {"slow": ["a", "b"], "found": peaks},
        "ppo-large": {"slow": [], "found": [{"rollout_corr/k3_kl": 0.0002}]},
        "speed-0.6B": {"slow": [], "found": speed},
        "speed-1.7B": {"slow": [], "found": {"benchmarks": [{"what": "train", "outcome": "x"}]}},
    }
    rows = [line.strip("|").split("|")[1:] for line in list(targets(steps))[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["not measured", "none", ""],
        ["2", "none", "**missed**"],
        ["36.0%", ">= 35 %", "met"],
        ["not measured", ">= 35 %", ""],
        ["85.0%", ">= 90 %", "**missed**"],
        ["2.0%", "<= 5 %", "met"],
        ["0.0200", "<= 0.03", "met"],
        ["25.0%", "none", "**missed**"],
    ]


def test_idle_time_is_what_no_kernel_covers() -> None:
    from gpu_hour_profile import summary

    def event(name: str, device: DeviceType, start: float, end: float) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(name=name, device_type=device, time_range=span)

    found = summary(
        [
            event("gen", DeviceType.CPU, 0, 100),
            event("update_actor", DeviceType.CPU, 100, 200),
            event("gen", DeviceType.CUDA, 0, 100),  # the range, as the device sees it
            event("gemm", DeviceType.CUDA, 10, 30),
            event("norm", DeviceType.CUDA, 20, 40),  # on another stream
            event("gemm", DeviceType.CUDA, 100, 200),
        ],
        ["gen", "update_actor", "values"],
    )
    assert {name: (p["kernels"], p["idle_share"]) for name, p in found["phases"].items()} == {
        "gen": (2, 0.7),
        "update_actor": (1, 0.0),
    }
    assert [(cost["name"], cost["calls"]) for cost in found["costs"]] == [("gemm", 2), ("norm", 1)]
    assert found["costs"][0]["seconds"] == pytest.approx(120e-6)
