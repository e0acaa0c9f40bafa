"""Prompt rows, in both schemas and both file formats, as batches of prompts."""

import json
import logging

import pyarrow
import pyarrow.parquet
import pytest

from mrlhf.data.prompts import PromptDataset
from mrlhf.data.rows import read_rows
from mrlhf.data.subword import train_sentencepiece
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.errors import DataError

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 0},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return train_sentencepiece(
        [*"0123456789+=?abcdefgh"], tmp_path_factory.mktemp("tok"), vocab_size=300
    )


@pytest.fixture
def tokenizer(directory):
    return load_tokenizer(directory)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_plain_rows(tokenizer, tmp_path):
    file = jsonl(
        tmp_path / "sums.jsonl",
        [
            {"prompt": "1+1=", "answer": "2"},
            {"prompt": "10+2=", "answer": 12, "data_source": "add", "extra_info": {"a": 10}},
        ],
    )
    prompts = PromptDataset([file], tokenizer, max_prompt_length=8).batch([1, 0])
    assert prompts.token_ids == [tokenizer.encode("10+2="), tokenizer.encode("1+1=")]
    assert prompts.text == ["10+2=", "1+1="]
    assert prompts.uid == [1, 0]
    assert prompts.data_source == ["add", "sums"]
    assert prompts.ground_truth == ["12", "2"]
    assert prompts.extra_info == [{"a": 10}, {}]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_verl_rows(suffix, directory, tmp_path):
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
    )
    tokenizer = load_tokenizer(directory, chat_template=tmp_path / "chat.jinja")
    file = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        jsonl(file, [VERL_ROW])
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL_ROW]), file)
    prompts = PromptDataset([file], tokenizer, max_prompt_length=100)[0]
    assert prompts.text == ["user:2+2?;assistant:"]
    assert prompts.token_ids == [tokenizer.encode("user:2+2?;assistant:")]
    assert (prompts.ground_truth, prompts.data_source) == (["4"], ["openai/gsm8k"])
    assert prompts.extra_info == [{"split": "train", "index": 0}]


def test_chat_rows_without_a_template(tokenizer, tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", [VERL_ROW])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*set data\.chat_template"):
        PromptDataset([file], tokenizer, max_prompt_length=100)


def test_uids_run_over_files_and_past_dropped_rows(tokenizer, tmp_path, caplog):
    first = jsonl(
        tmp_path / "a.jsonl",
        [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1" * 9, "answer": "x"}],
    )
    second = jsonl(tmp_path / "b.jsonl", [{"prompt": "2+2=", "answer": "4"}])
    with caplog.at_level(logging.WARNING):
        data = PromptDataset([first, second], tokenizer, max_prompt_length=8, overlong="drop")
    assert (len(data), data.dropped) == (2, 1)
    assert data.batch([0, 1]).uid == [0, 2]
    assert "dropped 1 of 3 prompts" in caplog.text


def test_overlong_is_an_error_with_both_numbers(tokenizer, tmp_path):
    file = jsonl(
        tmp_path / "a.jsonl",
        [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1" * 9, "answer": "x"}],
    )
    with pytest.raises(
        DataError, match=r"a\.jsonl:2: the prompt has 9 tokens, more than data\.max_prompt_length 8"
    ):
        PromptDataset([file], tokenizer, max_prompt_length=8)
    assert len(PromptDataset([file], tokenizer, max_prompt_length=9)) == 2
    with pytest.raises(DataError, match="all 2 prompts"):
        PromptDataset([file], tokenizer, max_prompt_length=3, overlong="drop")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"promt": "1", "answer": "1"}, "no value for 'prompt'; did you mean 'promt'"),
        ({"prompt": "1"}, "no value for 'answer'"),
        ({"prompt": 3, "answer": "1"}, '"prompt" must be a string or a list'),
        ({"prompt": [{"role": "user"}], "answer": "1"}, '"prompt" must be a string or a list'),
        ({"prompt": "", "answer": "1"}, "the prompt is empty"),
        ({"prompt": "1", "reward_model": {"style": "rule"}}, 'with a "ground_truth"'),
        ({"prompt": "1", "answer": "1", "extra_info": [1]}, "extra_info must be an object"),
    ],
)
def test_malformed_rows_are_named(tokenizer, tmp_path, row, message):
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "1"}, row])
    with pytest.raises(DataError, match=message) as raised:
        PromptDataset([file], tokenizer, max_prompt_length=8)
    assert str(raised.value).startswith(f"{file}:2: ")
    assert "\n" not in str(raised.value)


def test_malformed_files(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(DataError, match=r"bad\.jsonl:3: not a JSON object"):
        read_rows([bad])
    bad.write_text("[1]\n")
    with pytest.raises(DataError, match="found list"):
        read_rows([bad])

    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(DataError, match="not a readable parquet file"):
        read_rows([tmp_path / "bad.parquet"])
    (tmp_path / "rows.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match=r"use \.jsonl or \.parquet"):
        read_rows([tmp_path / "rows.csv"])
    with pytest.raises(DataError, match="does not exist"):
        read_rows([tmp_path / "none.jsonl"])


def test_line_separators_inside_strings_do_not_split_rows(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": "x\u2028y"}\r\n{"a": "z"}', encoding="utf-8")
    assert [(row.fields["a"], row.number) for row in read_rows([file])] == [
        ("x\u2028y", 1),
        ("z", 2),
    ]
