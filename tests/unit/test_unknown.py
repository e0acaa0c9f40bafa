"""Text that a tokenizer does not know is warned of, with its share."""

import logging

import pytest
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from configs.recipes.data.vocabulary import train_sentencepiece
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.data.unknown import warn_of_lost_characters, warn_of_unknown_tokens


@pytest.fixture
def digits(tmp_path):
    """A tokenizer of ten digits, "+" and "=", to which all else is <unk>."""
    return load_tokenizer(
        train_sentencepiece([*"0123456789+="], tmp_path, vocab_size=32, byte_fallback=False)
    )


def warnings_of(caplog, texts, tokenizer):
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        tokens = [tokenizer.encode(text) for text in texts]
        warn_of_unknown_tokens(tokens, tokenizer, "data.train_files")
        warn_of_lost_characters(texts, tokens, tokenizer, "data.train_files")
    return [record.message for record in caplog.records]


def test_the_share_of_unknown_tokens_is_named_once(digits, caplog):
    assert warnings_of(caplog, ["1+1=", "2+2="] * 10, digits) == []
    assert warnings_of(caplog, ["1+1="] * 99 + ["x"], digits) == []
    (warning,) = warnings_of(caplog, ["1+1=", "12x34y5"], digits)
    assert warning.startswith("18.2 % of the tokens of data.train_files are <unk>: ")


def test_an_unk_that_is_eos_too_is_not_counted(caplog):
    """GPT-2's; its bytes know every text, and eos may stand in a prompt."""
    pipeline = Pipeline(models.BPE(vocab={"<|end|>": 0, "a": 1}, merges=[]))
    pipeline.decoder = decoders.Fuse()
    backend = PreTrainedTokenizerFast(
        tokenizer_object=pipeline, eos_token="<|end|>", unk_token="<|end|>"
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.unk_id is None
    assert warnings_of(caplog, ["a<|end|>a"], tokenizer) == []

    (warning,) = warnings_of(caplog, ["aab", "abb c"], tokenizer)
    assert warning.startswith("57.1 % of the characters of data.train_files have no token and ")
