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
import torch

from mrlhf.config import PPOConfig, load_config, parse_args
from mrlhf.errors import ConfigError
from mrlhf.models.families import family_of, load_spec
from mrlhf.preflight import dry_run
from mrlhf.preflight.footprint import footprint
from mrlhf.preflight.model_checks import check_models
from tests.models.chat import chat_tokenizer
from tests.models.published import write_published
from tests.pages import ROOT, commands_of, files

FILES = sorted((ROOT / "configs" / "gpu").glob("*.yaml"))
MODELS = ROOT / "configs" / "gpu" / "models"
GPU_GB = 80
REST_GB = 10  # of the layer that is being computed, the output layer and NCCL


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh clone, no model is here."""
    monkeypatch.chdir(tmp_path)


def test_there_are_four() -> None:
    assert [_ranks(path) for path in FILES] == [64, 16, 8, 1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_dry_run_accepts_it(path: Path) -> None:
    found = dry_run(load_config(PPOConfig, str(path), []), _ranks(path))
    for line in found.missing:
        model = re.search(r"models/(\S+) does not exist", line)
        if model is None:
            assert "data/" in line
            continue
        (place,) = MODELS.glob(f"*/{model[1]}")
        name = f"{place.parent.name}/{place.name}"
        assert line.endswith(f"; hf download {name} --local-dir models/{place.name} gets it")
        assert f"models/{place.name} is not here: its sizes are those of {name}" in found.text
    assert "memory of actor on a rank: weights " in found.text
    last = found.text.splitlines()[-1]
    assert last.startswith(f"what could be checked fits {_ranks(path)} rank")


def test_memory_is_that_of_gpus_on_a_machine_of_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("auto means the GPU of this machine")
    module = sys.modules["mrlhf.preflight.dry_run"]  # mrlhf.preflight has a function of that name
    monkeypatch.setattr(module, "cores", lambda: 128)
    monkeypatch.setattr(module, "host_memory_bytes", lambda: 256 * 10**9)
    for path in FILES[-2:]:  # of 8 GPUs, and of 1 with adapters
        found = dry_run(load_config(PPOConfig, str(path), []), _ranks(path))
        device = "on a GPU" if _ranks(path) == 8 else "on a CPU"
        assert re.search(rf"^memory of actor on a rank: .* {device}, assumed", found.text, re.M)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_fits_a_gpu_of_80_gb(path: Path) -> None:
    config = load_config(PPOConfig, str(path), ["distributed.device=cuda"])
    specs = {name: spec for name, spec in check_models(config).items() if spec is not None}
    taken = footprint(config, specs, _ranks(path))
    assert taken.total(taken.peak) / 1e9 + REST_GB < GPU_GB, taken


def test_the_shipped_sizes_are_those_of_the_published_models(tmp_path: Path) -> None:
    write_published(tmp_path)
    shipped = sorted(config.parent for config in MODELS.glob("*/*/config.json"))
    named = {
        role.path
        for path in FILES
        for role in load_config(PPOConfig, str(path), []).roles().values()
    }
    assert {f"models/{place.name}" for place in shipped} == named
    for place in shipped:
        ours, theirs = (load_spec(path, "lm") for path in (place, tmp_path / place.name))
        assert family_of(ours).tensor_shapes(ours) == family_of(theirs).tensor_shapes(theirs)
        assert (ours.max_positions, ours.experts) == (theirs.max_positions, theirs.experts)


def test_a_directory_without_a_configuration_is_told_what_gets_it() -> None:
    config = load_config(PPOConfig, str(FILES[-2]), [])
    Path("models/Qwen3-8B").mkdir(parents=True)
    get = "hf download Qwen/Qwen3-8B config.json --local-dir models/Qwen3-8B gets it"
    with pytest.raises(ConfigError, match=f"holds no config.json; .*; {get}"):
        dry_run(config, 8)
    with pytest.raises(ConfigError, match=f"no config.json there; .*; {get}"):
        load_spec("models/Qwen3-8B", "lm")

    own = load_config(PPOConfig, str(FILES[-2]), ["actor.path=models/my-own"])
    (line, *_) = dry_run(own, 8).missing
    assert line.startswith("actor.path models/my-own does not exist here, and models/my-own of ")


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
    write_published(Path("published"))
    shutil.copytree("published/Qwen2.5-1.5B", model)
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
