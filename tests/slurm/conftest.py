"""A real Slurm, tiny inputs and a run to compare with, once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.programs import succeed, torchrun
from tests.slurm.cluster import Cluster
from tests.slurm.packages import Unavailable
from tests.slurm.tiny_runs import Gate, write_inputs


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        started.start()
        yield started
    except Unavailable as reason:
        pytest.skip(f"no Slurm here: {reason}")
    finally:
        started.stop()


@pytest.fixture(scope="session")
def inputs(make_once: Callable[..., Path]) -> Path:
    """A folder with models, data, `ppo.yaml` and `sft.yaml`."""
    return make_once("slurm-inputs", write_inputs)


@pytest.fixture(scope="session")
def undisturbed(inputs: Path, make_once: Callable[..., Path]) -> Path:
    """The output of `ppo.yaml` in two ranks on one machine, without Slurm; with a `job.log`."""
    return make_once("slurm-undisturbed", lambda root: _train(inputs, root)) / "out"


def _train(inputs: Path, root: Path) -> None:
    gate = Gate(root / "gate")
    gate.make()
    output = root / "out"
    keys = ["--config", str(inputs / "ppo.yaml"), f"trainer.output_dir={output}", gate.reward]
    log = succeed(torchrun(2, ["launch/train_ppo.py", *keys]))
    (output / "job.log").write_text(log, encoding="utf-8")
