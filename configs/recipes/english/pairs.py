"""Has the labeller choose between answers of the model, for the reward model and for fine-tuning.

Usage: python configs/recipes/english/pairs.py --out runs/english/data

It reads `answers_train.jsonl` and `answers_held_out.jsonl` in OUT, several answers to each prompt
with the labeller's score as `mrlhf generate` writes them. The answers to a prompt are paired with
their neighbours. The noisy labeller chooses in each pair: `pairs_train.jsonl`,
`pairs_held_out.jsonl`. `best.jsonl` has the best answer to each training prompt. `labels.json`
tells how often a labeller without noise agrees with these choices, which is the most that a reward
model can reach.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import labeller

SEED = 1
Row = Mapping[str, Any]


def answers_of(file: Path) -> list[list[Row]]:
    """The answers of a file, those to one prompt together."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [list(answers) for _, answers in groupby(rows, key=lambda row: row["uid"])]


def pairs_of(answers: Sequence[Row], draw: random.Random) -> list[dict[str, Any]]:
    """Pairs of different answers to a prompt, each with the next one, as the labeller chooses."""
    pairs = []
    for first, second in zip(answers[::2], answers[1::2], strict=False):
        if first["response"].strip() == second["response"].strip():
            continue
        is_first = labeller.chooses_first(first["reward"], second["reward"], draw)
        chosen, rejected = (first, second) if is_first else (second, first)
        pairs.append(
            {
                "prompt": chosen["prompt"],
                "chosen": chosen["response"],
                "rejected": rejected["response"],
                "margin": round(chosen["reward"] - rejected["reward"], 4),
            }
        )
    return pairs


def limit(pairs: Sequence[Row]) -> float:
    """The share of the pairs in which the better answer, by the score, was chosen."""
    return sum(pair["margin"] > 0 for pair in pairs) / len(pairs)


def best_of(answers: Sequence[Row]) -> dict[str, Any]:
    """The best of the answers to a prompt."""
    best = max(answers, key=lambda row: row["reward"])
    return {"prompt": best["prompt"], "response": best["response"]}


def main() -> None:
    """Write the pairs of both splits, the best answers, and the labeller's limit."""
    parser = argparse.ArgumentParser(description="Draw the labeller's choices.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    out: Path = parser.parse_args().out
    draw = random.Random(SEED)
    found: dict[str, float] = {}
    for split in ("train", "held_out"):
        prompts = answers_of(out / f"answers_{split}.jsonl")
        pairs = [pair for answers in prompts for pair in pairs_of(answers, draw)]
        _write(out / f"pairs_{split}.jsonl", pairs)
        found[f"{split}_pairs"] = len(pairs)
        found[f"{split}_limit"] = round(limit(pairs), 4)
        if split == "train":
            _write(out / "best.jsonl", [best_of(answers) for answers in prompts])

    (out / "labels.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(" ".join(f"{name} {value:g}" for name, value in found.items()))


def _write(file: Path, rows: Sequence[Row]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
