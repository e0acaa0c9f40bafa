"""What `parallel_overhead.py` measures: two models, a batch, and the layouts on so many ranks."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, Qwen3MoeConfig

PROMPT = 32  # tokens of each prompt


@dataclass(frozen=True)
class Case:
    """The work of one update, the same on every layout."""

    hidden: int = 192  # size of the hidden states; both models have as many weights for a token
    sequences: int = 16  # of the batch, which is one mini-batch
    length: int = 128  # tokens of each sequence
    micro_batch_tokens: int = 256  # of each rank
    layers: int = 8  # of both models


QUICK = Case(hidden=32, sequences=4, length=48, micro_batch_tokens=96, layers=4)


@dataclass(frozen=True)
class Layout:
    """One layout."""

    model: str  # "dense" or "mixture"
    axes: str  # the axes that take all ranks, in words
    keys: dict[str, Any]  # of the model's section


def layouts(ranks: int, case: Case) -> list[Layout]:
    """The layouts that are measured on so many ranks."""
    if ranks == 1:
        return [Layout("dense", "one rank", {}), Layout("mixture", "one rank", {})]

    # Each of cp ranks holds its part of a pack.
    cp = {"cp": ranks, "micro_batch_tokens": ranks * case.micro_batch_tokens}
    dense: dict[str, dict[str, Any]] = {
        "dp": {},
        "tp": {"tp": ranks},
        "tp, sequence parallel": {"tp": ranks, "sequence_parallel": True},
        "cp": cp,
        "pp": {"pp": ranks},
        "pp, vpp 2": {"pp": ranks, "vpp": 2},
    }
    mixture: dict[str, dict[str, Any]] = {
        "dp": {},
        "ep": {"ep": ranks},
        "tp, ep": {"tp": ranks, "ep": ranks},
        "tp, etp": {"tp": ranks, "etp": ranks},
    }
    return [
        *(Layout("dense", axes, keys) for axes, keys in dense.items()),
        *(Layout("mixture", axes, keys) for axes, keys in mixture.items()),
    ]


def token_ids(case: Case, vocab: int) -> list[list[int]]:
    """The batch."""
    draw = random.Random(1)
    return [[draw.randrange(vocab) for _ in range(case.length)] for _ in range(case.sequences)]


def write_case(case: Case, directory: Path) -> None:
    """Write the case, and the `config.json` of both models."""
    (directory / "case.json").write_text(json.dumps(asdict(case)))
    sizes: dict[str, Any] = {
        "vocab_size": 4096,
        "hidden_size": case.hidden,
        "num_hidden_layers": case.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": case.hidden // 8,
        "max_position_embeddings": case.length,
        "tie_word_embeddings": False,
    }
    width = 8 * case.hidden // 3 // 16 * 16

    LlamaConfig(**sizes, intermediate_size=width).save_pretrained(directory / "dense")
    # Two experts of a token together are as wide as the dense model.
    mixture = Qwen3MoeConfig(
        **sizes,
        intermediate_size=width,
        moe_intermediate_size=width // 2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    mixture.save_pretrained(directory / "mixture")


def read_case(directory: Path) -> Case:
    """What `write_case` wrote."""
    return Case(**json.loads((directory / "case.json").read_text()))
