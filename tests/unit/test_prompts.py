"""Prompt rows, in both schemas and both file formats, as batches of prompts."""

import json
import logging
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest

from configs.recipes.data.vocabulary import train_sentencepiece
from mrlhf.config.teacher import TeacherSection
from mrlhf.data.prompts import OtherPrompts, PromptDataset
from mrlhf.data.rows import read_rows
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.errors import ConfigError, DataError
from mrlhf.rewards.rules import answer_rules

EXACT = answer_rules(["exact_match", "format", "mine.py:f"])
GSM8K = answer_rules(["gsm8k", "gsm8k_flexible"])

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
    assert prompts.extra_info == [
        {"a": 10, "split": "train", "index": 1},
        {"split": "train", "index": 0},
    ]


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
    assert prompts.extra_info == [{"split": "train", "index": 0, "ability": "math"}]


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
    assert (
        f"dropped 1 of 3 rows (33.3%) of {first} and 1 more files, whose prompts have more than 8 "
        "tokens" in caplog.text
    )


def test_a_teacher_reads_other_prompts(directory, tmp_path):
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}={% endfor %}"
    )
    tokenizer = load_tokenizer(directory, chat_template=tmp_path / "chat.jinja")
    turns = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "2+2"}]
    rows = [{"prompt": "1+1", "answer": "2"}, VERL_ROW | {"prompt": turns}]
    file = jsonl(tmp_path / "sums.jsonl", rows)

    def read(**keys):
        section = TeacherSection(path="t", **keys)
        others = OtherPrompts.of(section, most_tokens=100)
        long = {"max_prompt_length": 100, "overlong": "drop"}
        return PromptDataset([file], tokenizer, of_teacher=others, **long)

    assert read().teacher_ids == {}
    template = "{{ ground_truth }}?{{ prompt }}{{ data_source[:1] }}{{ extra_info.index }}"
    texts = ["2?1+1s0", "a:a=u:4?2+2o0="]
    data = read(template=template)
    assert data.teacher_ids == {uid: tokenizer.encode(text) for uid, text in enumerate(texts)}
    assert data[1].token_ids == [tokenizer.encode("a:a=u:2+2=")]
    # It is too long for one row's.
    data = read(template=template, max_prompt_length=len(tokenizer.encode(texts[0])))
    assert (len(data), data.dropped) == (1, 1)

    with pytest.raises(DataError, match=r"sums\.jsonl:1: teacher\.template fails: .*'level'"):
        read(template="{{ prompt }}{{ extra_info.level }}")
    with pytest.raises(ConfigError, match=r"teacher\.template names answer, prompt; .*extra_info"):
        read(template="{{ prompt }}{{ answer }}")
    with pytest.raises(ConfigError, match=r"teacher\.template is no jinja2 template"):
        read(template="{{ prompt")


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
        ({"prompt": [{"role": "user"}], "answer": "1"}, "message 1 of 'prompt' has no \"content\""),
        ({"prompt": {"role": "user"}, "answer": "1"}, '"prompt" must be a string or a list'),
        ({"prompt": [], "answer": "1"}, "'prompt' is an empty list"),
        ({"prompt": ["1"], "answer": "1"}, "message 1 of 'prompt' must be an object .* found str"),
        ({"prompt": None, "answer": "1"}, "'prompt' is null"),
        ({"prompt": "1", "answer": None}, "no value for 'answer'"),
        ({"prompt": "1", "answer": ["1"]}, r"'answer' is a list \(\['1'\]\), but exact_match"),
        ({"prompt": "1", "answer": {"x": 1}}, "'answer' is an object .* give a string or a number"),
        ({"prompt": "1", "answer": True}, r"'answer' is a boolean \(True\)"),
        ({"prompt": "1", "answer": float("nan")}, "'answer' is nan, which is no answer"),
        ({"prompt": "1", "answer": float("-inf")}, "'answer' is -inf, which is no answer"),
        ({"prompt": "1", "answer": " "}, "'answer' is empty"),
        (
            {"prompt": "1", "reward_model": {"ground_truth": [1]}},
            "'reward_model.ground_truth' is a",
        ),
        ({"prompt": "1", "reward_model": "rule"}, "must be an object .* found str"),
        ({"prompt": "1", "answer": "1", "data_source": ["a"]}, "'data_source' must be a string"),
        ({"prompt": "", "answer": "1"}, "the prompt is empty"),
        ({"prompt": "1", "reward_model": {"style": "rule"}}, "no value for 'reward_model.ground_"),
        ({"prompt": "1", "answer": "1", "extra_info": [1]}, "extra_info must be an object"),
    ],
)
def test_malformed_rows_are_named(tokenizer, tmp_path, row, message):
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "1"}, row])
    with pytest.raises(DataError, match=message) as raised:
        PromptDataset([file], tokenizer, max_prompt_length=8, answer_rules=EXACT)
    assert str(raised.value).startswith(f"{file}:2: ")
    assert "\n" not in str(raised.value)


def test_numbers_become_the_text_that_a_response_has(tokenizer, tmp_path):
    answers = [12, 12.0, 0.5, -3, 1e-7, 10**20, "012"]
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": answer} for answer in answers])
    for rules in ({}, EXACT):
        data = PromptDataset([file], tokenizer, max_prompt_length=8, answer_rules=rules)
        assert data.batch(range(7)).ground_truth == [
            *("12", "12", "0.5", "-3", "0.0000001", "1" + "0" * 20, "012")
        ]

    columns = {
        "prompt": ["1", "1"],
        "answer": pyarrow.array([Decimal("18.00"), Decimal("2.50")], pyarrow.decimal128(6, 2)),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    data = PromptDataset([tmp_path / "a.parquet"], tokenizer, max_prompt_length=8)
    assert data.batch([0, 1]).ground_truth == ["18", "2.5"]


def test_rows_need_no_answer_where_no_rule_compares_with_one(tokenizer, tmp_path):
    listed = {"prompt": "1", "answer": ["a", 1], "hint": "b", "extra_info": {"hint": "c"}}
    rows = [{"prompt": "1"}, {"prompt": "2", "reward_model": {"style": "model"}}, listed]
    rows += [{"prompt": "3", "answer": True}, {"prompt": "4", "split": "dev", "index": None}]

    file = jsonl(tmp_path / "a.jsonl", rows)
    prompts = PromptDataset([file], tokenizer, max_prompt_length=8, split="val").batch(range(5))
    assert prompts.ground_truth == [None, None, ["a", 1], True, None]
    assert prompts.extra_info == [
        {"split": "val", "index": 0},
        {"split": "val", "index": 1},
        {"split": "val", "index": 2, "hint": "c"},
        {"split": "val", "index": 3},
        {"split": "dev", "index": 4},
    ]

    jsonl(file, [{"prompt": "1", "answer": [float("nan")]}])
    with pytest.raises(DataError, match=r"a\.jsonl:1: 'answer' is a list .* cannot be handed"):
        PromptDataset([file], tokenizer, max_prompt_length=8)


def test_answers_that_no_response_can_give(tokenizer, tmp_path, caplog):
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "work #### 18"}] * 2)
    with pytest.raises(DataError, match=r"a\.jsonl:1: gsm8k finds no response right .* every row"):
        PromptDataset([file], tokenizer, max_prompt_length=8, answer_rules=GSM8K)
    jsonl(file, [{"prompt": str(i), "answer": a} for i, a in enumerate(["18", "1,000", "$2", "x"])])
    PromptDataset([file], tokenizer, max_prompt_length=8, answer_rules=GSM8K)
    assert f"{file}:4: gsm8k finds no response right if the answer is 'x'" in caplog.text
    assert "so it is in 1 of 4 rows (25.0%)" in caplog.text


def test_prompts_that_stand_twice_are_counted(tokenizer, tmp_path, caplog):
    rows = [{"prompt": "1", "answer": "2"}, {"prompt": "1", "answer": "3"}]
    file = jsonl(tmp_path / "a.jsonl", [*rows, rows[0]])
    with caplog.at_level(logging.INFO):
        PromptDataset([file], tokenizer, max_prompt_length=8)
    assert "2 of 3 rows (66.7%)" in caplog.text and "repeat the prompt of" in caplog.text
    assert f"1 of 3 rows (33.3%) of {file}; the first is {file}:2, which contradicts" in caplog.text

    caplog.clear()
    leads = ["a"].__contains__  # the environment of a data source adds what tells them apart
    PromptDataset([file], tokenizer, max_prompt_length=8, adds_to_prompt=leads)
    assert not caplog.text


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "human", "content": "1"}], "role 'human', .* did you mean 'user'"),
        ([{"role": "User", "content": "1"}], "role 'User', .* did you mean 'user'"),
        ([{"role": "referee", "content": "1"}], "role 'referee', .* use one of system"),
        ([{"role": 3, "content": "1"}], 'a name as "role", found 3'),
        ([{"from": "user", "value": "1"}], r"no \"role\"; it has \['from', 'value'\]"),
        ([{"role": "user", "content": None}], r"no \"content\"; it has \['role'\]"),
        ([{"role": "user", "content": 3}], 'must have text as "content"'),
        ([{"role": "user", "content": [{"type": "image"}]}], 'must have text as "content"'),
        ([{"role": "system", "content": ""}], "all messages of 'prompt' are empty"),
        ([{"role": "assistant", "content": "1"}], "last message of 'prompt' is the assistant's"),
        (
            [{"role": "system", "content": "1/0"}],
            "the chat template refuses the messages: ZeroDivision",
        ),
    ],
)
def test_messages_that_are_no_prompt(directory, tmp_path, messages, message):
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'judge' %}J{% endif %}"
        "{% if m.content == '1/0' %}{{ 1/0 }}{% endif %}{{ m.content }}{% endfor %}"
    )
    tokenizer = load_tokenizer(directory, chat_template=tmp_path / "chat.jinja")
    good = [
        {"role": "judge", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "3"}]}
    ]
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": good}, {"prompt": messages}])
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{message}"):
        PromptDataset([file], tokenizer, max_prompt_length=99)
    jsonl(file, [{"prompt": good}])
    assert PromptDataset([file], tokenizer, max_prompt_length=99)[0].text == ["J23"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a\\ud800", "response": "b"}', r"'prompt' holds \\ud800, which is half of a"),
        (b'{"prompt": "a", "response": "\\uDFFFb"}', r"'response' holds \\udfff"),
        (b'{"prompt": "a", "extra_info": {"k": ["\\ud83d"]}}', r"'extra_info' holds \\ud83d"),
        (b'{"prompt": [{"role": "user", "content": "\\ud800"}]}', r"'prompt' holds \\ud800"),
        (b'{"pro\\udc00": 1}', r"holds \\udc00"),
        (b'{"prompt": "a\xff"}', "byte 14 of the line is not UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "byte 13 of the line is not UTF-8"),
        (b'{"prompt": "a\x00"}', "not a JSON object a line: Invalid control character"),
        (b"[" * 100_000, "not a JSON object a line: .*recursion"),
    ],
)
def test_text_that_cannot_be_encoded(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "\\ud83d\\ude00"}\n' + line)
    with pytest.raises(DataError, match=message) as raised:
        read_rows([file])
    assert str(raised.value).startswith(f"{file}:2: ") and "\n" not in str(raised.value)
    str(raised.value).encode()


def test_other_encodings(tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        "\ufeff".encode() + b'{"prompt": "1"}\n' + "\ufeff".encode() + b'{"prompt": "2"}'
    )
    assert [row.fields["prompt"] for row in read_rows([file])] == ["1", "2"]
    file.write_text('{"prompt": "1"}\n', encoding="utf-16")
    with pytest.raises(DataError, match=r"a\.jsonl:1: the file is UTF-16; save it as UTF-8"):
        read_rows([file])
    jsonl(file, [{"prompt": "1\0"}])  # a character like any other
    assert PromptDataset([file], tokenizer, max_prompt_length=9)[0].text == ["1\0"]

    letters = pyarrow.array([b"ok", b"\xff\xfe"], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, letters.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet:2: cannot read 'prompt': 'utf-8' codec"):
        read_rows([tmp_path / "a.parquet"])


def test_a_text_file_is_a_prompt_a_line(tokenizer, tmp_path):
    file = tmp_path / "sums.txt"
    file.write_bytes(b"\xef\xbb\xbf1+1=\r\n\n \n 10+2=\n")
    rows = read_rows([file])
    assert [(row.fields, row.number) for row in rows] == [
        ({"prompt": "1+1="}, 1),
        ({"prompt": " 10+2="}, 4),
    ]
    assert PromptDataset([file], tokenizer, max_prompt_length=8).batch([0]).text == ["1+1="]
    file.write_text("\n \n")
    with pytest.raises(DataError, match=r"sums\.txt has no rows"):
        read_rows([file])


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
