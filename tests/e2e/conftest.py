"""The demo's data and start policy, made once for all tests that train from them; reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.programs import run_program, succeed, torchrun
from tests.e2e.report_browser import browser, page, reports

__all__ = ["browser", "page", "reports"]


@pytest.fixture(scope="session")
def demo_data(make_once: Callable[..., Path]) -> Path:
    """The directory `data/` that `make demo` writes."""
    return make_once("data", _prepare_data)


@pytest.fixture(scope="session")
def start_policy(demo_data: Path, make_once: Callable[..., Path]) -> Path:
    """A directory with `data/` and `sft/model/`, as `make demo` writes them before PPO."""
    return make_once("start", lambda root: _train_sft(root, demo_data))


def _prepare_data(directory: Path) -> None:
    succeed(run_program(["tools/prepare_data.py", "arithmetic", "--out", str(directory)]))


def _train_sft(root: Path, data: Path) -> None:
    (root / "data").symlink_to(data)
    places = [
        f"data.train_files={root}/data/sft.jsonl",
        f"data.tokenizer={root}/data/tokenizer",
        f"trainer.output_dir={root}/sft",
    ]
    train = ["launch/train_sft.py", "--config", "configs/demo_sft_cpu.yaml", *places]
    succeed(torchrun(2, train))
