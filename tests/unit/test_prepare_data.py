"""The data files of the shipped examples, written through the tool's own entry point."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from configs.recipes.data.arithmetic import sample_problems, wrong_answer
from mrlhf.commands.prepare_data import main
from mrlhf.data.preferences import encode_preferences
from mrlhf.data.prompts import PromptDataset
from mrlhf.data.rows import read_rows
from mrlhf.data.sft import encode_sft
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.errors import DataError


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def evaluate(prompt):
    left, sign, right = re.fullmatch(r"(\d+)([+*-])(\d+)=", prompt).groups()
    return {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[
        sign
    ]


SPLITS = ("sft", "train", "validation", "held_out")


def arithmetic(out, *more):
    sizes = ["--sft", "200", "--sft-copies", "2", "--short-factor", "1", "--train", "300"]
    sizes += ["--validation", "50", "--held-out", "100"]
    assert main(["arithmetic", "--out", str(out), *sizes, *more]) == 0
    return {name: read(out / f"{name}.jsonl") for name in SPLITS}


@pytest.mark.parametrize("kind", ["uniform", "near", "carry"])
def test_arithmetic(tmp_path, kind):
    options = ("--operations", "+-", "--wrong-fraction", "0.4", "--wrong-kind", kind)
    data = arithmetic(tmp_path / "a", *options)
    assert {name: len(rows) for name, rows in data.items()} == {
        "sft": 400,
        "train": 300,
        "validation": 50,
        "held_out": 100,
    }

    prompts = {name: {row["prompt"] for row in rows} for name, rows in data.items()}
    assert [len(prompts[name]) for name in SPLITS] == [200, 300, 50, 100]
    assert not prompts["validation"] & (prompts["sft"] | prompts["train"])
    assert not prompts["held_out"] & (prompts["sft"] | prompts["train"] | prompts["validation"])
    assert all(
        row["answer"] == str(evaluate(row["prompt"]))
        for name in ("train", "validation", "held_out")
        for row in data[name]
    )

    right = [row["response"] == str(evaluate(row["prompt"])) for row in data["sft"]]
    assert right.count(False) == 160
    if kind == "carry":
        assert {int(row["response"]) - evaluate(row["prompt"]) for row in data["sft"]} == {0, 10}

    pairs = read(tmp_path / "a" / "preferences.jsonl")
    assert [(row["prompt"], row["chosen"]) for row in pairs] == [
        (row["prompt"], row["answer"]) for row in data["train"]
    ]
    assert not any(row["rejected"] == row["chosen"] for row in pairs)
    if kind == "carry":
        assert {int(row["rejected"]) - int(row["chosen"]) for row in pairs} == {10}

    assert {re.search("[+-]", prompt)[0] for prompt in prompts["sft"]} == {"+", "-"}
    assert arithmetic(tmp_path / "b", *options) == data
    assert arithmetic(tmp_path / "c", *options, "--seed", "1") != data


def test_short_problems_have_more_rows(tmp_path):
    data = arithmetic(tmp_path, "--short-factor", "3")
    rows = Counter(row["prompt"] for row in data["sft"])
    assert len(rows) == 200
    # Two rows of each problem, and three times more for each operand of one digit.
    short = {prompt: re.sub(r"\d\d", "", prompt) for prompt in rows}
    assert {len(re.findall(r"\d", rest)) for rest in short.values()} >= {0, 1}
    assert rows == {prompt: 2 * 3 ** len(re.findall(r"\d", short[prompt])) for prompt in rows}


def test_arithmetic_trains(tmp_path):
    arithmetic(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    assert len(tokenizer.ids) == 4 + 1 + 13  # special, newline, ten digits and "+", "-", "="

    prompts = PromptDataset([tmp_path / "held_out.jsonl"], tokenizer, max_prompt_length=6)
    first = prompts[0]
    assert tokenizer.decode(first.token_ids[0]) == first.text[0]
    assert len(first.token_ids[0]) == len(first.text[0])
    assert first.data_source == ["arithmetic"]

    assert len(encode_sft(read_rows([tmp_path / "sft.jsonl"]), tokenizer, max_length=10)) == 400


@pytest.mark.parametrize("kind", ["uniform", "near"])
@pytest.mark.parametrize(
    ("answer", "possible", "near"),
    [
        (5, {0, 1, 2, 3, 4, 6, 7, 8, 9}, None),
        (-5, {-1, -2, -3, -4, -6, -7, -8, -9}, None),
        (10, set(range(11, 100)), {*range(11, 20), *range(20, 100, 10)}),
        (-99, set(range(-98, -9)), {*range(-98, -89), *range(-89, -18, 10)}),
    ],
)
def test_wrong_answers(kind, answer, possible, near):
    rng = random.Random(0)
    drawn = {wrong_answer(answer, kind, rng) for _ in range(3000)}
    assert drawn == (near if kind == "near" and near else possible)


def test_all_problems_can_be_asked_for_and_not_one_more():
    everything = sample_problems(200, digits=1, operations="+*", rng=random.Random(0))
    assert len({problem.prompt for problem in everything}) == 200
    assert all(problem.answer == evaluate(problem.prompt) for problem in everything)
    with pytest.raises(DataError, match="exceed the 100 problems of up to 1 digits"):
        sample_problems(
            61,
            digits=1,
            operations="+",
            rng=random.Random(0),
            exclude=frozenset(map(str, range(40))),
        )
    with pytest.raises(DataError, match="use one or several of"):
        sample_problems(1, digits=1, operations="/", rng=random.Random(0))


PROBLEMS = [
    {
        "question": f"Ann has {n} apples and  buys {n}.\nHow many?",
        "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n:,}",
    }
    for n in range(600, 640)
]
PAIR = {
    "prompt": PROBLEMS[31]["question"],
    "chosen": "A: I add.\n631+631=1262\nA: 1,262",
    "rejected": "A: 3 wrong lines\nend\n",
}


def gsm8k_source(folder, form):
    folder.mkdir()
    splits = {"train": PROBLEMS[:30], "test": PROBLEMS[30:]}
    for name, rows in splits.items():
        if form == "jsonl":
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            (folder / "main").mkdir(exist_ok=True)
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, folder / "main" / f"{name}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_gsm8k(tmp_path, form):
    source = gsm8k_source(tmp_path / "in", form)
    out = tmp_path / "out"
    assert main(["gsm8k", "--source", str(source), "--out", str(out), "--vocab-size", "320"]) == 0
    assert not (out / "preferences.jsonl").exists()

    sft, train, test = (read(out / f"{name}.jsonl") for name in ("sft", "rl_train", "rl_test"))
    assert (len(sft), len(train), len(test)) == (30, 30, 10)
    prompt = "Question: Ann has 600 apples and  buys 600.\nHow many?\nAnswer:\n"
    assert sft[0] == {"prompt": prompt, "response": "600+600=<<600+600=1200>>1200\n#### 1,200"}
    assert train[0] == {
        "prompt": prompt,
        "answer": "1200",
        "data_source": "openai/gsm8k",
        "extra_info": {"split": "train", "index": 0},
    }
    assert test[0]["answer"] == "1260"

    tokenizer = load_tokenizer(out / "tokenizer")
    example = encode_sft(read_rows([out / "sft.jsonl"]), tokenizer, max_length=500)[0]
    assert tokenizer.decode(example.token_ids) == prompt + sft[0]["response"]


def test_gsm8k_preferences(tmp_path):
    source = gsm8k_source(tmp_path / "in", "jsonl")
    out = tmp_path / "out"
    (source / "preferences.jsonl").write_text(json.dumps(PAIR) + "\n")
    assert main(["gsm8k", "--source", str(source), "--out", str(out), "--vocab-size", "320"]) == 0

    (pair,) = read(out / "preferences.jsonl")
    assert pair["chosen"] == "A: I add.\n631+631=1262\n#### 1,262"
    assert pair["rejected"] == "A: 3 wrong lines\nend"

    unseen = [row["prompt"] for row in read(out / "rl_test_unseen.jsonl")]
    everything = [row["prompt"] for row in read(out / "rl_test.jsonl")]
    assert pair["prompt"] in everything
    assert unseen == [prompt for prompt in everything if prompt != pair["prompt"]]

    pairs = encode_preferences(
        read_rows([out / "preferences.jsonl"]), load_tokenizer(out / "tokenizer"), max_length=500
    )
    assert len(pairs) == 1


def test_gsm8k_pairs_are_made_of_the_published_solutions(tmp_path, capsys):
    source = gsm8k_source(tmp_path / "in", "jsonl")
    command = ["gsm8k", "--source", str(source), "--out", str(tmp_path / "out")]
    command += ["--vocab-size", "320"]
    solutions = source / "example_model_solutions.jsonl"

    def write(*rows):
        models = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
        with solutions.open("w") as file:
            for question, marks in rows:
                each = {
                    model: {"solution": f"I am {model}.\nA: 1", "is_correct": mark == "r"}
                    for model, mark in zip(models, marks, strict=True)
                }
                file.write(json.dumps({"question": question, "ground_truth": "A: 1", **each}))
                file.write("\n")

    tested = [problem["question"] for problem in PROBLEMS[30:]]
    train = PROBLEMS[0]["question"]
    write((tested[0], "wrrw"), (tested[1], "rrrw"), (tested[2], "wwww"), (train, "wrrw"))
    assert main(command) == 0
    assert "no preference pairs" not in capsys.readouterr().out

    pairs = read(tmp_path / "out" / "preferences.jsonl")
    form = re.compile(r"I am (\w+)\.\n#### 1")
    compared = [
        tuple(form.fullmatch(pair[side])[1] for side in ("chosen", "rejected")) for pair in pairs
    ]
    assert compared == [
        ("6b_verification", "6b_finetuning"),
        ("6b_verification", "175b_verification"),
        ("175b_finetuning", "6b_finetuning"),
        ("175b_finetuning", "175b_verification"),
        ("6b_finetuning", "175b_verification"),
        ("6b_verification", "175b_verification"),
    ]
    everything = [row["prompt"] for row in read(tmp_path / "out" / "rl_test.jsonl")]
    assert [pair["prompt"] for pair in pairs] == [everything[0]] * 4 + [everything[1]] * 2
    assert read(tmp_path / "out" / "rl_test_unseen.jsonl")[0]["prompt"] == everything[2]

    solutions.write_text(json.dumps({"question": tested[0], "6b_finetuning": "A: 1"}) + "\n")
    assert main(command) == 2
    assert "jsonl:1: '6b_finetuning' must be {" in capsys.readouterr().err
    solutions.unlink()
    assert main(command) == 0
    assert f"no preference pairs: there is no preferences.jsonl or {solutions.name}" in (
        capsys.readouterr().out
    )


def test_gsm8k_chat(tmp_path, capsys):
    source = gsm8k_source(tmp_path / "in", "jsonl")
    out = tmp_path / "out"
    assert main(["gsm8k_chat", "--source", str(source), "--out", str(out)]) == 0
    assert [file.name for file in sorted(out.iterdir())] == ["rl_test.jsonl", "rl_train.jsonl"]
    assert "tokenizer" not in capsys.readouterr().out

    train = read(out / "rl_train.jsonl")
    assert len(train) == 30 and len(read(out / "rl_test.jsonl")) == 10
    content = (
        "Ann has 600 apples and  buys 600.\nHow many? Let's think step by step and output the "
        'final answer after "####".'
    )
    assert train[0] == {
        "prompt": [{"role": "user", "content": content}],
        "answer": "1200",
        "data_source": "openai/gsm8k",
        "extra_info": {"split": "train", "index": 0},
    }


def test_errors_are_one_line(tmp_path, capsys):
    assert main(["gsm8k", "--source", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert "openai/gsm8k" in message and "train.jsonl" in message

    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "no mark"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n')
    assert main(["gsm8k", "--source", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "train.jsonl:1: the answer does not end with" in capsys.readouterr().err

    assert main(["arithmetic", "--out", str(tmp_path / "a"), "--digits", "1", "--sft", "200"]) == 2
    assert "exceed the 100 problems" in capsys.readouterr().err

    prompts = ("sft", "sft-copies", "short-factor", "train", "validation", "held-out")
    for option in ("digits", *prompts, "vocab-size"):
        for count in ("0", "-1"):
            assert (
                main(["arithmetic", "--out", str(tmp_path / "empty"), f"--{option}={count}"]) == 2
            )
            message = capsys.readouterr().err
            assert message.startswith(f"error: {count} ") and message.count("\n") == 1
    assert not (tmp_path / "empty").exists()


def test_a_place_where_nothing_can_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/x")):
        assert main(["arithmetic", "--out", str(out)]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: /") and message.count("\n") == 1
