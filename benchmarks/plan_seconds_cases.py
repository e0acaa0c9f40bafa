"""The runs of `plan_seconds.py`: models, data and configurations of twelve small real runs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from model_sizes import model_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from train_step_case import EOS, FIRST_WORD, PAD, lengths_of
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

STEPS = 4  # of a run; the first does not count
MIXTURE = "mixture"


@dataclass(frozen=True)
class Case:
    """One run."""

    program: str  # "sft", "rm", "dpo" or "ppo"
    model: str  # its size
    ranks: int
    prompt: int  # tokens in the mean; lengths are spread
    response: int
    batch: int  # rows, pairs or prompts of a step
    layout: dict[str, Any] = field(default_factory=dict)  # keys of the trained model
    critic: bool = False  # PPO with a critic and a reward model, else GRPO with a rule
    n: int = 1  # responses of a prompt
    is_kept_out: bool = False  # when the shares in mrlhf/planning/gpus.py were chosen

    @property
    def name(self) -> str:
        """In words."""
        method = self.program
        if method == "ppo" and not self.critic:
            method = "grpo"
        keys = [f"{key} {value}" for key, value in self.layout.items() if key != "recompute"]
        if self.ranks == 2 and not keys:
            keys = ["dp 2"]
        if self.layout.get("recompute") == "full":
            keys.append("recompute")
        layout = ", ".join(keys) or "1 rank"
        return f"{method} {self.model}, {layout}, {self.prompt} + {self.response}"


FULL = {"recompute": "full"}
CASES = (
    Case("sft", "3M", 1, 64, 192, 16),
    Case("sft", "26M", 1, 32, 96, 16, FULL),
    Case("sft", "60M", 2, 128, 384, 4, {"tp": 2}, is_kept_out=True),
    Case("sft", "26M", 2, 64, 128, 16, {"pp": 2}),
    Case("rm", "26M", 2, 32, 96, 8),
    Case("dpo", "3M", 1, 128, 128, 8, is_kept_out=True),
    Case("ppo", "3M", 1, 32, 64, 16, critic=True),
    Case("ppo", "26M", 2, 32, 64, 16, {"tp": 2}, critic=True),
    Case("ppo", "26M", 2, 64, 64, 4, n=4, is_kept_out=True),
    Case("ppo", "2M", 1, 64, 512, 4, FULL, n=4),
    Case("ppo", "26M", 2, 256, 64, 4, {"pp": 2} | FULL, n=4),
    Case("ppo", MIXTURE, 1, 32, 128, 4, n=4),
)


SIZES = sorted({case.model for case in CASES})


def write_models(directory: Path) -> None:
    """Write the models of all cases, and a tokenizer of one token a word beside each."""
    for size in SIZES:
        config = _config_of(size)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / size)
        _write_tokenizer(directory / size, config.vocab_size)
        if any(case.critic and case.model == size for case in CASES):
            config.num_labels = 1
            LlamaForSequenceClassification(config).save_pretrained(directory / f"{size}-scalar")


def write_shapes(directory: Path) -> None:
    """Write the `config.json` of all models alone."""
    for size in SIZES:
        for name in (size, f"{size}-scalar"):
            _config_of(size).save_pretrained(directory / name)


def _config_of(size: str) -> PretrainedConfig:
    """The configuration of a model, with the special tokens of its tokenizer."""
    config = _shape_of(size)
    config.eos_token_id = EOS
    config.bos_token_id = None
    config.pad_token_id = PAD
    return config


def _shape_of(size: str) -> PretrainedConfig:
    if size == MIXTURE:
        return Qwen3MoeConfig(
            vocab_size=4096,
            hidden_size=192,
            intermediate_size=512,
            moe_intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=24,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
        )
    if size == "2M":
        return LlamaConfig(
            vocab_size=2048,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
        )
    if size == "60M":
        return LlamaConfig(
            vocab_size=12288,
            hidden_size=640,
            intermediate_size=1728,
            num_hidden_layers=9,
            num_attention_heads=10,
            num_key_value_heads=10,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
        )
    return model_config(size)


def _write_tokenizer(directory: Path, vocab: int) -> None:
    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2}
    words |= {f"w{token}": token for token in range(FIRST_WORD, vocab)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)


def write_case(case: Case, models: Path, directory: Path) -> dict[str, Any]:
    """Write the data of a case to a directory; returns its configuration."""
    rows = case.batch * STEPS
    lines = "\n".join(
        json.dumps(row) for row in _rows(case, rows, _shape_of(case.model).vocab_size)
    )
    data = directory / "train.jsonl"
    data.write_text(lines + "\n", encoding="utf-8")

    most = 2 * (case.prompt + case.response)
    model = {"path": str(models / case.model), "micro_batch_tokens": 2048, **case.layout}
    trainer = {"total_steps": STEPS, "output_dir": str(directory / "run"), "save_freq": 0}
    tokenizer = str(models / case.model)
    shared = {"train_files": str(data), "tokenizer": tokenizer, "shuffle": False}
    if case.program != "ppo":
        sizes = {"batch_size": case.batch, "max_length": most}
        return {"model": model, "data": shared | sizes, "trainer": trainer}

    trained = {"ppo_mini_batch_size": case.batch // 2}
    config: dict[str, Any] = {
        "actor": model | trained,
        "rollout": {"n": case.n, "kv_cache_mb": 512},
        "data": {
            **shared,
            "train_batch_size": case.batch,
            "max_prompt_length": 2 * case.prompt,
            "max_response_length": case.response,
        },
        "reward": {"terms": [{"name": "exact_match"}]},
        "trainer": trainer,
    }
    if case.critic:
        scalar = model | {"path": str(models / f"{case.model}-scalar")}
        config["critic"] = scalar | trained
        config["reward_model"] = scalar
        config["reward"] = {"terms": [{"name": "reward_model"}]}
        config["algorithm"] = {"use_kl_in_reward": True}
    else:
        config["algorithm"] = {"adv_estimator": "grpo"}
        config["actor"]["use_kl_loss"] = True
    return config


def _rows(case: Case, count: int, vocab: int) -> Iterator[dict[str, str]]:
    """Rows of data; each batch has the same lengths."""
    draw = random.Random(1)
    batch = case.batch
    prompts = lengths_of("spread", batch, case.prompt, seed=2)
    # One token more ends a response of the data.
    responses = lengths_of("spread", 2 * batch, case.response - 1, seed=3)
    for number in range(count):
        place = number % batch
        row = {"prompt": _words(draw, prompts[place], vocab)}
        first, second = (_words(draw, responses[place + more], vocab) for more in (0, batch))
        if case.program == "sft":
            row["response"] = first
        elif case.program == "ppo":
            row["answer"] = "w3"
        else:
            row |= {"chosen": first, "rejected": second}
        yield row


def _words(draw: random.Random, count: int, vocab: int) -> str:
    return " ".join(f"w{draw.randrange(FIRST_WORD, vocab)}" for _ in range(count))
