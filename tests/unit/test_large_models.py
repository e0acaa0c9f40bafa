"""The largest open models on 8 machines of 8 GPUs: dry runs and plans, and how bytes are counted.

The layouts are those that `mrlhf plan` names first. Nothing is built.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mrlhf.commands.plan import main
from mrlhf.config import PPOConfig, load_config
from mrlhf.models.freezing import parameter_counts
from mrlhf.models.parameters import keeps_float32, role_pieces
from mrlhf.models.spec import Lora
from mrlhf.parallel.layout import ParallelLayout
from mrlhf.preflight import dry_run
from mrlhf.preflight.footprint import footprint
from mrlhf.preflight.model_bytes import training_bytes
from mrlhf.preflight.model_checks import cache_needs, check_models
from tests.shards import tiny_spec

GPU_GB = 80
REST_GB = 10  # of NCCL and CUDA
RUN = {
    "actor": {"path": "models/DeepSeek-V3", "ppo_mini_batch_size": 64},
    "rollout": {"n": 8},
    "algorithm": {"adv_estimator": "grpo"},
    "reward": {"terms": [{"name": "gsm8k"}]},
    "data": {
        "train_files": "train.jsonl",
        "train_batch_size": 128,
        "max_prompt_length": 1024,
        "max_response_length": 7168,
    },
    "trainer": {"total_epochs": 1, "output_dir": "run"},
}
# Parameters; bytes that one token, and the states of one sequence, take in all ranks' caches
# together; the layout of the actor, and the engine's ranks.
ADAPTED = "tp=8 ep=64 micro_batch_tokens=32768 recompute=full lora.rank=16"
MODELS = {
    "DeepSeek-V3": (671_026_419_200, 70_272, 0, ADAPTED, 32),
    "Kimi-K2.5": (1_026_408_232_448, 70_272, 0, ADAPTED, 64),
    "GLM-4.7-Flash": (29_943_393_920, 54_144, 0, "tp=4 ep=32 micro_batch_tokens=8192", 4),
    "GLM-5": (743_911_218_432, 109_824, 0, ADAPTED, 32),
    "DeepSeek-V3.2": (671_877_944_064, 85_888, 0, ADAPTED, 32),
    "Qwen3-Next-80B-A3B": (79_674_391_296, 24_576, 77_266_944, "tp=8 pp=8 ep=8", 8),
    "gpt-oss-120b": (116_829_156_672, 73_728, 0, "tp=8 ep=64", 8),
    "gemma-2-27b-it": (27_227_128_320, 376_832, 0, "tp=8 pp=4 micro_batch_tokens=8192", 8),
    "gemma-4-26B-A4B": (25_233_141_790, 225_280, 0, "tp=4 ep=32 micro_batch_tokens=8192", 2),
    "gemma-4-31B": (30_697_345_340, 901_120, 0, "tp=8 pp=4 micro_batch_tokens=8192", 4),
    "gemma-4-E2B": (4_628_569_379, 18_432, 0, "tp=2 micro_batch_tokens=8192", 1),
    "gemma-4-E4B": (7_463_013_418, 57_344, 0, "tp=2 micro_batch_tokens=8192", 2),
}


@pytest.fixture(autouse=True)
def in_its_directory(among_published: None) -> None:
    Path("run.yaml").write_text(yaml.safe_dump(RUN), encoding="utf-8")


@pytest.mark.parametrize("name", MODELS)
def test_a_dry_run_of_64_gpus_passes_and_fits(name: str) -> None:
    parameters, token_bytes, state_bytes, layout, engine = MODELS[name]
    keys = [f"actor.path=models/{name}", f"rollout.tp={engine}", "distributed.device=cuda"]
    keys += [f"actor.{key}" for key in layout.split()]
    keys += ["actor.sequence_parallel=true"]
    config = load_config(PPOConfig, "run.yaml", keys)
    text = dry_run(config, 64).text
    assert text.endswith("what could be checked fits 64 ranks")
    assert "no GPU has so much" not in text

    specs = {role: spec for role, spec in check_models(config).items() if spec is not None}
    spec = specs["actor"]
    assert parameter_counts(replace(spec, lora=None))[1] == parameters
    shape = cache_needs(config, spec).shape
    split = 1 if spec.latent is not None else min(engine, spec.num_kv_heads)
    assert split * (shape.token_bytes - shape.record_bytes) == token_bytes
    assert engine * shape.state_bytes == state_bytes
    taken = footprint(config, specs, 64)
    assert taken.total(taken.peak) / 1e9 < GPU_GB - REST_GB


def test_a_dry_run_says_that_no_gpu_has_so_much() -> None:
    found = dry_run(load_config(PPOConfig, "run.yaml", ["distributed.device=cuda"]), 64).text
    assert "update of actor 4.82 TB" in found
    assert "no GPU has so much; mrlhf plan --gpus 64 finds layouts that may fit" in found


def test_a_plan_takes_engines_over_machines_and_says_how_many_gpus_would_do(
    capsys: pytest.CaptureFixture,
) -> None:
    assert main(["--config", "run.yaml", "--gpus", "64"]) == 1
    said = capsys.readouterr().out
    nearest = re.findall(r"^  tp 8, .*rollout.tp (\d+), .*: .* lacks \d+ GB", said, re.MULTILINE)
    assert nearest and min(map(int, nearest)) > 8
    last = said.splitlines()[-1]
    assert last.startswith("128 GPUs would do (tp 8, ")
    assert last.endswith("; adapters (actor.lora.rank) or shorter sequences need less memory")


LORA = Lora(rank=2, alpha=4.0, ranks=((r"layers\.1\..*", 3),))


FEW_WEIGHTS = [
    *("llama", "llama_tied", "qwen2", "phi3", "olmo2", "seed_oss", "gemma4_text"),
    *("qwen3_moe", "mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "deepseek_v3", "qwen3_next"),
    *("gemma4_moe", "glm_moe_dsa"),
]


@pytest.mark.parametrize("model", FEW_WEIGHTS)
@pytest.mark.parametrize("lora", [None, LORA])
def test_each_kind_of_layer_is_counted_as_often_as_a_rank_has_it(
    model: str, lora: Lora | None
) -> None:
    spec = replace(tiny_spec(model), lora=lora)
    layout = ParallelLayout(pp=4, ep=1 if spec.experts is None else 2, dp=2)
    for stage in range(4):
        weights = 0
        for piece in role_pieces(spec, layout, layout.rank_at(pp=stage)):
            count = math.prod(piece.shape(piece.start, piece.stop))
            weights += count * (4 if keeps_float32(piece.parameter) else 2)
        assert training_bytes(spec, layout, 2, True, stage=stage).weights == weights
