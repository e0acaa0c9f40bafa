"""Makes the data of the game, a tokenizer with a chat template, and examples of play.

The examples guess any number that the answers leave possible, so a policy that imitates them knows
the rules and not how to play well.

Usage: python configs/recipes/turns/prepare.py --out runs/turns/data
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from guess import MOST, TURNS, GuessTheNumber
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EXAMPLES = 3000
PROMPT = f"Guess my number from 1 to {MOST}."
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")
TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# What the run shows to the policy; see the method `guess`.
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
VOCABULARY = 160


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/turns/data"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)

    rng = random.Random(1)
    examples = [row for _ in range(EXAMPLES) for row in play(rng)]
    _write(out / "sft.jsonl", examples)
    secrets = list(range(1, MOST + 1))
    rows = [{"prompt": [_user(PROMPT)], "answer": str(secret)} for secret in secrets]
    _write(out / "train.jsonl", rows)
    _write(out / "validation.jsonl", rows)
    _write_tokenizer(out / "tokenizer", examples)


def play(rng: random.Random) -> list[dict[str, Any]]:
    """One game by a player who guesses any number that is possible; a row for each turn."""
    game = GuessTheNumber()
    game.reset({"answer": rng.randint(1, MOST)})
    low, high = 1, MOST
    messages: list[dict[str, Any]] = [_user(PROMPT)]
    rows = []
    while not game.done and game.turns < TURNS:
        number = rng.randint(low, high)
        call = json.dumps({"name": "guess", "arguments": {"number": number}})
        rows.append({"prompt": list(messages), "tools": TOOLS, "response": call})
        answer = game.guess(number)
        low = number + 1 if answer == "higher" else low
        high = number - 1 if answer == "lower" else high
        messages.append({"role": "assistant", "content": call})
        messages.append({"role": "tool", "name": "guess", "content": answer})
    return rows


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_tokenizer(directory: Path, examples: list[dict[str, Any]]) -> None:
    """Byte-pair encoding of what is said in the examples."""
    texts = [row["response"] for row in examples]
    texts += [message["content"] for row in examples[:200] for message in row["prompt"]]
    tokenizer = Tokenizer(models.BPE())
    # Numbers are made of digits, so that a number that was never seen can be written.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(directory)


if __name__ == "__main__":
    main()
