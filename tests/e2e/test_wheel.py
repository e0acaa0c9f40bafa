"""What a user gets by `pip install`: the wheel holds every file, and the commands of
docs/install.md run from an empty directory.

The wheel is made from the source distribution, as package indexes get it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT, read_lines, run_commands, succeed
from tests.pages import commands_of

NOT_SOURCE = shutil.ignore_patterns(
    *(".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", "build", "runs", "shared")
)


def _python(*arguments: str, cwd: Path) -> None:
    succeed(subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, root / "source", ignore=NOT_SOURCE, symlinks=True)
    _python("setup.py", "-q", "sdist", "--dist-dir", str(root), cwd=root / "source")

    (source,) = root.glob("*.tar.gz")
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(root)]
    _python("-m", "pip", "wheel", "-q", *options, str(source), cwd=root)
    (built,) = root.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel is installed in; what it needs comes from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    (command,) = commands_of("docs/install.md", r"^pip install .*constraints.* \.$")
    words = command.removesuffix(".").split()
    options = ["-q", "--no-deps", "--target", str(folder), str(wheel)]
    _python("-m", *words, *options, cwd=ROOT)
    return folder


def test_a_clone_is_found_from_the_folder_above_it(tmp_path: Path) -> None:
    """The clone is called mrlhf there, so its folder must not hide the package in it."""
    clone = tmp_path / "mrlhf"
    shutil.copytree(ROOT, clone, ignore=NOT_SOURCE, symlinks=True)
    build = "import setuptools.build_meta as build; build.build_editable('dist')"
    _python("-c", build, cwd=clone)

    (editable,) = (clone / "dist").glob("*.whl")
    zipfile.ZipFile(editable).extractall(tmp_path / "site")
    # Without this environment's packages, among which is the clone that is tested.
    script = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import mrlhf; "
    found = f"assert mrlhf.__file__ == {str(clone / 'mrlhf/__init__.py')!r}"
    _python("-S", "-c", script + found, cwd=tmp_path)


def _run(installed: Path, commands: list[str], *more: str, cwd: Path) -> str:
    """Run commands with the installed package; returns what they print."""
    path = f"{installed}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path, "PYTHONPATH": str(installed)}
    return succeed(run_commands(commands, *more, cwd=cwd, variables=variables))


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    files = {}
    for folder, inside in (
        ("mrlhf", ""),
        ("configs", "mrlhf/shipped"),
        ("docs", "mrlhf/shipped"),
        ("launch", "mrlhf/shipped"),
    ):
        for path in (ROOT / folder).rglob("*"):
            of_lab = "lab" in path.relative_to(ROOT).parts
            if path.is_file() and path.suffix != ".pyc" and not of_lab:
                files[str(Path(inside) / path.relative_to(ROOT))] = path.read_bytes()
    for path in ROOT.glob("*.md"):
        files[f"mrlhf/shipped/{path.name}"] = path.read_bytes()

    with zipfile.ZipFile(wheel) as archive:
        held = {
            name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name
        }
    assert held.keys() == files.keys()
    assert held == files


def test_an_index_can_show_its_description(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(name).decode()
    assert "docs/your_own_task.md goes from an empty directory" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links and all(link.startswith("https://") for link in links)


def test_its_commands_run_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    where = _run(installed, ["python -c 'import mrlhf; print(mrlhf.__file__)'"], cwd=tmp_path)
    assert where.strip() == f"{installed}/mrlhf/__init__.py"
    assert "actor.clip_ratio_high" in _run(installed, ["mrlhf-train-ppo --help"], cwd=tmp_path)

    prepare = commands_of("docs/install.md", r"^mrlhf-(init|prepare-data)")
    said = _run(installed, prepare, cwd=tmp_path)
    assert said.startswith("configs\ndocs\nlaunch\nruns/demo/data/sft.jsonl: ")
    assert os.access(tmp_path / "launch/slurm/train_ppo.sbatch", os.R_OK)

    sft = commands_of("docs/install.md", r"^mrlhf train-sft")
    more = ["trainer.total_steps=2", "optim.lr_warmup_steps=1"]
    assert "step 2/2, loss" in _run(installed, sft, *more, cwd=tmp_path)
    assert len(read_lines(tmp_path / "runs/demo/sft/metrics.jsonl")) == 2

    # The run itself would be that of `make demo`.
    (ppo,) = commands_of("docs/install.md", r"^mrlhf train-ppo")
    program = ppo.replace("mrlhf train-ppo -n 4", "mrlhf-train-ppo")
    said = _run(installed, [program], "--dry-run", cwd=tmp_path)
    assert said.endswith(" fits 4 ranks\n") and "not checked" not in said
    said = _run(installed, [program], "--dry-run", "algorithm.preset=grpo", cwd=tmp_path)
    assert "algorithm.adv_estimator grpo" in said
    refusal = _refusal(installed, program, tmp_path)
    assert "torchrun --nproc-per-node=N --no-python mrlhf-train-ppo" in refusal

    report = commands_of("docs/install.md", r"^mrlhf-report")
    said = _run(installed, [report[0].replace("runs/demo", "runs/demo/sft")], cwd=tmp_path)
    assert said.startswith("report: runs/demo/sft/report.html")


def test_a_mistake_is_one_line_through_its_launcher(installed: Path, tmp_path: Path) -> None:
    program = "mrlhf-train-sft --config configs/demo_sft_cpu.yaml"
    refusal = _refusal(installed, f"mrlhf-torchrun --no-python {program}", tmp_path)
    assert refusal.endswith("; mrlhf-init copies the shipped ones here\n")
    assert refusal.count("\n") == 1


def test_what_is_there_is_not_overwritten(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    assert "configs exists" in _refusal(installed, "mrlhf-init", tmp_path)
    assert not (tmp_path / "launch").exists()


def _refusal(installed: Path, command: str, cwd: Path) -> str:
    """What a command says that ends with exit code 2."""
    variables = {"PATH": f"{installed}/bin:{os.environ['PATH']}", "PYTHONPATH": str(installed)}
    done = run_commands([command], cwd=cwd, variables=variables)
    assert done.returncode == 2, done.stderr
    return done.stderr
