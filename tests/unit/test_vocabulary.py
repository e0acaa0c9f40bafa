"""What must hold between a tokenizer, the vocabularies of models, and the end of a response."""

import json
import logging

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Pipeline
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import ConfigError
from mrlhf.inputs.vocabulary import (
    check_vocabularies,
    find_endings,
    ids_without_token,
    warn_of_ends,
    warn_of_undrawn,
)
from mrlhf.models.generation_config import end_token_ids, read_generation_config


@pytest.fixture(scope="module")
def tokenizer():
    """Ids 0 to 3 and 9, a special token 5 and one that is only added, 6."""
    words = {"<eos>": 0, "<unk>": 1, "a": 2, "b": 3, "word": 9}
    pipeline = Pipeline(WordLevel(words, unk_token="<unk>"))
    pipeline.add_special_tokens([AddedToken("<eos>"), AddedToken("<|im_end|>")])
    pipeline.add_tokens([AddedToken("<|end_of_turn|>")])
    backend = PreTrainedTokenizerFast(
        tokenizer_object=pipeline, eos_token="<eos>", unk_token="<unk>"
    )
    return Tokenizer(backend)


def test_the_highest_id_counts_and_not_the_number_of_tokens(tokenizer):
    assert (len(tokenizer.ids), tokenizer.highest_id) == (7, 9)
    assert tokenizer.ids == {0, 1, 2, 3, 5, 6, 9}
    check_vocabularies({"actor": 12, "critic": 10}, tokenizer.highest_id)
    with pytest.raises(ConfigError) as caught:
        check_vocabularies({"actor": 12, "critic": 9, "reward_model": 7}, tokenizer.highest_id)
    assert str(caught.value) == (
        "the tokenizer's token ids go up to 9, and critic's vocab_size is 9, reward_model's "
        "vocab_size is 7; use the tokenizer that belongs to the model, or a model with vocab_size "
        ">= 10"
    )


def test_rows_without_a_token_are_not_drawn(tokenizer):
    assert ids_without_token(12, tokenizer.ids) == [4, 7, 8, 10, 11]
    # Qwen2.5: 151,936 rows for 151,665 ids.
    assert ids_without_token(151_936, frozenset(range(151_665))) == list(range(151_665, 151_936))


def test_a_tokenizer_of_another_model_is_warned_of(tokenizer, caplog):
    warn_of_undrawn(151_936, frozenset(range(151_665)))
    warn_of_undrawn(64, tokenizer.ids)
    assert not caplog.records
    warn_of_undrawn(151_936, frozenset(range(32_000)))
    assert "119936 of the actor's 151936 token ids are not in the tokenizer" in caplog.text


def test_whole_distributions_need_equal_vocabularies():
    sizes = {"actor": 64, "reference": 96, "critic": 99}
    check_vocabularies(sizes, 60)
    with pytest.raises(ConfigError, match="actor's is 64 and reference's is 96"):
        check_vocabularies(sizes, 60, equal=("actor", "reference"))


def test_what_ends_a_response(tokenizer):
    ends = {6: "generation_config.json", 55: "config.json", 0: "config.json"}
    endings = find_endings(["<|im_end|>", "word", "<eos>"], [3], ends, tokenizer)
    assert endings.token_ids == (0, 6, 5, 3)
    assert endings.strings == ("word",)
    assert find_endings(["<|end_of_turn|>"], [], {}, tokenizer).strings == ("<|end_of_turn|>",)

    with pytest.raises(ConfigError) as caught:
        find_endings(["zebra"], [4], {}, tokenizer)
    string, token = str(caught.value).splitlines()
    assert string.startswith("rollout.stop holds 'zebra', which the tokenizer's decoded text never")
    assert token.startswith("rollout.stop_token_ids holds 4, which is no token of the tokenizer")


def test_an_end_token_has_no_text_at_the_end(tokenizer):
    assert tokenizer.decode([2, 6]) == "a <|end_of_turn|>"
    ending = tokenizer.ending_with({6, 2})
    assert ending.decode([2, 6]) == "a"
    assert ending.decode([2, 6, 0]) == "a <|end_of_turn|>"
    assert ending.decode([2, 6], skip_special_tokens=False) == "a <|end_of_turn|>"


def test_odd_end_tokens_are_warned_of(tokenizer, caplog):
    files = {0: "config.json", 5: "config.json", 6: "config.json"}
    with caplog.at_level(logging.WARNING):
        warn_of_ends(files, tokenizer, draws=True)
        assert not caplog.records
        odd = {3: "config.json", 70: "generation_config.json"}
        warn_of_ends(odd, tokenizer, draws=True)
    ordinary, unknown, other = (record.message for record in caplog.records)
    assert other.startswith("the tokenizer's end token is 0 ('<eos>'), and config.json and")
    assert ordinary.startswith("responses end after token 3 ('b'), which config.json names")
    assert unknown.startswith("generation_config.json names token 70 as eos_token_id, which")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, {}),
        ({"eos_token_id": None}, {"eos_token_id": None}, {}),
        ({"eos_token_id": 5}, None, {5: "config.json"}),
        ({"eos_token_id": [5, 6]}, {}, {5: "config.json", 6: "config.json"}),
        (
            {"eos_token_id": 5},
            {"eos_token_id": [7, 5]},
            {5: "generation_config.json", 7: "generation_config.json"},
        ),
    ],
)
def test_end_tokens_of_the_files(config, generation, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_token_ids(tmp_path) == expected
    assert end_token_ids(tmp_path / "absent") == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not readable as JSON"),
        ("{", "not readable as JSON"),
        ("[2]", "a JSON object is needed, not list"),
        ('{"eos_token_id": "</s>"}', "must be a token id or a list of them, not '</s>'"),
        ('{"eos_token_id": [2, null]}', "must be a token id or a list of them"),
        ('{"eos_token_id": true}', "must be a token id or a list of them"),
        ('{"eos_token_id": 2.0}', "must be a token id or a list of them"),
    ],
)
def test_a_broken_file_is_one_line(text, expected, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json: ") as caught:
        end_token_ids(tmp_path)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_generation_config_is_read_as_it_is_if_transformers_loads_it(tmp_path):
    file = tmp_path / "generation_config.json"
    assert read_generation_config(tmp_path) is None
    text = '{"eos_token_id": [2, 7],  "temperature": 0.6, "unknown": 1}'
    file.write_text(text)
    assert read_generation_config(tmp_path) == text

    file.write_text('{"eos_token_id": 2, "max_new_tokens": -4, "cache_implementation": "x"}')
    with pytest.raises(ConfigError, match="transformers refuses it: ") as caught:
        read_generation_config(tmp_path)
    assert "\n" not in str(caught.value)
