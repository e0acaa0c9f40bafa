"""Makes the data of the four tasks, a tokenizer with a chat template, and examples of each task.

The examples are what a policy begins with, and leave something to learn: they guess any number that
is still possible, call the calculator only sometimes, do not always sort, and take any number of
sticks.

Usage: python configs/recipes/turns/prepare.py --out runs/turns/data
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import alphabet
import guess
import sticks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Row = dict[str, Any]
Player = Callable[[random.Random], list[Row]]

EXAMPLES = 3000  # episodes of each task
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")
TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCABULARY = 160

GUESS_PROMPT = f"Guess my number from 1 to {guess.MOST}."
CALLS = 0.3  # share of the sums for which the examples call the calculator
SORTED = 0.5  # share of the lists that the examples sort
NAMES = (
    *("ada", "ben", "cy", "dan", "eve", "flo", "gus", "hal", "ida", "jo"),
    *("kim", "lou", "max", "ned", "ola", "pam", "rex", "sue", "tom", "val"),
)
NAMES_A_TURN = 2
TRAIN_ROWS = 2000
VALIDATION_ROWS = 128


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/turns/data"))
    out = parser.parse_args().out

    secrets = [guess_row(secret) for secret in range(1, guess.MOST + 1)]
    examples = _write_task(out / "guess", play_guess, secrets, secrets)
    examples += _write_task(out / "calculator", play_sum, *_drawn(sum_row))
    examples += _write_task(out / "alphabet", play_names, *_drawn(names_row))
    examples += _write_task(out / "sticks", play_sticks, *sticks_rows())
    _write_tokenizer(out / "tokenizer", examples)


def guess_row(secret: int) -> Row:
    """A row of the game."""
    return {"prompt": [_message("user", GUESS_PROMPT)], "answer": str(secret)}


def play_guess(rng: random.Random) -> list[Row]:
    """One game by a player who guesses any number that is possible; a row for each turn."""
    game = guess.GuessTheNumber()
    game.reset({"answer": rng.randint(1, guess.MOST)})
    low, high = 1, guess.MOST
    messages = [_message("user", GUESS_PROMPT)]
    rows = []
    while not game.done and game.turns < guess.TURNS:
        number = rng.randint(low, high)
        call = _call("guess", number=number)
        rows.append({"prompt": list(messages), "tools": _tools("guess"), "response": call})
        answer = game.guess(number)
        low = number + 1 if answer == "higher" else low
        high = number - 1 if answer == "lower" else high
        messages += [_message("assistant", call), _message("tool", answer)]
    return rows


def sum_row(rng: random.Random) -> Row:
    """A sum of two numbers of four digits."""
    left = rng.randint(1000, 9999)
    right = rng.randint(1000, 9999)
    return {"prompt": [_message("user", f"{left}+{right}")], "answer": str(left + right)}


def play_sum(rng: random.Random) -> list[Row]:
    """A sum that is answered at once, or with the calculator's help; a row for each turn."""
    row = sum_row(rng)
    messages = row["prompt"]
    tools = _tools("calculator")
    rows = []
    if rng.random() < CALLS:
        call = _call("calculator", expression=messages[0]["content"])
        rows.append({"prompt": messages, "tools": tools, "response": call})
        messages = [*messages, _message("assistant", call), _message("tool", row["answer"])]
    rows.append({"prompt": messages, "tools": tools, "response": row["answer"]})
    return rows


def names_row(rng: random.Random) -> Row:
    """Names for each turn, no name twice."""
    names = rng.sample(NAMES, NAMES_A_TURN * alphabet.TURNS)
    turns = [names[begin : begin + NAMES_A_TURN] for begin in range(0, len(names), NAMES_A_TURN)]
    return {"prompt": [_message("user", alphabet.listed(turns[0]))], "names": turns}


def play_names(rng: random.Random) -> list[Row]:
    """Lists by a player who may add the new names at the end; a row for each turn."""
    game = alphabet.AlphabetSort()
    row = names_row(rng)
    game.reset(row)
    messages = row["prompt"]
    answer: list[str] = []
    rows = []
    for names in row["names"]:
        answer = sorted(game.given) if rng.random() < SORTED else answer + names
        text = alphabet.listed(answer)
        rows.append({"prompt": messages, "response": text})
        more = game.reply(text)
        if more is not None:
            messages = [*messages, _message("assistant", text), _message("user", more)]
    return rows


def sticks_rows() -> tuple[list[Row], list[Row]]:
    """Games of the policy with itself, and those with the best player that it can win.

    The games with itself begin with the most sticks, as they come to all others. With three or
    fewer, one move wins, so the validation has none of these.
    """
    games = [
        {"prompt": [_message("user", str(number))], "sticks": number}
        for number in range(sticks.AT_ONCE + 1, sticks.MOST + 1)
    ]
    beatable = [game for game in games if game["sticks"] % (sticks.AT_ONCE + 1)]
    return games[-sticks.AT_ONCE - 1 :], [game | {"opponent": "best"} for game in beatable]


def play_sticks(rng: random.Random) -> list[Row]:
    """One game of two players who take any number that the rules allow; a row for each turn."""
    left = rng.randint(1, sticks.MOST)
    seen: tuple[list[Row], list[Row]] = ([], [])  # what the player whose turn it is has seen, first
    rows = []
    while left:
        mine, others = seen
        move = str(rng.randint(1, min(sticks.AT_ONCE, left)))
        asked = [*mine, _message("user", str(left))]
        rows.append({"prompt": asked, "response": move})
        left -= int(move)
        seen = (others, [*asked, _message("assistant", move)])
    return rows


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _tools(name: str) -> list[Row]:
    """The part of a tool's schema that the chat template shows."""
    return [{"type": "function", "function": {"name": name}}]


def _call(tool: str, **arguments: Any) -> str:
    return json.dumps({"name": tool, "arguments": arguments})


def _drawn(draw: Callable[[random.Random], Row]) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and rows of other prompts for the validation."""
    rng = random.Random(2)
    validation = [draw(rng) for _ in range(VALIDATION_ROWS)]
    held_out = [row["prompt"] for row in validation]
    train = [draw(rng) for _ in range(TRAIN_ROWS)]
    return [row for row in train if row["prompt"] not in held_out], validation


def _write_task(
    directory: Path, play: Player, train: list[Row], validation: list[Row]
) -> list[Row]:
    """Write the files of a task; returns its examples."""
    rng = random.Random(1)
    examples = [row for _ in range(EXAMPLES) for row in play(rng)]
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "sft.jsonl", examples)
    _write(directory / "train.jsonl", train)
    _write(directory / "validation.jsonl", validation)
    return examples


def _write(file: Path, rows: list[Row]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_tokenizer(directory: Path, examples: list[Row]) -> None:
    """Byte-pair encoding of what is said in the examples."""
    texts = [row["response"] for row in examples]
    texts += [message["content"] for row in examples for message in row["prompt"]]
    tokenizer = Tokenizer(models.BPE())
    # Numbers are made of digits, so that a number that was never seen can be written; lists are
    # made of names for the same reason.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split("\n", "isolated"),
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
