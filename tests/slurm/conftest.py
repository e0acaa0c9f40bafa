"""A real Slurm and tiny inputs, once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, Unavailable, install, running
from tests.slurm.tiny_runs import write_inputs


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        install()
    except Unavailable as reason:
        pytest.skip(f"no Slurm here: {reason}")
    with running(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, `ppo.yaml` and `sft.yaml`."""
    root = tmp_path_factory.mktemp("inputs")
    write_inputs(root)
    return root
