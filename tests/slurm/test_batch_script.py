"""The batch script outside Slurm: what --dry-run prints, what it refuses; the check of a node."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT

SCRIPT = "launch/slurm/train_ppo.sbatch"
CHECK = "launch/slurm/check_node.py"


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if "SLURM" not in name}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )


def printed(*arguments: str, **variables: str) -> list[list[str]]:
    """The three commands that a dry run prints: of sbatch, of the check, and of the training."""
    done = run("bash", SCRIPT, "--dry-run", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


def test_dry_run_prints_what_would_be_submitted() -> None:
    keys = ["--config", "configs/demo_cpu.yaml", "actor.optim={lr: 1.0e-3}"]
    submit, check, train = printed("--nodes=4", "-p", "gpu", "--", *keys, RANKS_PER_NODE="8")
    assert submit == ["sbatch", "--nodes=4", "-p", "gpu", SCRIPT, *keys]
    assert check[:2] == ["srun", "--ntasks=4"]
    assert "--ranks=8" in check

    assert train[:2] == ["srun", "--ntasks=4"]
    assert "--kill-on-bad-exit=1" in train
    place = train.index("launch/torchrun.py")
    assert train[place + 1 :] == [
        "--nnodes=4",
        "--nproc-per-node=8",
        "--max-restarts=0",
        "--rdzv-backend=c10d",
        "--rdzv-id=JOB_ID",
        "--rdzv-endpoint=FIRST_NODE:PORT",
        "--redirects=3",
        "--tee=3",
        "launch/train_ppo.py",
        *keys,
        "trainer.output_dir=runs/slurm/JOB_ID",
    ]


def test_dry_run_without_options_takes_those_of_the_script() -> None:
    submit, _, train = printed("--config", "x.yaml", PROGRAM="train_rm", OUTPUT_DIR="/shared/rm")
    assert submit == ["sbatch", SCRIPT, "--config", "x.yaml"]
    assert "--nnodes=2" in train
    assert train[-4:] == [
        "launch/train_rm.py",
        "--config",
        "x.yaml",
        "trainer.output_dir=/shared/rm",
    ]


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        (["--gpus-per-node=8"], 8),
        (["--gpus-per-node", "h100:4"], 4),
        (["--gres=gpu:h100:8"], 8),
        (["--gres=nvme:100,gpu:2"], 2),
        (["--gres=gpu"], 1),
        (["--gpus=16"], 4),
        (["-G", "a100:8"], 2),
        (["-G8"], 2),
        (["--gpus-per-task=3"], 3),
    ],
)
def test_dry_run_gives_each_gpu_a_rank(options: list[str], gpus: int) -> None:
    _, check, train = printed("--nodes=4", *options, "--", "a=b", CONTAINER="/images/mrlhf.sif")
    assert f"--ranks={gpus}" in check and f"--gpus={gpus}" in check and "--nv" in check
    assert f"--nproc-per-node={gpus}" in train

    _, check, train = printed("--nodes=4", *options, "--", "a=b", RANKS_PER_NODE="2")
    assert "--ranks=2" in check and f"--gpus={gpus}" in check
    assert "--nproc-per-node=2" in train


def test_what_a_node_runs_imports_mrlhf_from_the_repository(tmp_path: Path) -> None:
    """With an interpreter that has what mrlhf needs, but not mrlhf, as an image may have."""
    venv.create(tmp_path)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "all_but_mrlhf.pth").write_text(sysconfig.get_paths()["purelib"])
    _, check, train = printed("--nodes=1", "--", "a=b", PYTHON=f"{tmp_path}/bin/python")

    start = check.index("env")
    prefix = check[start : start + 2]
    script = tmp_path / "where.py"
    script.write_text("import mrlhf; print(mrlhf.__file__)")
    program = [check[start + 2], str(script)]
    found = run(*prefix, *program)
    assert found.stdout == f"{ROOT}/mrlhf/__init__.py\n"
    assert train[train.index("env") :][:3] == [*prefix, "bash"]
    without = run(*program, PYTHONPATH="")
    assert "No module named 'mrlhf'" in without.stderr


def test_a_sweep_adds_the_line_of_its_index(tmp_path: Path) -> None:
    file = tmp_path / "sweep.txt"
    file.write_text("seed=1 actor.optim.lr=1e-5\nseed=2\n")
    train = printed("--array=0-1", "--", "a=b", SWEEP=str(file), OUTPUT_DIR="out")[-1]
    assert train[-4:] == ["a=b", "seed=1", "actor.optim.lr=1e-5", "trainer.output_dir=out/task_0"]


def test_containers() -> None:
    mounts = {"CONTAINER_MOUNTS": "/data,/scratch:/s", "OUTPUT_DIR": "/out"}
    for command in printed("a=b", CONTAINER="/images/mrlhf.sif", **mounts)[1:]:
        place = command.index("apptainer")
        binds = ["--bind", str(ROOT), "--bind", "/data", "--bind", "/scratch:/s", "--bind", "/out"]
        assert command[place : place + 4] == ["apptainer", "exec", "--pwd", str(ROOT)]
        assert command[place + 4 : place + 13] == [*binds, "/images/mrlhf.sif"]

    pairs = f"{ROOT}:{ROOT},/data:/data,/scratch:/s,/out:/out"
    for command in printed("a=b", CONTAINER="nvcr.io#nvidia/pytorch", **mounts)[1:]:
        assert "--container-image=nvcr.io#nvidia/pytorch" in command
        assert f"--container-workdir={ROOT}" in command
        assert f"--container-mounts={pairs}" in command


@pytest.mark.parametrize(
    ("argument", "variables", "message"),
    [
        ("trainer.output_dir=x", {}, "set the variable OUTPUT_DIR"),
        ("a=b", {"PROGRAM": "train_all"}, "there is no launch/train_all.py"),
        ("a=b", {"SWEEP": "/no/such/file"}, "cannot read the file /no/such/file"),
        ("a=b", {"CONTAINER": "x", "CONTAINER_RUNTIME": "docker"}, "apptainer or enroot"),
    ],
)
def test_refuses_in_one_line(argument: str, variables: dict[str, str], message: str) -> None:
    done = run("bash", SCRIPT, "--dry-run", argument, **variables)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.parametrize(
    "arguments",
    [
        "--dry-run --nodes=2 --gpus-per-node=8 --config x.yaml",
        "--dry-run -N 2 --config x.yaml",
        "--dry-run --config x.yaml --nodes=2",
        "--dry-run --nodes=2 -- --config x.yaml --exclusive",
        "--nodes=2 --config x.yaml",  # would submit
        "--config x.yaml --dry-run",
    ],
)
def test_options_of_sbatch_do_not_reach_the_program(arguments: str) -> None:
    done = run("bash", SCRIPT, *arguments.split())
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "is no option of a training" in line and " -- --config FILE" in line
    assert not done.stdout


def test_check_of_a_node(tmp_path: Path) -> None:
    done = run(sys.executable, CHECK, "--interface=lo", f"--output-dir={tmp_path}/new")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert {word.split("=")[0] for word in line.split()[1:]} >= {"python", "mrlhf", "torch", "gpus"}
    assert run(sys.executable, CHECK, "--address-of=lo").stdout == "127.0.0.1\n"

    for option, message in (
        ("--interface=none0", "interface none0 has no IPv4 address; set INTERFACE to one of lo"),
        ("--output-dir=/proc/run", "cannot write to /proc/run"),
        ("--ranks=100000", "submit with --exclusive or with --cpus-per-task=100000"),
        ("--gpus=1", "the job has 1 GPUs here, but torch sees none"),
    ):
        done = run(sys.executable, CHECK, option, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert message in line
