"""Where a stop string ends a response, against the text of all tokens after each token."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from configs.recipes.data.vocabulary import train_sentencepiece
from mrlhf.data.subword import convert_sentencepiece
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.inference.stopping import StopSearch

PIECES = ["Hel", "lo", " wor", "ld", "!", "\\n", "Hu", "man", ":"]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CORPUS = [
    "She sold 48 clips, and half as many in May .\nAnswer: don't  stop 😡 now, 日本語 ½.",
    "  aa ab ba bb   naïve café – “quoted” <tool_call> #### 72\n\n",
] * 4
TEXTS = st.text(alphabet="ab .!'nt<>/😡😀日本語½é\n", max_size=12)


def joined(token_ids):
    return "".join(PIECES[token] for token in token_ids)


def end_of(search: StopSearch, token_ids: list[int]) -> int | None:
    """After how many tokens the search finds something."""
    found = (count for count, token in enumerate(token_ids, 1) if search.append(token))
    return next(found, None)


def slow_end_of(decode, stop, token_ids: list[int]) -> int | None:
    texts = (decode(token_ids[:count]) for count in range(1, len(token_ids) + 1))
    ends = (count for count, text in enumerate(texts, 1) if any(s in text for s in stop))
    return next(ends, None)


@pytest.mark.parametrize(
    ("tokens", "stop", "end"),
    [
        ([0, 1, 2, 3, 4], ("world",), 4),  # completed by the fourth token
        ([0, 1, 2, 3, 4], ("lo w",), 3),  # in the middle of a token
        ([0, 1, 2, 3, 4], ("!", "Hello"), 2),  # the first of several
        ([5, 6, 7, 8, 0], ("\\nHuman:",), 4),
        ([0], ("Hel",), 1),
        ([0, 1], ("absent",), None),
        ([], ("x",), None),
    ],
)
def test_the_end_is_after_the_token_that_completes_a_stop_string(tokens, stop, end):
    assert end_of(StopSearch(joined, stop), tokens) == end


def fast(pipeline: Pipeline, trainer, **options) -> Tokenizer:
    pipeline.train_from_iterator(CORPUS, trainer)
    names = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>"}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=pipeline, **names, **options))


def byte_level(folder, vocab_size=300, **options) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it; most characters beyond ASCII are several tokens."""
    pipeline = Pipeline(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return fast(pipeline, trainer, **options)


def cleaned(folder) -> Tokenizer:
    return byte_level(folder, clean_up_tokenization_spaces=True)


def word_pieces(folder) -> Tokenizer:
    """As BERT has it: pieces of words begin with ##."""
    pipeline = Pipeline(models.WordPiece(unk_token="<unk>"))
    pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
    pipeline.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False)
    return fast(pipeline, trainer)


def unigram(folder) -> Tokenizer:
    """As T5 has it: the text begins with a space that decoding takes away."""
    pipeline = Pipeline(models.Unigram())
    pipeline.pre_tokenizer = pre_tokenizers.Metaspace()
    pipeline.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=110, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    return fast(pipeline, trainer)


def byte_fallback(folder) -> Tokenizer:
    """As Llama 2 and Mistral have it: bytes in a row are text only if all of them are."""
    plain = [text.encode("ascii", "ignore").decode() for text in CORPUS]
    return load_tokenizer(train_sentencepiece(plain, folder, vocab_size=320))


def prepended_space(folder) -> Tokenizer:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "spaced"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return Tokenizer(convert_sentencepiece(folder / "spaced.model"))


BUILDERS: list[Callable[..., Tokenizer]] = [
    byte_level,
    cleaned,
    word_pieces,
    unigram,
    byte_fallback,
    prepended_space,
]


@pytest.fixture(scope="module", params=BUILDERS, ids=lambda builder: builder.__name__)
def tokenizer(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("tokenizer"))


@st.composite
def responses(draw, size):
    """Parts of a response: texts, special tokens and other tokens of any kind, some repeated."""
    part = st.one_of(
        TEXTS,
        st.sampled_from([0, 1, 2, 3]).map(lambda token: [token]),
        st.lists(st.integers(0, size - 1), max_size=6),
    )
    many = st.tuples(part, st.integers(1, 30)).map(lambda pair: pair[0] * pair[1])
    return draw(st.lists(st.one_of(part, many), max_size=12))


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_tokenizer_stops_where_the_whole_text_has_the_string(tokenizer, data):
    parts = data.draw(responses(len(tokenizer.ids)))
    tokens = [
        token
        for part in parts
        for token in (tokenizer.encode(part) if isinstance(part, str) else part)
    ]
    text = tokenizer.decode(tokens)
    stop = data.draw(st.lists(TEXTS.filter(bool), min_size=1, max_size=2))
    if text:
        start = data.draw(st.integers(0, len(text) - 1))
        stop.append(text[start : start + data.draw(st.integers(1, 40))])

    # Most stop strings end the response early; without those, the rest is searched too.
    for strings in (stop, stop[-1:]):
        wanted = slow_end_of(tokenizer.decode, strings, tokens)
        assert end_of(StopSearch(tokenizer.decode, strings), tokens) == wanted


@pytest.mark.parametrize("stop", ["😡 ", "本", "語 ½", "½."])
def test_characters_of_several_tokens_are_found_far_into_a_response(tmp_path, stop):
    for build in (byte_level, byte_fallback):
        tokenizer = build(tmp_path)
        tokens = tokenizer.encode("a long story, " * 20 + "😀" * 40 + "日日½" * 30)
        ending = [token for part in tokenizer.encode("😡 本語 ½.") for token in (part, 0, 0, 0, 0)]
        tokens += ending
        wanted = slow_end_of(tokenizer.decode, (stop,), tokens)
        assert wanted is not None and wanted > len(tokens) - len(ending)
        assert end_of(StopSearch(tokenizer.decode, (stop,)), tokens) == wanted


@pytest.mark.parametrize("build", [byte_level, byte_fallback, prepended_space])
@pytest.mark.parametrize("filler", ["日", "😀", "é½", "日a"])
def test_no_place_in_a_row_of_characters_is_cut(tmp_path, build, filler):
    """Whatever the length of the response, its tail begins with a whole character."""
    tokenizer = build(tmp_path)
    stop = ("本本本",)
    for count in range(20, 80):
        tokens = tokenizer.encode(filler * count + "本本本")
        assert slow_end_of(tokenizer.decode, stop, tokens[-9:]) is not None
        assert end_of(StopSearch(tokenizer.decode, stop), tokens) == len(tokens)


def test_a_broken_row_of_bytes_hides_a_stop_string(tmp_path):
    """Bytes in a row are text only if all are, and the first of these is not."""
    tokenizer = byte_fallback(tmp_path)
    end = tokenizer.encode("本本")
    tokens = [tokenizer.encode("日")[0], *tokenizer.encode("日" * 30), *end]
    assert len(end) == 6 and "本" not in tokenizer.decode(tokens)
    search = StopSearch(tokenizer.decode, ("本",))
    assert end_of(search, tokens) is None
    assert end_of(search, tokenizer.encode(" and 本")) == len(tokenizer.encode(" and 本"))


@pytest.mark.parametrize("part", ["some words, ", "😀", "日", 0, 200])
def test_a_long_response_is_not_decoded_again_and_again(tmp_path, part):
    """Texts, characters of four and three bytes, a special token, and a byte that is no text."""
    tokenizer = byte_level(tmp_path)
    decoded = 0

    def decode(token_ids):
        nonlocal decoded
        decoded += len(token_ids)
        return tokenizer.decode(token_ids)

    tokens = (tokenizer.encode(part) if isinstance(part, str) else [part]) * 400
    assert end_of(StopSearch(decode, ("</answer>",)), tokens) is None
    assert decoded < 200 * len(tokens)
