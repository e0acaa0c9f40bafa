"""Sums of two numbers of two digits, asked in words, and the reward of an answer to one.

Usage: python configs/recipes/english/sums.py --out runs/sums/data
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from mrlhf.commands.endings import end_command
from mrlhf.data.rows import write_rows
from mrlhf.rewards.rules import gsm8k_flexible

# The model writes a short answer after this; its own system message is longer and helps no sum.
SYSTEM = "You add numbers."
PHRASINGS = (
    "What is {} plus {}? Answer with the number only.",
    "What is the sum of {} and {}? Answer with the number only.",
    "Add {} and {}. Answer with the number only.",
    "How much is {} + {}? Answer with the number only.",
)
HELD_OUT = 256
PLACES = 0.5  # most that a wrong answer earns

_NUMBER = re.compile(r"\s*(\d{1,3})\s*")


def write_sums(out: Path, seed: int = 0) -> dict[str, int]:
    """Write train.jsonl and held_out.jsonl; returns rows by file name.

    No two numbers of a held-out sum are in a training sum together, in either order.
    """
    rng = random.Random(seed)
    pairs = list(combinations_with_replacement(range(10, 100), 2))
    rng.shuffle(pairs)
    held_out = [_in_some_order(pair, rng) for pair in pairs[:HELD_OUT]]
    train = [order for pair in pairs[HELD_OUT:] for order in {pair, pair[::-1]}]
    rng.shuffle(train)

    out.mkdir(parents=True, exist_ok=True)
    tables = {"train": train, "held_out": held_out}
    return {
        f"{name}.jsonl": write_rows(out / f"{name}.jsonl", [_row(pair, rng) for pair in pairs])
        for name, pairs in tables.items()
    }


def reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """1 for the sum alone, else half of the share of places that are right, units with units.

    An answer with other words or numbers beside the sum earns nothing, nor does a number longer
    than a sum can be. `acc` is the accuracy that is reported: the last number is the sum.
    """
    right = gsm8k_flexible(data_source, solution_str, ground_truth, extra_info)
    number = _NUMBER.fullmatch(solution_str)
    if number is None:
        return {"score": 0.0, "acc": right}
    if number[1] == ground_truth:
        return {"score": 1.0, "acc": right}

    places = zip(reversed(number[1]), reversed(ground_truth), strict=False)
    same = sum(digit == wanted for digit, wanted in places)
    length = max(len(number[1]), len(ground_truth))
    return {"score": PLACES * same / length, "acc": right}


def _in_some_order(pair: tuple[int, int], rng: random.Random) -> tuple[int, int]:
    return pair if rng.random() < 0.5 else (pair[1], pair[0])


def _row(pair: tuple[int, int], rng: random.Random) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": rng.choice(PHRASINGS).format(*pair)},
    ]
    return {"prompt": messages, "answer": str(sum(pair)), "data_source": "sums"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the data; 0 when done, 2 where it cannot be written."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/sums/data"))
    out = parser.parse_args(arguments).out

    def write() -> int:
        for name, count in write_sums(out).items():
            print(f"{out / name}: {count} rows")
        return 0

    return end_command(write, out)


if __name__ == "__main__":
    sys.exit(main())
