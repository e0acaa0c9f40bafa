"""The arithmetic task: sums as text, such as "37+48=" with the answer "85".

A part of the supervised answers can be wrong on purpose. Fine-tuning on them yields a policy that
is right only part of the time, and reinforcement learning can then improve it. This file does not
know how data files are read, and knows no models or rewards.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mrlhf.data.rows import write_rows
from mrlhf.data.subword import train_sentencepiece
from mrlhf.errors import DataError

__all__ = [
    "OPERATIONS",
    "ArithmeticTask",
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

    def short_operands(self, digits: int) -> int:
        """The number of operands with fewer than `digits` digits."""
        return sum(len(operand) < digits for operand in re.findall(r"\d+", self.prompt))


@dataclass(frozen=True, kw_only=True)
class ArithmeticTask:
    """The choices behind the data files of the task.

    Attributes:
        digits: the most digits of an operand.
        operations: the signs to use, such as "+-".
        sft: supervised problems.
        sft_copies: rows of each supervised problem. Whether an answer is wrong is drawn anew for
            each row, so that a model learns how often to be wrong and not which answers to give.
        short_factor: for each operand with fewer than `digits` digits, a supervised problem has so
            many times more rows. Such problems are rare, and a model must learn anew where their
            digits stand.
        train: prompts for reinforcement learning.
        validation: prompts that are in neither of the two, to choose settings by.
        held_out: prompts that are in none of the three, to measure the result by.
        wrong_fraction: fraction of the supervised answers that is wrong.
        wrong_kind: how wrong answers are drawn; see `wrong_answer`.
        vocab_size: largest vocabulary, tokens; fewer are made if fewer suffice.
        seed: seed of all that is drawn.
    """

    digits: int
    operations: str
    sft: int
    sft_copies: int = 1
    short_factor: int = 1
    train: int
    validation: int
    held_out: int
    wrong_fraction: float
    wrong_kind: WrongKind
    vocab_size: int
    seed: int


def sample_problems(
    count: int,
    *,
    digits: int,
    operations: str,
    rng: random.Random,
    exclude: frozenset[str] = frozenset(),
) -> list[Problem]:
    """Draw `count` distinct problems whose prompts are not in `exclude`; see `ArithmeticTask`.

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
            f"{count} prompts and {len(exclude)} others exceed the {total} problems of up to "
            f"{digits} digits; ask for fewer prompts or more digits"
        )

    problems: list[Problem] = []
    for number in rng.sample(range(total), count + len(exclude)):
        operation, operands = divmod(number, base * base)
        left, right = divmod(operands, base)
        sign = operations[operation]
        prompt = f"{left}{sign}{right}="
        if prompt not in exclude:
            problems.append(Problem(prompt, OPERATIONS[sign](left, right)))

    return problems[:count]


def wrong_answer(answer: int, kind: WrongKind, rng: random.Random) -> int:
    """Draw a number that differs from `answer`.

    "uniform" draws any number with the same sign and as many digits, "near" changes one digit, and
    "carry" adds 10, as a needless carry does, which may change the number of digits.
    """
    if kind == "carry":
        return answer + 10

    sign = -1 if answer < 0 else 1
    text = str(abs(answer))
    if kind == "uniform":
        low = 10 ** (len(text) - 1) if len(text) > 1 else int(answer < 0)
        # The right answer must not be drawn: draw from one number fewer, and shift up by one
        # whatever is not below the right answer.
        drawn = rng.randrange(low, 10 ** len(text) - 1)
        if drawn >= abs(answer):
            drawn += 1
        return sign * drawn

    place = rng.randrange(len(text))
    must_not_be_zero = place == 0 and (len(text) > 1 or sign < 0)
    allowed = "123456789" if must_not_be_zero else "0123456789"
    digit = rng.choice([d for d in allowed if d != text[place]])
    return sign * int(text[:place] + digit + text[place + 1 :])


def write_arithmetic(out_dir: Path, task: ArithmeticTask) -> dict[str, int]:
    """Write the data files of the task and tokenizer/ into `out_dir`.

    These are sft.jsonl, train.jsonl, preferences.jsonl, validation.jsonl and held_out.jsonl.
    preferences.jsonl has a right and a wrong answer to each prompt of train.jsonl. sft.jsonl and
    train.jsonl may share prompts; neither shares any with validation.jsonl or held_out.jsonl, nor
    do these two. sft.jsonl alone has wrong answers in place of right ones.

    Returns:
        Rows written, by file name.

    Raises:
        DataError: a number is below 1, there are fewer problems than asked for, an operation is
            unknown, or the wrong fraction is not in [0, 1].
    """
    counts = {
        "digits": task.digits,
        "supervised problems": task.sft,
        "copies of each": task.sft_copies,
        "times more copies of short ones": task.short_factor,
        "training prompts": task.train,
        "validation prompts": task.validation,
        "held-out prompts": task.held_out,
        "tokens of the vocabulary": task.vocab_size,
    }
    for what, count in counts.items():
        if count < 1:
            raise DataError(f"{count} {what}: a file would be empty; ask for at least 1")
    if not 0.0 <= task.wrong_fraction <= 1.0:
        raise DataError(f"wrong fraction {task.wrong_fraction} is not in [0, 1]")

    rng = random.Random(task.seed)
    sample = partial(sample_problems, digits=task.digits, operations=task.operations, rng=rng)
    held_out_problems = sample(task.held_out)
    hidden = _prompts(held_out_problems)
    validation_problems = sample(task.validation, exclude=hidden)
    hidden |= _prompts(validation_problems)
    sft_problems = [
        problem
        for problem in sample(task.sft, exclude=hidden)
        for _ in range(task.sft_copies * task.short_factor ** problem.short_operands(task.digits))
    ]
    train_problems = sample(task.train, exclude=hidden)

    wrong_count = round(task.wrong_fraction * len(sft_problems))
    wrong_rows = set(rng.sample(range(len(sft_problems)), wrong_count))
    sft_rows: list[dict[str, str]] = []
    for index, problem in enumerate(sft_problems):
        answer = problem.answer
        if index in wrong_rows:
            answer = wrong_answer(answer, task.wrong_kind, rng)
        sft_rows.append({"prompt": problem.prompt, "response": str(answer)})
    pairs = [_pair(problem, task.wrong_kind, rng) for problem in train_problems]

    out_dir.mkdir(parents=True, exist_ok=True)
    # Each symbol is also a text of its own, so that all of them are in the vocabulary and no two
    # are joined into one token.
    texts = [*"0123456789=-", *task.operations]
    texts += [row["prompt"] + row["response"] for row in sft_rows]
    train_sentencepiece(
        texts, out_dir / "tokenizer", vocab_size=task.vocab_size, byte_fallback=False
    )

    tables = {
        "sft.jsonl": sft_rows,
        "train.jsonl": [_rl_row(problem) for problem in train_problems],
        "preferences.jsonl": pairs,
        "validation.jsonl": [_rl_row(problem) for problem in validation_problems],
        "held_out.jsonl": [_rl_row(problem) for problem in held_out_problems],
    }
    return {name: write_rows(out_dir / name, rows) for name, rows in tables.items()}


def _prompts(problems: Sequence[Problem]) -> frozenset[str]:
    return frozenset(problem.prompt for problem in problems)


def _rl_row(problem: Problem) -> dict[str, str]:
    return {"prompt": problem.prompt, "answer": str(problem.answer), "data_source": DATA_SOURCE}


def _pair(problem: Problem, kind: WrongKind, rng: random.Random) -> dict[str, str]:
    wrong = wrong_answer(problem.answer, kind, rng)
    return {"prompt": problem.prompt, "chosen": str(problem.answer), "rejected": str(wrong)}
