"""The checks of a GPU, under pytest; `tests/gpu/checks.py` has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.checks import CHECKS, Place, prepared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One rank on the GPU."""
    with prepared("auto", tmp_path_factory.mktemp("gpu")) as place:
        yield place


@pytest.mark.parametrize("name", CHECKS)
def test_the_gpu_agrees_with_the_cpu(name: str, place: Place) -> None:
    CHECKS[name](place)
