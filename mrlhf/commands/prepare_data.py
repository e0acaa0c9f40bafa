"""Writes the data files and tokenizers of the shipped examples and recipes.

Usage: mrlhf-prepare-data arithmetic --out runs/data/arithmetic
       mrlhf-prepare-data gsm8k --source GSM8K_DIR --out runs/data/gsm8k
       mrlhf-prepare-data gsm8k_chat --source GSM8K_DIR --out runs/data/gsm8k_chat
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mrlhf.commands.endings import end_command
from mrlhf.config.user_code import load_member
from mrlhf.printable import show
from mrlhf.version import add_version_option, shipped

_ARITHMETIC = (  # option, default, help
    ("--digits", 2, "largest number of digits of an operand"),
    ("--operations", "+", "one or several of +-*"),
    ("--sft", 9000, "supervised problems"),
    ("--sft-copies", 3, "answers to each supervised problem, each right or wrong"),
    ("--short-factor", 3, "so many times more of them for each operand with fewer digits"),
    ("--train", 9000, "RL prompts"),
    ("--validation", 500, "prompts that are in neither of the two"),
    ("--held-out", 500, "prompts that are in none of the three"),
    ("--wrong-fraction", 0.45, "fraction of the supervised answers that is wrong"),
    ("--vocab-size", 32, "largest vocabulary, tokens; fewer are made if fewer suffice"),
    ("--seed", 0, None),
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Write data files and a tokenizer for the shipped examples."
    )
    add_version_option(parser)
    tasks = parser.add_subparsers(dest="task", required=True)

    sums_help = "sums as text, with some supervised answers wrong"
    arithmetic = tasks.add_parser("arithmetic", help=sums_help)
    for name, default, text in _ARITHMETIC:
        arithmetic.add_argument(name, type=type(default), default=default, help=text)
    kinds = ("uniform", "near", "carry")
    kinds_help = "wrong answers: any number; one digit changed; 10 too many"
    arithmetic.add_argument("--wrong-kind", choices=kinds, default="carry", help=kinds_help)

    gsm8k = tasks.add_parser("gsm8k", help="grade-school maths problems")
    gsm8k.add_argument("--vocab-size", type=int, default=2000)
    chat_help = "the same for RL alone, as messages to a model with a chat template"
    chat = tasks.add_parser("gsm8k_chat", help=chat_help)
    source_help = (
        "directory with openai/grade-school-math (jsonl) or the data set openai/gsm8k on the "
        "Hugging Face hub (parquet)"
    )
    for task in (gsm8k, chat):
        task.add_argument("--source", type=Path, required=True, help=source_help)
    for task in (arithmetic, gsm8k, chat):
        task.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; 0 when done, 2 on bad input, which is told in one line."""
    options = vars(parse(arguments))
    task = options.pop("task")
    out = options.pop("out")
    file = shipped() / "configs" / "recipes" / "data" / f"{task.removesuffix('_chat')}.py"

    def write() -> int:
        counts = load_member(file, f"write_{task}")(out, **options)
        for name, count in counts.items():
            show(f"{out / name}: {count} rows")
        if task == "gsm8k" and "preferences.jsonl" not in counts:
            show(
                "no preference pairs: there is no preferences.jsonl or "
                f"example_model_solutions.jsonl in {options['source']}"
            )
        if task != "gsm8k_chat":
            show(f"{out / 'tokenizer'}: tokenizer")
        return 0

    return end_command(write, out)
