"""Writes the data files and tokenizers of the shipped examples and recipes.

Usage: mrlhf-prepare-data arithmetic --out runs/data/arithmetic
       mrlhf-prepare-data gsm8k --source GSM8K_DIR --out runs/data/gsm8k
       mrlhf-prepare-data gsm8k_chat --source GSM8K_DIR --out runs/data/gsm8k_chat
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mrlhf.data.arithmetic import OPERATIONS, ArithmeticTask, write_arithmetic
from mrlhf.data.gsm8k import SOLUTIONS, SOURCES, write_chat_gsm8k, write_gsm8k
from mrlhf.errors import MrlhfError
from mrlhf.printable import show
from mrlhf.version import add_version_option


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Write data files and a tokenizer for the shipped examples."
    )
    add_version_option(parser)
    tasks = parser.add_subparsers(dest="task", required=True)

    arithmetic = tasks.add_parser(
        "arithmetic", help="sums as text, with some supervised answers wrong"
    )
    arithmetic.add_argument("--out", type=Path, required=True)
    arithmetic.add_argument(
        "--digits", type=int, default=2, help="largest number of digits of an operand"
    )
    arithmetic.add_argument(
        "--operations", default="+", help=f"one or several of {''.join(OPERATIONS)}"
    )
    arithmetic.add_argument("--sft", type=int, default=9000, help="supervised problems")
    arithmetic.add_argument(
        "--sft-copies",
        type=int,
        default=3,
        help="answers to each supervised problem, each right or wrong",
    )
    arithmetic.add_argument(
        "--short-factor",
        type=int,
        default=3,
        help="so many times more of them for each operand with fewer digits",
    )
    arithmetic.add_argument("--train", type=int, default=9000, help="RL prompts")
    arithmetic.add_argument(
        "--validation", type=int, default=500, help="prompts that are in neither of the two"
    )
    arithmetic.add_argument(
        "--held-out", type=int, default=500, help="prompts that are in none of the three"
    )
    arithmetic.add_argument(
        "--wrong-fraction",
        type=float,
        default=0.45,
        help="fraction of the supervised answers that is wrong",
    )
    arithmetic.add_argument(
        "--wrong-kind",
        choices=("uniform", "near", "carry"),
        default="carry",
        help="wrong answers: any number; one digit changed; 10 too many",
    )
    arithmetic.add_argument(
        "--vocab-size",
        type=int,
        default=32,
        help="largest vocabulary, tokens; fewer are made if fewer suffice",
    )
    arithmetic.add_argument("--seed", type=int, default=0)

    gsm8k = tasks.add_parser("gsm8k", help="grade-school maths problems")
    gsm8k.add_argument("--source", type=Path, required=True, help=f"directory with {SOURCES}")
    gsm8k.add_argument("--out", type=Path, required=True)
    gsm8k.add_argument("--vocab-size", type=int, default=2000)

    chat = tasks.add_parser(
        "gsm8k_chat", help="the same for RL alone, as messages to a model with a chat template"
    )
    chat.add_argument("--source", type=Path, required=True, help=f"directory with {SOURCES}")
    chat.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; 0 when done, 2 on bad input, which is told in one line."""
    options = vars(parse(arguments))
    task = options.pop("task")
    out = options.pop("out")
    source = options.get("source")

    try:
        if task == "arithmetic":
            counts = write_arithmetic(out, ArithmeticTask(**options))
        elif task == "gsm8k":
            counts = write_gsm8k(out_dir=out, **options)
        else:
            counts = write_chat_gsm8k(out_dir=out, **options)

        for name, count in counts.items():
            show(f"{out / name}: {count} rows")
        if task == "gsm8k" and "preferences.jsonl" not in counts:
            show(f"no preference pairs: there is no preferences.jsonl or {SOLUTIONS} in {source}")
        if task != "gsm8k_chat":
            show(f"{out / 'tokenizer'}: tokenizer")
    except MrlhfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or out}: {error.strerror}", file=sys.stderr)
        return 2
    return 0
