"""One version: what the package says, what is packaged, and what each program prints."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mrlhf

ROOT = Path(__file__).parents[2]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
PROGRAMS = re.findall(r'"(mrlhf-[\w-]+) = ([\w.]+):(\w+)"', SETUP)


@pytest.mark.parametrize(
    ("module", "function"),
    [program[1:] for program in PROGRAMS],
    ids=[name for name, *_ in PROGRAMS],
)
def test_each_program_prints_it(module, function, monkeypatch, capsys):
    if module == "mrlhf.run.elastic":  # it takes signals, so it gets a process of its own
        command = [sys.executable, "launch/torchrun.py", "--version"]
        said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    else:
        main = getattr(importlib.import_module(module), function)
        monkeypatch.setattr(sys, "argv", ["program", "--version"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        said = capsys.readouterr().out
    assert said == f"mrlhf {mrlhf.__version__}\n"


def test_it_is_what_is_packaged_and_the_last_of_the_changelog():
    command = [sys.executable, "setup.py", "--version"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert said.split() == [mrlhf.__version__]

    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d\S*)", changelog, re.MULTILINE)[0] == mrlhf.__version__
