"""Jobs of the batch script in a real Slurm with two nodes on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT
from tests.slurm.cluster import NODES, Cluster
from tests.slurm.tiny_runs import Gate, records

SCRIPT = "launch/slurm/train_ppo.sbatch"

# A stand-in for the program: it writes down how it was called, and runs what follows the image.
APPTAINER = """#!/bin/bash
echo "$*" >>"$CALLS"
while [[ $1 != *.sif ]]; do shift; done
shift
exec "$@"
"""

# An interpreter whose torchrun says that it runs, waits, and fails when it is told to.
WAITS_AND_FAILS = """#!/bin/bash
[[ $* != *check_node* ]] || exec {python} "$@"
touch {folder}/runs.$SLURMD_NODENAME
while [[ ! -e {folder}/fail ]]; do sleep 0.1; done
exit 9
"""

# An interpreter that has another version of a package on node n2.
OTHER_PYTHON = """#!/bin/bash
[[ $SLURMD_NODENAME != n2 ]] || export PYTHONPATH={folder}
exec {python} "$@"
"""


def submit(cluster: Cluster, log: Path, *arguments: str, **variables: str) -> str:
    """Submit the batch script from the repository; its output goes to `log`."""
    place = [f"--output={log}", f"--chdir={ROOT}"]
    usual = {"OMP_NUM_THREADS": "1", "REPO": str(ROOT), "PYTHON": sys.executable}
    variables = {"INTERFACE": "lo", **usual, **variables}
    return cluster.submit("sbatch", *place, *arguments, **variables)


def test_whatever_stops_a_job_its_numbers_stay(
    cluster: Cluster, inputs: Path, tmp_path: Path, undisturbed: Path
) -> None:
    gate = Gate(tmp_path / "gate")
    gate.make()
    output = tmp_path / "out"
    log = tmp_path / "job.out"
    keys = [SCRIPT, "--config", f"{inputs}/ppo.yaml", gate.reward]

    # Line 1 of the metrics is the validation before the first step.
    gate.close_after(2, output)
    job = submit(cluster, log, *keys, OUTPUT_DIR=str(output))
    cluster.wait_in_job(job, gate.reached.exists, "scoring in step 2")
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    gate.open()
    cluster.wait_for_restart(job, 1)
    assert "interrupted, and the state is saved; queueing the job again" in log.read_text()

    gate.close_after(3, output)
    cluster.wait_in_job(job, gate.reached.exists, "scoring in step 3")
    cluster.run("scontrol", "requeue", job)
    gate.open()
    cluster.wait_for_restart(job, 2)
    text = log.read_text()
    assert "step_000001_interrupted: step 1 and a part of the next" in text

    ended = cluster.wait_until_ended(job)
    assert ended["ExitCode"] == "0:0" and ended["Restarts"] == "2", log.read_text()
    assert_logs(output, attempts=3)
    assert_same_run(output, undisturbed)


def assert_logs(output: Path, attempts: int) -> None:
    """Each attempt has a folder, with what each node runs and a log of each rank."""
    folders = sorted((output / "logs").iterdir())
    assert [folder.name for folder in folders] == [f"attempt_{n}" for n in range(attempts)]
    for folder in folders:
        lines = (folder / "nodes.txt").read_text().splitlines()
        assert sorted(line.split()[0] for line in lines) == list(NODES)
        for node in NODES:
            assert len(list((folder / node).rglob("stderr.log"))) == 1

    last = [file.read_text() for file in folders[-1].rglob("stderr.log")]
    assert sum("step 4/4" in text for text in last) == 1


def assert_same_run(output: Path, expected: Path) -> None:
    """The metrics and the final weights of two runs are equal bit for bit."""
    assert records(output) == records(expected)
    weights = [file.relative_to(expected) for file in expected.glob("actor/*.safetensors")]
    assert weights
    for name in weights:
        assert (output / name).read_bytes() == (expected / name).read_bytes()


@pytest.mark.recipes
def test_a_node_that_does_not_answer_is_no_failure_of_the_run(
    cluster: Cluster, inputs: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(WAITS_AND_FAILS.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    log = tmp_path / "job.out"
    keys = [SCRIPT, "--config", f"{inputs}/ppo.yaml"]
    variables = {"OUTPUT_DIR": str(tmp_path / "out"), "PYTHON": str(python)}

    job = submit(cluster, log, *keys, **variables)
    runs = [tmp_path / f"runs.{node}" for node in NODES]
    cluster.wait_in_job(job, lambda: all(file.exists() for file in runs), "both nodes")
    cluster.kill_node("n2")
    cluster.wait_for_restart(job, 1)
    cluster.start_node("n2")
    cluster.run("scancel", job)
    assert "a node does not answer; queueing the job again" in log.read_text()

    variables["MAX_REQUEUES"] = "0"
    (tmp_path / "fail").touch()
    ended = cluster.wait_until_ended(submit(cluster, log, *keys, **variables))
    assert ended["ExitCode"] == "9:0"  # both nodes answer: the program has failed


def test_array_in_a_container(cluster: Cluster, inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.txt").write_text("seed=5 optim.lr=1e-3\nseed=6 trainer.total_steps=500\n")
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(APPTAINER)
    program.chmod(0o755)

    job = submit(
        cluster,
        tmp_path / "%a.out",
        *("--nodes=1", "--array=0-1", SCRIPT, "--config", f"{inputs}/sft.yaml"),
        PROGRAM="train_sft",
        OUTPUT_DIR=str(tmp_path / "sft"),
        SWEEP=str(tmp_path / "sweep.txt"),
        CONTAINER="image.sif",
        CALLS=str(tmp_path / "calls.txt"),
        PATH=f"{program.parent}:{os.environ['PATH']}",
    )
    # Its ranks are still importing: the signal waits until they can stop.
    attempt = tmp_path / "sft" / "task_1" / "logs" / "attempt_0"
    cluster.wait_in_job(f"{job}_1", lambda: any(attempt.rglob("stderr.log")), "ranks of index 1")
    cluster.run("scancel", "--signal=USR1", "--batch", f"{job}_1")
    for index, restarts in ((0, "0"), (1, "1")):
        ended = cluster.wait_until_ended(f"{job}_{index}")
        assert ended["Restarts"] == restarts
        assert ended["ExitCode"] == "0:0", (tmp_path / f"{index}.out").read_text()

    losses = set()
    for index, seed in ((0, 5), (1, 6)):
        output = tmp_path / "sft" / f"task_{index}"
        assert f"seed: {seed}" in (output / "config.yaml").read_text()
        losses.add(json.dumps(records(output)[-1]))
    assert len(losses) == 2

    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert len(calls) == 6  # a check and a training in each attempt
    assert all(f"--bind {ROOT}" in call and f"--bind {tmp_path}/sft" in call for call in calls)


@pytest.mark.recipes
def test_a_node_that_cannot_run_it_ends_the_job_early(
    cluster: Cluster, inputs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "packages" / "safetensors-99.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 99.0\n")
    python = tmp_path / "python"
    python.write_text(OTHER_PYTHON.format(folder=folder.parent, python=sys.executable))
    python.chmod(0o755)

    keys = [SCRIPT, "--config", f"{inputs}/ppo.yaml"]
    output = str(tmp_path / "out")
    jobs = {
        "no interface": submit(
            cluster, tmp_path / "1.out", *keys, OUTPUT_DIR=output, INTERFACE="none0"
        ),
        "other software": submit(
            cluster, tmp_path / "2.out", *keys, OUTPUT_DIR=output, PYTHON=str(python)
        ),
    }
    ended = {name: cluster.wait_until_ended(job) for name, job in jobs.items()}
    assert [shown["ExitCode"] for shown in ended.values()] == ["2:0", "2:0"]

    log = (tmp_path / "1.out").read_text()
    for node in NODES:
        assert f"error: node {node}: interface none0 has no IPv4 address" in log
    log = (tmp_path / "2.out").read_text()
    assert "safetensors=99.0" in log
    assert "error: the nodes differ (see above)" in log
    assert not (tmp_path / "out" / "config.yaml").exists()
