"""The shipped configurations for GPUs fit their ranks, and each rank's models fit 80 GB."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from mrlhf.config import PPOConfig, load_config
from mrlhf.preflight import dry_run
from tests.pages import ROOT

FILES = sorted((ROOT / "configs" / "gpu").glob("*.yaml"))
GPU_BYTES = 80e9
ROOM_BYTES = 20e9  # for activations, the KV cache and NCCL


def _llama(**sizes: Any) -> LlamaConfig:
    return LlamaConfig(num_key_value_heads=8, vocab_size=128256, **sizes)


_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
# The shapes of the models, as their config.json states them.
SHAPES: dict[str, PretrainedConfig] = {
    "Qwen3-8B": Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    ),
    "Llama-3.1-70B-Instruct": _llama(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
    ),
    "Llama-3.1-8B-Instruct": _llama(
        **_8B,
        intermediate_size=14336,
        max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
    ),
    "reward-8b": _llama(
        **_8B,
        intermediate_size=14336,
        max_position_embeddings=131072,
        num_labels=1,
        architectures=["LlamaForSequenceClassification"],
    ),
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_fits_its_gpus(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = file.read_text(encoding="utf-8")
    for name in re.findall(r"models/([\w.-]+)", text):
        SHAPES[name].save_pretrained(tmp_path / "models" / name)
    ranks = int(re.search(r"_(\d+)gpu$", file.stem)[1])  # type: ignore[index]

    config = load_config(PPOConfig, file, ["distributed.device=cuda"])
    found = dry_run(config, ranks)
    assert found.text.endswith(f"fits {ranks} rank{'s' if ranks > 1 else ''}")
    assert all("data" in line or "data.tokenizer" in line for line in found.missing)

    needed = 0.0
    for line in found.text.splitlines():
        if line.startswith("memory of "):
            needed += sum(float(number) for number in re.findall(r"([\d.]+) MB", line)) * 1e6
    assert 0 < needed < GPU_BYTES - ROOM_BYTES


def test_each_names_what_it_is_for() -> None:
    assert len(FILES) == 4
    for file in FILES:
        assert file.read_text(encoding="utf-8").startswith("# ")
        assert yaml.safe_load(file.read_text(encoding="utf-8"))["trainer"]["output_dir"]
