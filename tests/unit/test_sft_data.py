"""Supervised rows as tokens and loss masks."""

import logging
from pathlib import Path

import pytest

from configs.recipes.data.vocabulary import train_sentencepiece
from mrlhf.data.rows import Row
from mrlhf.data.sft import SftExample, encode_sft
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = [*"0123456789+="]
    return load_tokenizer(
        train_sentencepiece(
            texts, tmp_path_factory.mktemp("tok"), vocab_size=32, byte_fallback=False
        )
    )


def rows(*fields):
    return [Row(field, Path("s.jsonl"), i) for i, field in enumerate(fields, start=1)]


@pytest.mark.parametrize("column", ["response", "answer"])
def test_the_loss_is_on_the_response_and_eos(tokenizer, column):
    ids = {symbol: tokenizer.encode(symbol)[0] for symbol in "1+2="}
    expected = SftExample([*(ids[s] for s in "1+1="), ids["2"], 2], [0, 0, 0, 0, 1, 1])
    assert encode_sft(rows({"prompt": "1+1=", column: "2"}), tokenizer, max_length=6) == [expected]


def test_response_is_preferred_to_answer(tokenizer):
    example = encode_sft(
        rows({"prompt": "1=", "response": "1", "answer": "7"}), tokenizer, max_length=9
    )[0]
    assert tokenizer.decode(example.token_ids) == "1=1"


def test_overlong(tokenizer, caplog):
    data = rows({"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": "22"})
    with pytest.raises(
        DataError,
        match=r"s\.jsonl:2: prompt and response have 7 tokens, more than data.max_length 6",
    ):
        encode_sft(data, tokenizer, max_length=6)
    with caplog.at_level(logging.WARNING):
        assert len(encode_sft(data, tokenizer, max_length=6, overlong="drop")) == 1
    assert (
        "dropped 1 of 2 rows (50.0%) of s.jsonl, whose prompts and responses have more than 6 "
        "tokens" in caplog.text
    )
    with pytest.raises(DataError, match="none of 2"):
        encode_sft(data, tokenizer, max_length=5, overlong="drop")


def test_malformed(tokenizer):
    with pytest.raises(DataError, match=r"s\.jsonl:1: no value for 'response'"):
        encode_sft(rows({"prompt": "1"}), tokenizer, max_length=6)
    with pytest.raises(DataError, match=r"s\.jsonl:1: 'response' is null; give a value"):
        encode_sft(rows({"prompt": "1", "response": None}), tokenizer, max_length=6)
    with pytest.raises(DataError, match="'answer' must be a string, found int"):
        encode_sft(rows({"prompt": "1", "answer": 2}), tokenizer, max_length=6)


def test_empty_responses_and_copies_are_counted(tokenizer, caplog):
    data = rows(
        {"prompt": "1", "response": ""},
        {"prompt": "1", "response": "2"},
        {"prompt": "1", "response": "2"},
    )
    with caplog.at_level(logging.INFO):
        assert len(encode_sft(data, tokenizer, max_length=6)) == 3
    assert "the response is empty in 1 of 3 rows (33.3%) of s.jsonl" in caplog.text
    assert "1 of 3 rows" in caplog.text and "repeat prompt and response" in caplog.text
    with pytest.raises(DataError, match=r"s\.jsonl:1: the response is empty, and so in all 1 rows"):
        encode_sft(data[:1], tokenizer, max_length=6)
    with pytest.raises(DataError, match=r"s\.jsonl:1: the prompt is empty"):
        encode_sft(rows({"prompt": "", "response": "1"}), tokenizer, max_length=6)
