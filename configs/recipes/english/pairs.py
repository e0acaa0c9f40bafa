"""Has the labeller choose between answers of the model, for the reward model and for fine-tuning.

Usage: python configs/recipes/english/pairs.py --out runs/english/data

It reads `answers_train.jsonl` and `answers_held_out.jsonl` in OUT, several answers to each prompt
with the labeller's score as `mrlhf generate` writes them, and has the noisy labeller choose
between two answers at a time. `pairs_train.jsonl` has the best and the worst answer to each prompt
by these choices; `pairs_held_out.jsonl` has answers as they were drawn, with one choice each.
Answers that were cut off are in no pair: that is easily told, and a reward model would learn little
else. `best.jsonl` has the best answer to each training prompt. `labels.json` tells how often a
labeller without noise agrees with these pairs, which is the most that a reward model can reach.
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


def neighbours(answers: Sequence[Row], draw: random.Random) -> list[dict[str, Any]]:
    """Each answer with the next one, as the labeller chooses; equal answers are no pair."""
    found = zip(answers[::2], answers[1::2], strict=False)
    return [pair for two in found for pair in _pair(*_choice(*two, draw))]


def extremes(answers: Sequence[Row], draw: random.Random) -> list[dict[str, Any]]:
    """The answer that is still chosen after all choices, with the one that is always rejected.

    Such a pair differs more than two answers do, and so teaches more.
    """
    if len(answers) < 2:
        return []
    best = worst = answers[0]
    for answer in answers[1:]:
        best, _ = _choice(best, answer, draw)
        _, worst = _choice(worst, answer, draw)
    return _pair(best, worst)


def _choice(first: Row, second: Row, draw: random.Random) -> tuple[Row, Row]:
    """The answer that the labeller chooses, and the other one."""
    is_first = labeller.chooses_first(first["reward"], second["reward"], draw)
    return (first, second) if is_first else (second, first)


def _pair(chosen: Row, rejected: Row) -> list[dict[str, Any]]:
    """A row for `mrlhf train-rm`; none if both say the same."""
    if chosen["response"].strip() == rejected["response"].strip():
        return []
    return [
        {
            "prompt": chosen["prompt"],
            "chosen": chosen["response"],
            "rejected": rejected["response"],
            "margin": round(chosen["reward"] - rejected["reward"], 4),
        }
    ]


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
    for split, draw_pairs in (("train", extremes), ("held_out", neighbours)):
        prompts = answers_of(out / f"answers_{split}.jsonl")
        ended = [[row for row in answers if row["finish_reason"] == "stop"] for answers in prompts]
        pairs = [pair for answers in ended for pair in draw_pairs(answers, draw)]
        _write(out / f"pairs_{split}.jsonl", pairs)
        found[f"{split}_pairs"] = len(pairs)
        found[f"{split}_limit"] = round(limit(pairs), 4)
        if split == "train":
            _write(out / "best.jsonl", [best_of(answers) for answers in ended if answers])

    (out / "labels.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(" ".join(f"{name} {value:g}" for name, value in found.items()))


def _write(file: Path, rows: Sequence[Row]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
