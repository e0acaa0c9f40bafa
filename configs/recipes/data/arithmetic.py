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
from typing import Any, Literal

from mrlhf.config.user_code import load_member
from mrlhf.data.rows import write_rows
from mrlhf.errors import DataError

# No package holds this folder where mrlhf is installed.
train_sentencepiece = load_member(
    Path(__file__).resolve().with_name("vocabulary.py"), "train_sentencepiece"
)

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
    """The choices behind the data files of the task."""

    digits: int  # the most of an operand
    operations: str  # the signs to use, such as "+-"
    sft: int  # supervised problems
    # Rows of each supervised problem. Whether an answer is wrong is drawn anew for each row, so
    # that a model learns how often to be wrong and not which answers to give.
    sft_copies: int = 1
    # For each operand with fewer than `digits` digits, a supervised problem has so many times more
    # rows. Such problems are rare, and a model must learn anew where their digits stand.
    short_factor: int = 1
    train: int  # prompts for reinforcement learning
    validation: int  # prompts that are in neither of the two, to choose settings by
    held_out: int  # prompts that are in none of the three, to measure the result by
    wrong_fraction: float  # of the supervised answers
    wrong_kind: WrongKind  # how wrong answers are drawn; see `wrong_answer`
    vocab_size: int  # most tokens; fewer are made if fewer suffice
    seed: int

    def check(self) -> None:
        """Refuse numbers with which a file would be empty, with a DataError."""
        counts = {
            "digits": self.digits,
            "supervised problems": self.sft,
            "copies of each": self.sft_copies,
            "times more copies of short ones": self.short_factor,
            "training prompts": self.train,
            "validation prompts": self.validation,
            "held-out prompts": self.held_out,
            "tokens of the vocabulary": self.vocab_size,
        }
        for what, count in counts.items():
            if count < 1:
                raise DataError(f"{count} {what}: a file would be empty; ask for at least 1")
        if not 0.0 <= self.wrong_fraction <= 1.0:
            raise DataError(f"wrong fraction {self.wrong_fraction} is not in [0, 1]")


def sample_problems(
    count: int,
    *,
    digits: int,
    operations: str,
    rng: random.Random,
    exclude: frozenset[str] = frozenset(),
) -> list[Problem]:
    """Draw `count` distinct problems whose prompts are not in `exclude`; see `ArithmeticTask`.

    A DataError says that there are fewer such problems, or that an operation is unknown.
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


def write_arithmetic(out_dir: Path, **choices: Any) -> dict[str, int]:
    """Write the data files of a task and tokenizer/ into `out_dir`; returns rows by file name.

    These are sft.jsonl, train.jsonl, preferences.jsonl, validation.jsonl and held_out.jsonl.
    preferences.jsonl has a right and a wrong answer to each prompt of train.jsonl. sft.jsonl and
    train.jsonl may share prompts; neither shares any with validation.jsonl or held_out.jsonl, nor
    do these two. sft.jsonl alone has wrong answers in place of right ones.

    Args:
        choices: the fields of `ArithmeticTask`.

    Raises:
        DataError: the task is refused by `check` or `sample_problems`.
    """
    task = ArithmeticTask(**choices)
    task.check()
    rng = random.Random(task.seed)
    sample = partial(sample_problems, digits=task.digits, operations=task.operations, rng=rng)
    held_out = sample(task.held_out)
    hidden = _prompts(held_out)
    validation = sample(task.validation, exclude=hidden)
    hidden |= _prompts(validation)
    supervised = sample(task.sft, exclude=hidden)
    train = sample(task.train, exclude=hidden)
    sft_rows = _sft_rows(supervised, task, rng)
    pairs = [_pair(problem, task.wrong_kind, rng) for problem in train]

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
        "train.jsonl": [_rl_row(problem) for problem in train],
        "preferences.jsonl": pairs,
        "validation.jsonl": [_rl_row(problem) for problem in validation],
        "held_out.jsonl": [_rl_row(problem) for problem in held_out],
    }
    return {name: write_rows(out_dir / name, rows) for name, rows in tables.items()}


def _sft_rows(
    problems: Sequence[Problem], task: ArithmeticTask, rng: random.Random
) -> list[dict[str, str]]:
    """The rows of the supervised problems, copied, and some with a wrong answer."""
    copied = []
    for problem in problems:
        copied += [problem] * (
            task.sft_copies * task.short_factor ** problem.short_operands(task.digits)
        )
    wrong_count = round(task.wrong_fraction * len(copied))
    wrong_rows = set(rng.sample(range(len(copied)), wrong_count))

    rows = []
    for index, problem in enumerate(copied):
        answer = problem.answer
        if index in wrong_rows:
            answer = wrong_answer(answer, task.wrong_kind, rng)
        rows.append({"prompt": problem.prompt, "response": str(answer)})
    return rows


def _prompts(problems: Sequence[Problem]) -> frozenset[str]:
    return frozenset(problem.prompt for problem in problems)


def _rl_row(problem: Problem) -> dict[str, str]:
    return {"prompt": problem.prompt, "answer": str(problem.answer), "data_source": DATA_SOURCE}


def _pair(problem: Problem, kind: WrongKind, rng: random.Random) -> dict[str, str]:
    wrong = wrong_answer(problem.answer, kind, rng)
    return {"prompt": problem.prompt, "chosen": str(problem.answer), "rejected": str(wrong)}
