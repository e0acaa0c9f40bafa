"""Two jobs on one output directory, as users start them: the second is refused while the first
lives, and follows it when it is dead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT, read_lines, succeed, torchrun
from tests.tiny_task import write_tiny_task


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_tiny_task(directory, sft=64, train=8, vocab_size=64)
    return directory


def _arguments(data: Path, output_dir: Path, steps: int, *more: str) -> list[str]:
    keys = [
        f"data.train_files={data}/sft.jsonl",
        f"data.tokenizer={data}/tokenizer",
        "data.batch_size=8",
        f"trainer.total_steps={steps}",
        "trainer.save_every_minutes=null",
        f"trainer.output_dir={output_dir}",
        "optim.lr_warmup_steps=1",
        "optim.lr_decay_steps=null",
    ]
    return ["launch/train_sft.py", "--config", "configs/demo_sft_cpu.yaml", *keys, *more]


@pytest.fixture
def first_job(data: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job that would run for days, under a launcher that starts its ranks once again."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]

    with subprocess.Popen(
        [
            sys.executable,
            *launcher,
            "--max-restarts=1",
            *_arguments(data, tmp_path / "run", 10**7),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "first.log").open("wb"),
        start_new_session=True,
    ) as job:
        yield job
        _kill_all(job)


def _kill_all(job: subprocess.Popen[bytes]) -> None:
    """SIGKILL the launcher and all its ranks at once; a second call finds none of them."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    ranks = children.read_text().split() if children.exists() else []
    for pid in [job.pid, *map(int, ranks)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    job.wait()


def _wait_for(condition: Callable[[], bool], job: subprocess.Popen[bytes], log: Path) -> None:
    while not condition():
        assert job.poll() is None, log.read_text()
        time.sleep(0.05)


def _has_rows(run: Path) -> bool:
    file = run / "metrics.jsonl"
    return file.exists() and file.stat().st_size > 0


def _owner(run: Path) -> dict[str, object]:
    newest = sorted((run / ".lock").glob("*.json"))[-1]
    owner: dict[str, object] = json.loads(newest.read_text())
    return owner


def _assert_modes_follow_the_umask(run: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    for path in [run, *run.rglob("*")]:
        wanted = (0o777 if path.is_dir() else 0o666) & ~umask
        assert path.stat().st_mode & 0o777 == wanted, path


def test_a_second_job_waits_for_the_first_ones_end(
    first_job: subprocess.Popen[bytes], data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    log = tmp_path / "first.log"
    _wait_for(lambda: _has_rows(run), first_job, log)

    # The launcher starts the ranks again, and rank 0 takes the dead rank's place at once.
    before = _owner(run)
    os.kill(int(str(before["pid"])), signal.SIGKILL)
    aside = run / "metrics.before_1.jsonl"
    _wait_for(lambda: aside.exists() and _has_rows(run), first_job, log)
    owner = _owner(run)
    assert owner["pid"] != before["pid"] and not owner["released"]

    refused = torchrun(2, _arguments(data, run, 2))
    assert refused.returncode != 0
    message = f"{run} is in use by process {owner['pid']} on host {owner['host']}"
    assert refused.stderr.count(" ERROR mrlhf.run.failures: ConfigError: ") == 1
    assert message in refused.stderr
    assert first_job.poll() is None
    assert _owner(run) == owner

    # All of the first job dies at once, and a third job begins the run anew.
    _kill_all(first_job)
    output = succeed(torchrun(2, _arguments(data, run, 2)))
    assert "is dead, so it is taken" in output
    assert "metrics are kept in metrics.before_2.jsonl" in output
    assert "trainer.total_steps; the earlier is config.1.yaml" in output
    assert [row["step"] for row in read_lines(run / "metrics.jsonl")] == [1, 2]
    assert _owner(run)["released"]

    _assert_modes_follow_the_umask(run)

    # A finished run stays as it is.
    summary = (run / "summary.json").read_bytes()
    refused = torchrun(1, _arguments(data, run, 2))
    assert refused.returncode != 0
    assert "holds a finished run" in refused.stderr
    assert "trainer.overwrite=true deletes it" in refused.stderr
    assert (run / "summary.json").read_bytes() == summary
    assert _owner(run)["released"]
