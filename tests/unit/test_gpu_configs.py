"""The configurations in configs/gpu/ pass the dry run on the GPUs that their names say, and fit.

So does the one of docs/first_gpu_run.md, with rows that the page's script has written.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mrlhf.config import PPOConfig, load_config, parse_args
from mrlhf.preflight import dry_run
from mrlhf.preflight.footprint import footprint
from mrlhf.preflight.model_checks import check_models
from tests.models.chat import chat_tokenizer
from tests.models.published import write_published
from tests.pages import commands_of, files

FILES = sorted((Path(__file__).parents[2] / "configs" / "gpu").glob("*.yaml"))
GPU_GB = 80
REST_GB = 10  # of the layer that is being computed, the output layer and NCCL


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpu_configs")
    write_published(root / "models")
    return root


@pytest.fixture(autouse=True)
def in_its_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def test_there_are_four() -> None:
    assert [_ranks(path) for path in FILES] == [64, 16, 8, 1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_dry_run_accepts_it(path: Path) -> None:
    found = dry_run(load_config(PPOConfig, str(path), []), _ranks(path))
    assert all("data/" in line for line in found.missing), found.missing
    last = found.text.splitlines()[-1]
    assert last.startswith(f"what could be checked fits {_ranks(path)} rank")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_fits_a_gpu_of_80_gb(path: Path) -> None:
    config = load_config(PPOConfig, str(path), ["distributed.device=cuda"])
    specs = {name: spec for name, spec in check_models(config).items() if spec is not None}
    taken = footprint(config, specs, _ranks(path))
    assert taken.total(taken.peak) / 1e9 + REST_GB < GPU_GB, taken


def test_the_first_gpu_run_reads_what_its_script_writes() -> None:
    for name, text in files("docs/first_gpu_run.md").items():
        Path(name).write_text(text, encoding="utf-8")
    Path("data/hub/main").mkdir(parents=True)
    problems = [
        {"question": f"What is {number}?", "answer": f"So many.\n#### {number:,}"}
        for number in range(1000, 1200)
    ]
    for split in ("train", "test"):
        rows = pa.Table.from_pylist(problems)
        pq.write_table(rows, f"data/hub/main/{split}-00000-of-00001.parquet")

    (make,) = commands_of("docs/first_gpu_run.md", "^python make_data.py$")
    subprocess.run([sys.executable, *shlex.split(make)[1:]], check=True, timeout=300)
    assert pq.read_table("data/test.parquet").to_pylist()[1]["answer"] == "1001"

    model = Path("models/Qwen2.5-1.5B-Instruct")
    shutil.copytree("models/Qwen2.5-1.5B", model)
    chat_tokenizer("qwen2.5").save_pretrained(model)
    (check,) = commands_of("docs/first_gpu_run.md", "--dry-run")
    config, dry, _ = parse_args(PPOConfig, shlex.split(check)[2:])
    assert dry is not None
    found = dry_run(config, dry.world_size)
    assert all("the weights of" in line for line in found.missing), found.missing
    assert "2 training steps" in found.text
    assert found.text.endswith(f"fits {dry.world_size} ranks")
    (phases,) = re.findall(r"^memory of each phase.*", found.text, re.MULTILINE)
    assert "generation" in phases


def _ranks(path: Path) -> int:
    (number,) = re.findall(r"_(\d+)_gpus?$", path.stem)
    return int(number)
