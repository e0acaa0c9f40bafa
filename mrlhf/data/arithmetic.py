"""The arithmetic task: sums as text, "37+48=" with the answer "85", of which supervised data may
get some wrong.

With a part of the supervised answers wrong, fine-tuning yields a policy that is right only part of
the time, which reinforcement learning can then mend. Does not know files' readers, models or
rewards.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mrlhf.data.rows import write_rows
from mrlhf.data.subword import train_sentencepiece
from mrlhf.errors import DataError

__all__ = [
    "OPERATIONS",
    "Problem",
    "WrongKind",
    "sample_problems",
    "write_arithmetic",
    "wrong_answer",
]

DATA_SOURCE = "arithmetic"
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}

WrongKind = Literal["uniform", "near", "carry"]


@dataclass(frozen=True)
class Problem:
    """A prompt such as "37+48=" and the number that answers it."""

    prompt: str
    answer: int


def sample_problems(
    count: int,
    *,
    digits: int,
    operations: str,
    rng: random.Random,
    exclude: frozenset[str] = frozenset(),
) -> list[Problem]:
    """`count` distinct problems with operands of at most `digits` digits, none with a prompt in
    `exclude`.

    Raises:
        DataError: there are fewer such problems, or an operation is unknown.
    """
    unknown = sorted(set(operations) - set(OPERATIONS))
    if unknown or not operations:
        raise DataError(f"operations {operations!r}: use one or several of {''.join(OPERATIONS)}")
    base = 10**digits
    total = len(operations) * base * base
    if count + len(exclude) > total:
        raise DataError(
            f"{count} prompts beside {len(exclude)} others exceed the {total} problems of up to {digits} digits; "
            "ask for fewer prompts or more digits"
        )
    problems: list[Problem] = []
    for number in rng.sample(range(total), count + len(exclude)):
        which, rest = divmod(number, base * base)
        left, right = divmod(rest, base)
        sign = operations[which]
        prompt = f"{left}{sign}{right}="
        if prompt not in exclude:
            problems.append(Problem(prompt, OPERATIONS[sign](left, right)))
    return problems[:count]


def wrong_answer(answer: int, kind: WrongKind, rng: random.Random) -> int:
    """A number other than `answer`: except for "carry", of the same sign and number of digits.

    Args:
        answer: the right one.
        kind: "uniform" draws any such number, "near" alters one digit, "carry" adds 10, as one does
            who carries where nothing is to be carried.
        rng: the source of chance.
    """
    if kind == "carry":
        return answer + 10
    sign, text = (-1 if answer < 0 else 1), str(abs(answer))
    if kind == "uniform":
        low = 10 ** (len(text) - 1) if len(text) > 1 else int(answer < 0)
        # One number fewer than there are: from the right answer on, each stands for its successor.
        drawn = rng.randrange(low, 10 ** len(text) - 1)
        return sign * (drawn + (drawn >= abs(answer)))
    place = rng.randrange(len(text))
    leads = place == 0 and (len(text) > 1 or sign < 0)
    digit = rng.choice([d for d in "0123456789"[leads:] if d != text[place]])
    return sign * int(text[:place] + digit + text[place + 1 :])


def write_arithmetic(
    out_dir: Path,
    *,
    digits: int,
    operations: str,
    sft: int,
    sft_copies: int = 1,
    train: int,
    held_out: int,
    wrong_fraction: float,
    wrong_kind: WrongKind,
    vocab_size: int,
    seed: int,
) -> dict[str, int]:
    """Write sft.jsonl, train.jsonl, held_out.jsonl and tokenizer/ into `out_dir`.

    sft.jsonl and train.jsonl may share prompts; neither shares any with held_out.jsonl. Only
    sft.jsonl has wrong answers. It has `sft` problems `sft_copies` times each, every time with an
    answer that is right or wrong by chance of its own, so that what is learned is the chance and
    not the answer.

    Returns:
        Rows written, by file name.
    """
    if not 0.0 <= wrong_fraction <= 1.0:
        raise DataError(f"wrong fraction {wrong_fraction} is not in [0, 1]")
    rng = random.Random(seed)
    held = sample_problems(held_out, digits=digits, operations=operations, rng=rng)
    hidden = frozenset(problem.prompt for problem in held)
    shown = sft_copies * sample_problems(
        sft, digits=digits, operations=operations, rng=rng, exclude=hidden
    )
    asked = sample_problems(train, digits=digits, operations=operations, rng=rng, exclude=hidden)
    wrong = set(rng.sample(range(len(shown)), round(wrong_fraction * len(shown))))
    answers = [
        str(wrong_answer(problem.answer, wrong_kind, rng) if i in wrong else problem.answer)
        for i, problem in enumerate(shown)
    ]
    out_dir.mkdir(parents=True, exist_ok=True)
    # Each symbol as a text of its own: all are in the vocabulary, and no two are joined.
    texts = [
        *"0123456789=-",
        *operations,
        *(p.prompt + a for p, a in zip(shown, answers, strict=True)),
    ]
    train_sentencepiece(texts, out_dir / "tokenizer", vocab_size=vocab_size, byte_fallback=False)
    tables = {
        "sft.jsonl": [
            {"prompt": p.prompt, "response": a} for p, a in zip(shown, answers, strict=True)
        ],
        "train.jsonl": [_rl_row(problem) for problem in asked],
        "held_out.jsonl": [_rl_row(problem) for problem in held],
    }
    return {name: write_rows(out_dir / name, rows) for name, rows in tables.items()}


def _rl_row(problem: Problem) -> dict[str, str]:
    return {"prompt": problem.prompt, "answer": str(problem.answer), "data_source": DATA_SOURCE}
