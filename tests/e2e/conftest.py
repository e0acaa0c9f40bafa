"""The demo's data and start policy, made once for all tests that train from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.programs import run_program, succeed, torchrun


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory `data/` that `make demo` writes."""
    data = tmp_path_factory.mktemp("start") / "data"
    succeed(run_program(["tools/prepare_data.py", "arithmetic", "--out", str(data)]))
    return data


@pytest.fixture(scope="session")
def start_policy(demo_data: Path) -> Path:
    """A directory with `data/` and `sft/model/`, as `make demo` writes them before PPO."""
    root = demo_data.parent
    places = [
        f"data.train_files={root}/data/sft.jsonl",
        f"data.tokenizer={root}/data/tokenizer",
        f"trainer.output_dir={root}/sft",
    ]
    train = ["launch/train_sft.py", "--config", "configs/demo_sft_cpu.yaml", *places]
    succeed(torchrun(2, train, timeout=900))
    return root
