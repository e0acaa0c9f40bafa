"""Gathers the figures of the recipe's runs, and writes PPO's report and some answers as a page.

Usage: python configs/recipes/english/summary.py --out runs/english --seconds N [--sums DIR]

It writes `summary.json`, `report.html`, and `answers.md`, twelve held-out prompts with the answers
before and after PPO. All figures of held-out answers are of greedy answers, one to each prompt;
those whose names end in `_sampled` are of answers that are drawn at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHOWN = 12
BEGIN, END = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def read(file: Path) -> dict[str, Any]:
    """The object in a file of JSON; empty if there is none."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def answers(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The held-out answers of a run before its first step and after its last one."""
    first, *_, last = sorted((run / "validation").glob("step_*.jsonl"))
    return rows_of(first), rows_of(last)


def distinct(texts: Sequence[str], n: int) -> float:
    """The share of different runs of n words among all of them."""
    runs = []
    for text in texts:
        words = text.lower().split()
        runs += [tuple(words[at : at + n]) for at in range(len(words) - n + 1)]
    return len(set(runs)) / max(1, len(runs))


def of_answers(rows: Sequence[Mapping[str, Any]], when: str) -> dict[str, float]:
    """Length, variety, form and tone of answers, by names that end in `when`."""
    texts = [row["response"] for row in rows]
    figures = {
        "words": sum(len(text.split()) for text in texts) / len(texts),
        "distinct_1": distinct(texts, 1),
        "distinct_2": distinct(texts, 2),
        "ended": sum(row["stopped"] for row in rows) / len(rows),
    }
    for part in ("tone", "form"):
        scores = [
            value for row in rows for name, value in row["terms"].items() if name.endswith(part)
        ]
        figures[part] = sum(scores) / len(scores)
    return {f"{name}_{when}": round(value, 4) for name, value in figures.items()}


def gather(out: Path, sums: Path | None, seconds: float) -> dict[str, Any]:
    """All figures of the recipe."""
    ppo = read(out / "ppo" / "summary.json")
    grpo = read(out / "grpo" / "summary.json")
    labels = read(out / "data" / "labels.json")
    last = [row for row in rows_of(out / "rm" / "metrics.jsonl") if "val/accuracy" in row][-1]

    summary: dict[str, Any] = {
        "labeller_start": ppo["start_accuracy"],
        "labeller_final": ppo["final_accuracy"],
        "labeller_start_sampled": ppo["start_sampled_accuracy"],
        "labeller_final_sampled": ppo["final_sampled_accuracy"],
        "labeller_final_grpo": grpo["final_accuracy"],
        "labeller_final_grpo_sampled": grpo["final_sampled_accuracy"],
        "learned_reward_start": ppo["reward_start"],
        "learned_reward_final": ppo["reward_final"],
        "kl_final": ppo["kl_final"],
        "rm_pair_accuracy": last["val/accuracy"],
        "rm_pair_limit": labels["held_out_limit"],
        "pairs": labels["train_pairs"],
    }
    before, after = answers(out / "ppo")
    summary |= of_answers(before, "start") | of_answers(after, "final")
    summary |= of_answers(answers(out / "grpo")[1], "final_grpo")

    reached = read(sums / "summary.json") if sums else {}
    summary["sums_accuracy_start"] = reached.get("start_accuracy")
    summary["sums_accuracy_final"] = reached.get("final_accuracy")
    return summary | {"seconds": seconds}


def page(out: Path) -> str:
    """The first prompts with their answers before and after PPO, as a table."""
    lines = ["| prompt | before | after |", "|---|---|---|"]
    for before, after in list(zip(*answers(out / "ppo"), strict=True))[:SHOWN]:
        question = before["prompt"].split(BEGIN)[-1].split(END)[0]
        cells = [question, *(told(row) for row in (before, after))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def told(row: Mapping[str, Any]) -> str:
    """An answer on one line, with what the labeller thinks of it."""
    text = " ".join(row["response"].split()).replace("|", "\\|")
    score = next(value for name, value in row["terms"].items() if name.endswith("/acc"))
    return f"{text}{'' if row['stopped'] else ' …'} ({score:.2f})"


def main() -> int:
    """Write the summary, the page of answers and the report; returns the report's exit code."""
    parser = argparse.ArgumentParser(description="Gather the figures of the recipe.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--sums", type=Path, metavar="DIR", help="the run of make sums")
    parser.add_argument("--seconds", type=float, required=True, help="what the stages took")
    options = parser.parse_args()

    out: Path = options.out
    summary = gather(out, options.sums, options.seconds)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (out / "answers.md").write_text(page(out), encoding="utf-8")
    for name, value in summary.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    report = [sys.executable, "-m", "mrlhf", "report", str(out / "ppo")]
    return subprocess.run([*report, "--out", str(out / "report.html")]).returncode


if __name__ == "__main__":
    sys.exit(main())
