"""Preference rows as token pairs, and their split by prompt."""

import logging
from pathlib import Path

import pytest

from configs.recipes.data.vocabulary import train_sentencepiece
from mrlhf.data.preferences import (
    PreferenceColumns,
    PreferenceRows,
    encode_preferences,
    prompt_reader,
    split_by_prompt,
)
from mrlhf.data.rows import Row
from mrlhf.data.tokenizer import load_tokenizer
from mrlhf.errors import DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tok")
    directory = train_sentencepiece([*"0123456789+=abcdefgh"], folder / "tok", vocab_size=300)
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    return load_tokenizer(directory, chat_template=folder / "chat.jinja")


def rows(*fields):
    return [Row(field, Path("p.jsonl"), i) for i, field in enumerate(fields, start=1)]


def test_strings(tokenizer):
    pairs = encode_preferences(
        rows({"prompt": "1+1=", "chosen": "2", "rejected": "11"}), tokenizer, max_length=7
    )
    prompt = tokenizer.encode("1+1=")
    chosen = [*prompt, *tokenizer.encode("2"), 2]
    assert pairs.responses == [[chosen, [*prompt, *tokenizer.encode("11"), 2]]]
    assert pairs.prompt_lengths == [len(prompt)]
    assert len(pairs) == 1


def test_margins_are_those_of_the_pairs_that_are_kept(tokenizer):
    data = rows(
        {"prompt": "1+1=", "chosen": "22", "rejected": "3", "by": 1.5},
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "by": 2},
        {"prompt": "1+2=", "chosen": "3", "rejected": "2", "by": -0.25},
    )
    assert encode_preferences(data, tokenizer, max_length=6).margins is None
    pairs = encode_preferences(
        data, tokenizer, max_length=6, columns=PreferenceColumns(margin="by")
    )
    assert pairs.margins == [2.0, -0.25]


@pytest.mark.parametrize("value", ["1", True, [1], float("nan"), float("inf"), -1.1e6, 10**400])
def test_a_margin_that_is_no_number_is_refused(tokenizer, value):
    data = rows(
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "by": 0.0},
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "by": value},
    )
    told = (
        r"^p\.jsonl:2: 'by' must be a number from -1e\+06 to 1e\+06, .*rm\.margin_column.*; found "
    )
    with pytest.raises(DataError, match=told) as refusal:
        encode_preferences(data, tokenizer, max_length=6, columns=PreferenceColumns(margin="by"))
    assert len(str(refusal.value)) < 150


@pytest.mark.parametrize(
    ("row", "told"), [({}, "no value for 'by'; the row has"), ({"by": None}, "'by' is null")]
)
def test_a_row_without_its_margin_is_refused(tokenizer, row, told):
    data = rows({"prompt": "1+1=", "chosen": "2", "rejected": "3", **row})
    with pytest.raises(DataError, match=rf"^p\.jsonl:1: {told}"):
        encode_preferences(data, tokenizer, max_length=6, columns=PreferenceColumns(margin="by"))


def test_sequences_are_both_sides_in_turn():
    pairs = PreferenceRows([[[5, 6, 7], [5, 6, 1, 2]], [[8, 9], [8, 3]]], [2, 1])
    sequences = pairs.sequences([1, 0])
    assert [sequences[row].tolist() for row in range(4)] == [
        [8, 9],
        [8, 3],
        [5, 6, 7],
        [5, 6, 1, 2],
    ]
    assert sequences.prompt_lengths.tolist() == [1, 1, 2, 2]
    assert sequences.width == 2


USER = {"role": "user", "content": "1+1="}
GOOD = {"role": "assistant", "content": "2"}
BAD = {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "1+1=", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": "2", "rejected": "3"},
    ],
)
def test_chat_forms_agree(tokenizer, row):
    pairs = encode_preferences(rows(row), tokenizer, max_length=20)
    assert tokenizer.decode(pairs.responses[0][0], skip_special_tokens=False) == "1+1=;2</s>"
    assert tokenizer.decode(pairs.responses[0][1], skip_special_tokens=False) == "1+1=;3</s>"


def test_long_pairs_are_dropped_whole_and_counted(tokenizer, caplog):
    data = rows(
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "1+1=", "chosen": "2", "rejected": "33"},
    )

    with caplog.at_level(logging.WARNING):
        pairs = encode_preferences(data, tokenizer, max_length=6)
    assert len(pairs) == 1
    assert (
        "dropped 1 of 2 rows (50.0%) of p.jsonl, whose sequences have more than 6 tokens"
        in caplog.text
    )

    with pytest.raises(
        DataError, match=r"p\.jsonl:2: the pair has 7 tokens, more than data.max_length 6"
    ):
        encode_preferences(data, tokenizer, max_length=6, overlong="error")
    with pytest.raises(DataError, match="none of 2"):
        encode_preferences(data, tokenizer, max_length=5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "chosen": "2"}, "no value for 'rejected'"),
        (
            {"prompt": "1", "chosen": "2", "rejected": [BAD]},
            "one of 'chosen' and 'rejected' is a string and the other a list; write both as",
        ),
        ({"prompt": "1", "chosen": "2", "rejected": 5}, ":1: 'rejected' must be a string, or"),
        ({"prompt": "1", "chosen": 5, "rejected": "2"}, ":1: 'chosen' must be a string, or"),
        (
            {"prompt": "1", "chosen": [USER], "rejected": [BAD]},
            "'chosen' must be a string, or messages",
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "?"}, BAD]},
            "differ in the last message only",
        ),
        (
            {"prompt": [{**USER, "content": "?"}], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "are not those of",
        ),
        (
            {"chosen": [USER, GOOD, GOOD], "rejected": [USER, GOOD, BAD]},
            "last message of 'chosen' is the assistant's",
        ),
        ({"prompt": [], "chosen": "2", "rejected": "3"}, "'prompt' is an empty list"),
        (
            {"chosen": [{"role": "user"}, GOOD], "rejected": [{"role": "user"}, BAD]},
            "message 1 of 'chosen' has no \"content\"",
        ),
    ],
)
def test_malformed_rows(tokenizer, row, message):
    with pytest.raises(DataError, match=message):
        encode_preferences(rows(row), tokenizer, max_length=20)


def test_pairs_that_teach_nothing_are_counted(tokenizer, caplog):
    data = rows(
        {"prompt": "1+1=", "chosen": "2", "rejected": "2"},
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": "1+1=", "chosen": "3", "rejected": "2"},
        {"prompt": "1+1=", "chosen": "2", "rejected": ""},
        {"prompt": "1+1=", "chosen": "2", "rejected": ""},
    )

    with caplog.at_level(logging.INFO):
        assert len(encode_preferences(data, tokenizer, max_length=6)) == 5
    assert (
        "the same tokens in 1 of 5 rows (20.0%) of p.jsonl; there is nothing to learn"
        in caplog.text
    )
    assert "the other way round in 2 of 5 rows (40.0%)" in caplog.text
    assert "a response is empty in 2 of 5 rows (40.0%)" in caplog.text
    assert "1 of 5 rows (20.0%)" in caplog.text and "repeat the pair of an" in caplog.text

    with pytest.raises(
        DataError, match=r"p\.jsonl:1: 'chosen' and 'rejected' are the same.* all 1"
    ):
        encode_preferences(data[:1], tokenizer, max_length=6)


def repeated():
    return rows(*({"prompt": f"p{i % 20}", "chosen": str(i), "rejected": "no"} for i in range(50)))


def test_split_keeps_a_prompt_on_one_side():
    data = repeated()
    train, held_out = split_by_prompt(data, 0.25, seed=1)
    train_prompts = {row.fields["prompt"] for row in train}
    held_prompts = {row.fields["prompt"] for row in held_out}
    assert len(held_prompts) == 5 and len(train_prompts) == 15
    assert not train_prompts & held_prompts
    assert sorted(row.number for row in train + held_out) == list(range(1, 51))

    numbers = {row.number for row in held_out}  # by the seed, and not by the order
    assert {row.number for row in split_by_prompt(data[::-1], 0.25, seed=1)[1]} == numbers
    assert {row.number for row in split_by_prompt(data, 0.25, seed=2)[1]} != numbers


def test_split_of_nothing_and_of_everything():
    data = repeated()
    assert split_by_prompt(data, 0.0, seed=1) == (data, [])
    with pytest.raises(DataError, match=r"not in \[0, 1\)"):
        split_by_prompt(data, 1.0, seed=1)
    with pytest.raises(DataError, match=r"^data\.held_out_fraction .* leaves none to train on"):
        split_by_prompt(data, 0.99, seed=1)


RANKED = {"prompt": "1+1=", "responses": ["2", "3", "11"]}
NUMBERED = {"prompt": "1+1=", "response": "2", "helpfulness": 3}


def test_rankings(tokenizer):
    columns = PreferenceColumns("rankings")
    data = rows(RANKED, {**RANKED, "prompt": "2+2=", "responses": ["4", "a"]})
    ranked = encode_preferences(data, tokenizer, max_length=9, columns=columns)
    prompt = tokenizer.encode("1+1=")
    assert ranked.responses[0] == [
        [*prompt, *tokenizer.encode(text), 2] for text in ["2", "3", "11"]
    ]
    assert (ranked.sizes([1, 0]), ranked.margins, ranked.ties) == ([2, 3], None, None)
    assert len(ranked.sequences([1, 0])) == 5

    # By place among the responses of rows 1 and 0, each row with a whole share.
    pairs = ranked.compared([1, 0])
    assert [(pair.better, pair.worse) for pair in pairs] == [(0, 1), (2, 3), (2, 4), (3, 4)]
    assert [pair.share for pair in pairs] == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    train, held_out = split_by_prompt(data, 0.5, 1, prompt_reader("rankings"))
    assert len(train) == len(held_out) == 1


def test_numbers_and_ties(tokenizer, caplog):
    columns = PreferenceColumns("targets", targets=("helpfulness", "verbosity", "coherence"))
    data = rows(NUMBERED, {**NUMBERED, "helpfulness": None, "verbosity": 0.5})
    numbered = encode_preferences(data, tokenizer, max_length=9, columns=columns)
    assert numbered.targets.nan_to_num(-1).tolist() == [[3, -1, -1], [-1, 0.5, -1]]
    assert (numbered.sizes([0]), numbered.losses([1, 0, 1])) == ([1], 3)
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "same": True}
    data = rows(pair, {**pair, "rejected": "4", "same": False})
    tied = encode_preferences(data, tokenizer, max_length=9, columns=PreferenceColumns(tie="same"))
    assert [pair.is_tie for pair in tied.compared([0, 1])] == [True, False]
    caplog.clear()
    equal = rows({**pair, "chosen": "3"})  # equal responses are no mistake in a tie
    encode_preferences(equal, tokenizer, max_length=9, columns=PreferenceColumns(tie="same"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("columns", "row", "told"),
    [
        (
            ("rankings",),
            {"responses": "2"},
            r"'responses' must be a list .* best first, .*rm\.rows",
        ),
        (("rankings",), {"responses": ["2"]}, "at least two"),
        (("rankings",), {"responses": ["2", 3]}, "at least two strings"),
        (("rankings",), {}, "no value for 'responses'"),
        (("targets", None, None, ("n", "m")), {"response": "2"}, "no value for 'n'"),
        (("targets", None, None, ("m", "n")), {"response": "2", "n": True}, r"'n' .*rm\.target_c"),
        (
            ("targets", None, None, ("n",)),
            {"response": ["2"], "n": 1},
            "'response' must be a string",
        ),
        (("pairs", None, "t"), {"chosen": "2", "rejected": "3", "t": 1}, r"true .*rm\.tie_column"),
    ],
)
def test_rows_of_other_forms_are_refused(tokenizer, columns, row, told):
    data = rows({"prompt": "1+1=", **row})
    with pytest.raises(DataError, match=rf"^p\.jsonl:1: .*{told}"):
        encode_preferences(data, tokenizer, max_length=9, columns=PreferenceColumns(*columns))
