"""Runs whose model, tokenizer and data are repositories of a hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.programs import ROOT, read_lines, run_program, succeed, torchrun
from tests.hub_server import Hub, read_folder, serving
from tests.oracle.plain_models import save_models
from tests.tiny_task import write_tiny_task

NAME = "tests/tiny_llama"
TOKENIZER = "tests/tiny-tokenizer"
ROWS = "tests/rows:train"


@pytest.fixture(scope="module")
def inputs(make_once: Callable[..., Path]) -> Path:
    def make(root: Path) -> None:
        write_tiny_task(root / "data")
        save_models(root)

    return make_once("hub-inputs", make)


@pytest.fixture
def hub(tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as served:
        served.add(NAME, read_folder(inputs / "llama"))
        served.add(TOKENIZER, read_folder(inputs / "data" / "tokenizer"))
        rows = (inputs / "data" / "sft.jsonl").read_bytes()
        served.add("tests/rows", {"data/train.jsonl": rows}, kind="datasets")
        monkeypatch.setenv("HF_ENDPOINT", served.address)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "20")
        yield served


def command(place: Path, *more: str) -> list[str]:
    keys = {
        "model": {"path": NAME},
        "data": {"train_files": ROWS, "tokenizer": TOKENIZER, "batch_size": 8, "max_length": 48},
        "trainer": {"output_dir": str(place / "run"), "total_steps": 1, "save_freq": 1},
        "distributed": {"device": "cpu", "timeout_s": 60},
    }
    (place / "run.yaml").write_text(yaml.safe_dump(keys))
    return [str(ROOT / "launch/train_sft.py"), "--config", str(place / "run.yaml"), *more]


def test_two_ranks_train_on_what_one_of_them_downloads(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dry = succeed(run_program(command(tmp_path, "--dry-run")))
    assert "fits 1 rank" in dry and "not checked: the weights of model" in dry
    assert f"{NAME}: {tmp_path}/hub/" in dry
    assert "model.safetensors" not in hub.gets

    said = succeed(torchrun(2, command(tmp_path)))
    commit = hub.revisions[f"models/{NAME}"]["main"]
    assert re.search(rf"{NAME} was taken from the Hub: \S+/snapshots/{commit}", said)
    assert hub.gets["model.safetensors"] == hub.gets["data/train.jsonl"] == 1
    assert set(hub.gets.values()) <= {1, 2}  # both repositories may have a file of one name
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "step" in line][-1] == 1
    recorded = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert recorded["model"]["path"].endswith(f"/snapshots/{commit}")

    # The run goes on with its commit, and without the hub.
    hub.add(NAME, {**hub.files[f"models/{NAME}", commit], "config.json": b"{}"})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.asked)
    said = succeed(torchrun(2, command(tmp_path, "trainer.total_steps=2")))
    assert f"/snapshots/{commit}" in said and "going on from" in said
    assert "the configuration has changed: trainer.total_steps;" in said
    assert len(hub.asked) == asked

    monkeypatch.delenv("HF_HUB_OFFLINE")
    launcher = ["launch/torchrun.py", "--nproc-per-node=2", "--standalone"]
    done = run_program([*launcher, *command(tmp_path, "model.path=tests/none")])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: model.path tests/none does not exist here, and there is no ")


def test_the_commands_take_repositories_too(hub: Hub, tmp_path: Path) -> None:
    commit = hub.revisions[f"models/{NAME}"]["main"]
    run = ["--config", str(tmp_path / "run.yaml")]
    command(tmp_path)
    planned = succeed(run_program(["-m", "mrlhf", "plan", *run, "--gpus", "1"]))
    assert "layouts tried" in planned
    assert "model.safetensors" not in hub.gets and "data/train.jsonl" not in hub.gets
    seen = run_program(["-m", "mrlhf", "doctor", "--model", NAME, *run])
    assert f"/snapshots/{commit}" in seen.stdout and "every tensor is there" in seen.stdout
    out = ["--to", "huggingface", "--out", str(tmp_path / "out")]
    convert = "tools/convert_checkpoint.py"
    succeed(run_program([convert, f"{NAME}@{commit}", *out]))
    assert (tmp_path / "out" / "model.safetensors").is_file()

    # An adapter names its base, which may be another commit by now.
    succeed(torchrun(1, command(tmp_path, "model.lora.rank=2")))
    hub.add(NAME, {**hub.files[f"models/{NAME}", commit], "config.json": b"{}"})
    adapter = tmp_path / "run" / "model"
    stated = json.loads((adapter / "adapter_config.json").read_text())
    assert (stated["base_model_name_or_path"], stated["revision"]) == (NAME, commit)
    out[-1] = str(tmp_path / "merged")
    succeed(run_program([convert, str(adapter), "--merge", *out]))
    assert hub.gets["model.safetensors"] == 1
