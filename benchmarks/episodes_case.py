"""What `episodes.py` measures: the prompts, a tokenizer, and a policy that can play the game.

Every contender reads the same directory. The policy is a small Llama that has imitated players who
know the rules; otherwise it would call no tool. This file knows no contender.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from episodes_game import TURNS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
MOST = 32
SAMPLES = 4  # of each prompt
MAX_RESPONSE = 288  # tokens of an episode behind its prompt: nine turns with answers fit
LEARNING_RATE = 3e-4
EXAMPLES = 3000
PROMPT = f"Guess my number from 1 to {MOST}."
SPECIAL = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")
# Calls stand in `content` in the examples, and in `tool_calls` where TRL renders a conversation.
TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "guess",
            "description": "Guess the secret number.",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
        },
    }
]


def write_case(directory: Path, sft_steps: int) -> None:
    """Make the directory, unless it exists: a minute or two for the start policy."""
    if (directory / "ready").is_file():
        return
    directory.mkdir(parents=True, exist_ok=True)

    rng = random.Random(1)
    examples = [row for _ in range(EXAMPLES) for row in _play(rng)]
    _write(directory / "sft.jsonl", examples)
    _write_tokenizer(directory / "tokenizer", examples)
    _write_model(directory / "random", len(SPECIAL) + 256 + 40)
    _train(directory, sft_steps)
    (directory / "ready").touch()


def write_prompts(directory: Path, prompts: int, seconds: float) -> Path:
    """The prompts with a tool that takes so many seconds, as a file of rows."""
    file = directory / f"prompts-{prompts}-{seconds:g}.jsonl"
    secrets = [number % MOST + 1 for number in range(prompts)]
    row: dict[str, Any] = {"prompt": [_user(PROMPT)], "seconds": seconds}
    _write(file, [{**row, "answer": str(secret)} for secret in secrets])
    return file


def _play(rng: random.Random) -> list[dict[str, Any]]:
    """One game by a player who guesses any number that is possible; a row for each turn."""
    secret = rng.randint(1, MOST)
    low, high = 1, MOST
    messages = [_user(PROMPT)]
    rows = []
    for _ in range(TURNS):
        number = rng.randint(low, high)
        call = json.dumps({"name": "guess", "arguments": {"number": number}})
        response = f"<tool_call>{call}</tool_call>"
        rows.append({"prompt": list(messages), "tools": TOOLS, "response": response})
        said = "right" if number == secret else "higher" if number < secret else "lower"
        messages.append({"role": "assistant", "content": response})
        messages.append({"role": "tool", "content": said})
        if number == secret:
            rows.append({"prompt": list(messages), "tools": TOOLS, "response": "found"})
            break
        low = number + 1 if number < secret else low
        high = number - 1 if number > secret else high
    return rows


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_tokenizer(directory: Path, examples: list[dict[str, Any]]) -> None:
    """Byte-pair encoding in which a turn has about 20 tokens, as words and signs stay apart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + 256 + 40,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [row["response"] for row in examples]
    texts += [message["content"] for row in examples[:200] for message in row["prompt"]]
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=TEMPLATE,
    ).save_pretrained(directory)


def _write_model(directory: Path, vocab_size: int) -> None:
    """The configuration of a Llama of 0.3 million parameters."""
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    ).save_pretrained(directory)


def _train(directory: Path, steps: int) -> None:
    """Supervised fine-tuning into `policy`."""
    config = {
        "seed": 1,
        "model": {"path": str(directory / "random"), "init": "random"},
        "optim": {
            "lr": 3e-3,
            "lr_warmup_steps": min(30, steps // 2),
            "lr_decay_style": "cosine",
            "min_lr_ratio": 0.02,
            "weight_decay": 0.0,
            "adam_beta2": 0.95,
        },
        "data": {
            "train_files": str(directory / "sft.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "batch_size": 64,
            "max_length": 384,
        },
        "trainer": {"total_steps": steps, "output_dir": str(directory / "sft"), "overwrite": True},
    }
    file = directory / "sft.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "launch" / "train_sft.py"), "--config", str(file)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    shutil.copytree(directory / "sft" / "model", directory / "policy", dirs_exist_ok=True)
