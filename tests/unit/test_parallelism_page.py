"""docs/parallelism.md is right: its layout passes the dry run and fits."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mrlhf.config import PPOConfig, load_config
from mrlhf.models.families import FAMILIES, load_spec
from mrlhf.preflight import dry_run
from tests import memory_rules
from tests.tiny_task import write_tiny_task

PAGE = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text(encoding="utf-8")
LAYOUTS = re.findall(
    r"^### (\d+) GPUs: [^#]*?^```yaml\n(.*?)^```\n\n```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
)
MEMORY = re.findall(r"^\| (\d+) \|([\d |]+)\|$", PAGE, re.MULTILINE)
GPU_GB = 80
REST_GB = 10  # of the layer that is being computed, the output layer and NCCL

MODELS: dict[str, dict[str, Any]] = {
    "mixture-235b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    }
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `models/`, each of a `config.json` and a tokenizer, and the layouts."""
    root = tmp_path_factory.mktemp("layouts")
    write_tiny_task(root / "task")
    for name, config in MODELS.items():
        shutil.copytree(root / "task" / "tokenizer", root / "models" / name)
        (root / "models" / name / "config.json").write_text(json.dumps(config))
    for world_size, block, _ in LAYOUTS:
        (root / f"{world_size}.yaml").write_text(block)
    return root


@pytest.fixture(autouse=True)
def in_its_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


@pytest.mark.parametrize(("world_size", "_", "said"), LAYOUTS, ids=lambda text: text[:3])
def test_a_layout_passes_the_dry_run(world_size: str, _: str, said: str) -> None:
    text = dry_run(load_config(PPOConfig, f"{world_size}.yaml", []), int(world_size)).text
    lines = [line.split() for line in text.splitlines()]
    wanted = re.sub(r"\n {8}", " ", said).splitlines()
    assert len(wanted) >= 5
    for line in wanted:
        assert line.split() in lines, line
    assert lines[-1] == ["what", "could", "be", "checked", "fits", world_size, "ranks"]


@pytest.mark.parametrize(("world_size", "row"), MEMORY, ids=lambda text: text[:3])
def test_a_layout_takes_the_memory_that_the_page_says_and_fits(world_size: str, row: str) -> None:
    config = load_config(PPOConfig, f"{world_size}.yaml", [])
    specs = {"actor": load_spec(config.actor.path, "lm")}
    taken = memory_rules.gigabytes(config, specs, int(world_size))
    owners = ("actor", "reference", "critic", "engine", "activations")
    together = sum(taken.values())
    wanted = [taken.get(owner) for owner in owners] + [together]
    said = [None if not cell.strip() else int(cell) for cell in row.split("|")]
    assert said == [None if number is None else round(number) for number in wanted]
    assert together + REST_GB < GPU_GB


def test_the_page_has_a_layout_that_is_shipped_nowhere() -> None:
    assert [world_size for world_size, _, _ in LAYOUTS] == ["512"]
    assert [world_size for world_size, _ in MEMORY] == ["512"]


def test_the_models_have_the_weights_that_the_page_computes_with(place: Path) -> None:
    billions = {}
    for name, config in MODELS.items():
        spec = load_spec(str(place / "models" / name), "lm")
        shapes = FAMILIES[config["model_type"]].tensor_shapes(spec)
        billions[name] = round(sum(math.prod(shape) for shape in shapes.values()) / 1e9)
        experts = [math.prod(shapes[key]) for key in shapes if ".experts." in key]
    assert billions == {"mixture-235b": 235}
    assert round(sum(experts) / 1e9) == 227
