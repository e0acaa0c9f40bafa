"""A process ends when its launcher does, also one that has gone before the process could look."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "mrlhf" / "run" / "leaving.py"

# It loads the file as the package does, without torch, and looks for the launcher later.
RANK = f"""
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("leaving", {str(FILE)!r})
leaving = importlib.util.module_from_spec(spec)
spec.loader.exec_module(leaving)
from pathlib import Path
note = Path(sys.argv[1])
if sys.argv[2] == "early":
    leaving.end_with_launcher()
note.write_text("started")
while sys.argv[2] == "late" and not note.with_name("go").exists():
    time.sleep(0.01)
if sys.argv[2] == "late":
    leaving.end_with_launcher()
time.sleep(1000)
"""
LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, *sys.argv[1:]], stderr=subprocess.DEVNULL)
print(rank.pid, flush=True)
rank.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_process_ends_with_its_launcher(when: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "-c", RANK, str(note), when],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    command = Path("/proc", launcher.stdout.readline().strip(), "cmdline")
    while not (note.exists() and note.read_text()):
        time.sleep(0.01)

    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    (tmp_path / "go").touch()
    while command.exists() and str(note) in command.read_text():
        time.sleep(0.05)
    launcher.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("program", "rank", "speaks"),
    [
        (["launch/torchrun.py"], None, True),
        (["launch/train_sft.py"], "0", True),
        (["launch/train_ppo.py"], "1", False),
        (["-u", "-m", "mrlhf", "train-ppo"], "0", True),  # as launchers start it
        (["-m", "mrlhf", "train-dpo"], "1", False),
        (["-m", "mrlhf", "torchrun"], None, True),
    ],
)
def test_a_signal_during_the_import_of_torch_is_one_line(
    program: list[str], rank: str | None, speaks: bool, number: signal.Signals, tmp_path: Path
) -> None:
    # In the place of torch stands a module whose import does not end.
    (tmp_path / "torch.py").write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path)!r}, 'imports').touch()\n"
        "while True:\n    time.sleep(0.01)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment.pop("RANK", None)
    if rank is not None:
        environment["RANK"] = rank

    process = subprocess.Popen(
        [sys.executable, *program],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background may have SIGINT ignored, which is inherited.
        preexec_fn=functools.partial(signal.signal, number, signal.SIG_DFL),
    )
    while not (tmp_path / "imports").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 75, errors
    line = f"stopped early: {number.name} came when nothing was to save; start it again\n"
    assert errors == (line if speaks else "")
