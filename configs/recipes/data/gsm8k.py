"""Converts the published GSM8K maths problems for supervised, RL and preference training.

It reads the jsonl files of openai/grade-school-math and the parquet files of openai/gsm8k on the
Hugging Face hub. Preference pairs come from solutions that models wrote, which the former has. It
does not know how answers are scored.
"""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path
from typing import Any

from mrlhf.config.user_code import load_member
from mrlhf.data.rows import Row, read_rows, write_rows
from mrlhf.errors import DataError

# No package holds this folder where mrlhf is installed.
train_sentencepiece = load_member(
    Path(__file__).resolve().with_name("vocabulary.py"), "train_sentencepiece"
)

DATA_SOURCE = "openai/gsm8k"
SOURCES = (
    "openai/grade-school-math (jsonl) or the data set openai/gsm8k on the Hugging Face hub "
    "(parquet)"
)

# openai/grade-school-math has a solution by each of these models to each test problem.
SOLUTIONS = "example_model_solutions.jsonl"
_MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
_SOLUTIONS_OF_A_SIDE = 2

_REQUEST = 'Let\'s think step by step and output the final answer after "####".'
_PREFERENCE_ENDING = re.compile(r"(?<![^\n])A: (?=[^\n]*\Z)")


def format_prompt(question: str) -> str:
    """The text before a solution; it ends in a newline, so the solution starts on its own line."""
    return f"Question: {question.strip()}\nAnswer:\n"


def final_answer(row: Row) -> str:
    """The number after "####" in a row's worked solution, without thousands separators."""
    solution, mark, number = row.text("answer").rpartition("####")
    if not mark or not number.strip():
        raise DataError(
            f'{row.where}: the answer does not end with "#### number": {solution[-60:]!r}'
        )
    return number.strip().replace(",", "")


def write_gsm8k(out_dir: Path, *, source: Path, vocab_size: int) -> dict[str, int]:
    """Write the training files and a tokenizer into `out_dir`; returns rows by file name.

    - sft.jsonl: the prompt and the worked solution of each training problem.
    - rl_train.jsonl, rl_test.jsonl: the prompt and the final number of each problem.
    - preferences.jsonl, if `source` has preferences.jsonl, or solutions by models from which pairs
      are made: the prompts have the same form. A last line "A: 18" of a solution becomes
      "#### 18", so that a reward model is trained on the form that the policy writes.
    - rl_test_unseen.jsonl, together with preferences.jsonl: the rows of rl_test.jsonl whose
      problem has no preference pair. The pairs are about test problems, so use these rows to
      evaluate a policy that was trained against such a reward model.
    - tokenizer/: trained on the training problems only.

    A DataError says that a file is missing or malformed.
    """
    train = _read_split(source, "train")
    test = _read_split(source, "test")
    sft = [
        {"prompt": format_prompt(row.text("question")), "response": row.text("answer")}
        for row in train
    ]
    tables: dict[str, list[dict[str, Any]]] = {
        "sft.jsonl": sft,
        "rl_train.jsonl": [_rl_row(row, "train", i) for i, row in enumerate(train)],
        "rl_test.jsonl": [_rl_row(row, "test", i) for i, row in enumerate(test)],
    }

    pairs = _read_pairs(source, {row.text("question") for row in test})
    if pairs:
        seen = {pair["prompt"] for pair in pairs}
        tables["preferences.jsonl"] = pairs
        tables["rl_test_unseen.jsonl"] = [
            row for row in tables["rl_test.jsonl"] if row["prompt"] not in seen
        ]

    out_dir.mkdir(parents=True, exist_ok=True)
    texts = [row["prompt"] + row["response"] for row in sft]
    train_sentencepiece(texts, out_dir / "tokenizer", vocab_size=vocab_size)
    return {name: write_rows(out_dir / name, rows) for name, rows in tables.items()}


def write_gsm8k_chat(out_dir: Path, *, source: Path) -> dict[str, int]:
    """Write rl_train.jsonl and rl_test.jsonl with prompts as chat messages into `out_dir`.

    They are for a model that has a tokenizer and a chat template. The prompt asks for the number in
    the words of verl's examples. Returns the rows written, by file name.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split in ("train", "test"):
        rows = []
        for index, row in enumerate(_read_split(source, split)):
            content = f"{row.text('question').strip()} {_REQUEST}"
            prompt = [{"role": "user", "content": content}]
            rows.append({**_rl_row(row, split, index), "prompt": prompt})
        name = f"rl_{split}.jsonl"
        counts[name] = write_rows(out_dir / name, rows)
    return counts


def _read_split(source: Path, split: str) -> list[Row]:
    jsonl = source / f"{split}.jsonl"
    if jsonl.is_file():
        return read_rows([jsonl])
    for folder in (source / "main", source):
        shards = sorted(folder.glob(f"{split}-*.parquet"))
        if shards:
            return read_rows(shards)
    raise DataError(
        f"{source} has neither {split}.jsonl nor main/{split}-*.parquet; get GSM8K from {SOURCES}"
    )


def _rl_row(row: Row, split: str, index: int) -> dict[str, Any]:
    return {
        "prompt": format_prompt(row.text("question")),
        "answer": final_answer(row),
        "data_source": DATA_SOURCE,
        "extra_info": {"split": split, "index": index},
    }


def _read_pairs(source: Path, test_questions: Set[str]) -> list[dict[str, str]]:
    """Preference pairs; none if `source` has no solutions to compare."""
    preferences = source / "preferences.jsonl"
    if preferences.is_file():
        return [
            _preference_row(row.text("prompt"), row.text("chosen"), row.text("rejected"))
            for row in read_rows([preferences])
        ]

    solutions = source / SOLUTIONS
    if not solutions.is_file():
        return []
    rows = [row for row in read_rows([solutions]) if row.text("question") in test_questions]
    return [pair for row in rows for pair in _compared_solutions(row)]


def _compared_solutions(row: Row) -> list[dict[str, str]]:
    """Pairs of a right and a wrong solution to one problem, of at most two of each."""
    right: list[str] = []
    wrong: list[str] = []
    for model in _MODELS:
        solution = row.require(model)
        try:
            (right if solution["is_correct"] else wrong).append(solution["solution"])
        except (KeyError, TypeError):
            raise DataError(
                f'{row.where}: {model!r} must be {{"solution": text, "is_correct": true or false}}'
            ) from None

    return [
        _preference_row(row.text("question"), chosen, rejected)
        for chosen in right[:_SOLUTIONS_OF_A_SIDE]
        for rejected in wrong[:_SOLUTIONS_OF_A_SIDE]
    ]


def _preference_row(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {
        "prompt": format_prompt(prompt),
        "chosen": _preference_solution(chosen),
        "rejected": _preference_solution(rejected),
    }


def _preference_solution(text: str) -> str:
    """The solution with its last line "A: 18" rewritten as "#### 18"."""
    return _PREFERENCE_ENDING.sub("#### ", text.rstrip())
