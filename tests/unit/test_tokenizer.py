"""The fast tokenizer against the sentencepiece model that it was made from.

Also chat templates, and what is refused of a tokenizer, a template or a text.
"""

import json
import os
import random
from array import array

import pytest
import sentencepiece
import transformers
from tokenizers.processors import TemplateProcessing

import mrlhf.data.tokenizer as tokenizer_file
from configs.recipes.data.vocabulary import train_sentencepiece
from mrlhf.data.subword import MODEL_FILE
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.errors import DataError
from mrlhf.rewards.interface import PlacedValue
from mrlhf.rollout.response import Response

CORPUS = [
    "Question: Natalia sold clips to 48 of her friends in April, and then she sold half as many in "
    "May.\nAnswer:\nNatalia sold 48/2 = <<48/2=24>>24 clips in May.\n"
    "She sold 48+24 = <<48+24=72>>72 clips altogether.\n#### 72",
    "Question: Weng earns $12.50 an hour for babysitting — a “small” sum.  How much did she earn?\n"
    "Answer:\nWeng earns 12/60 = $<<12/60=0.2>>0.2 a minute.\n\n"
    "Working 50 minutes, she earned 0.2 x 50 = $10.\n#### 10",
    "aaaa bbbb abab abababab ssss lloo ooo a aa aaa aba ababa baab sessess",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return train_sentencepiece(CORPUS * 4, tmp_path_factory.mktemp("subword"), vocab_size=500)


@pytest.fixture(scope="module")
def reference(directory):
    processor = sentencepiece.SentencePieceProcessor()
    processor.Load(str(directory / MODEL_FILE))
    return processor


def strings():
    rng = random.Random(0)
    alphabet = "abelostN $#<>=.,0123456789\n\t\r—é½日😀"
    mixed = ["".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(1500)]
    # With few letters, repeated, there are many ways to join the same pieces.
    repeats = [
        "".join(rng.choices(["a", "b", "o", "s", "ab", "ss", "e"], k=rng.randrange(1, 25)))
        for _ in range(1500)
    ]
    return [*CORPUS, "", " ", "  \n ", "<0x41>", "▁", *mixed, *repeats]


def assert_same(tokenizer, reference):
    for text in strings():
        if any(name in text for name in ("<pad>", "<s>", "</s>", "<unk>")):
            continue
        ids = reference.Encode(text)
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == reference.Decode(ids), text
        if "▁" not in text:
            assert tokenizer.decode(ids) == text


def test_a_character_is_held_by_the_token_that_completes_it(directory, reference):
    tokenizer = load_tokenizer(directory)
    texts = [text for text in strings() if text and text == text.strip()][::40]
    assert any("😀" in text for text in texts)
    for text in texts:
        ids = reference.Encode(text)
        parts = [reference.Decode(ids[: i + 1]) for i in range(len(ids))]
        wanted = [
            min(i for i, part in enumerate(parts) if part.startswith(text[: at + 1]))
            for at in range(len(text))
        ]
        placed = [PlacedValue("character", at, 1.0) for at in range(len(text))]
        placed.append(PlacedValue("token", 0, 1.0))
        response = Response("", "", None, {}, array("i", [*ids, tokenizer.eos_id]), None)
        assert [at for at, _ in response.places(placed, tokenizer)] == [*wanted, 0], text
        # In an episode the text is that of the last turn, and tokens count from the first turn.
        turns = array("i", [*ids, 5, *ids])
        response = Response("", "", None, {}, turns, range(len(ids) + 1, len(turns)))
        later = [token + len(ids) + 1 for token in wanted]
        assert [at for at, _ in response.places(placed, tokenizer)] == [*later, 0], text


def test_equals_sentencepiece(directory, reference):
    tokenizer = load_tokenizer(directory)
    assert len(tokenizer.ids) == reference.GetPieceSize() == 500
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert_same(tokenizer, reference)
    auto = transformers.AutoTokenizer.from_pretrained(directory)
    for text in CORPUS:
        assert auto.encode(text, add_special_tokens=False) == reference.Encode(text)


@pytest.mark.parametrize("config", ["LlamaConfig", "Qwen2Config", "Qwen3Config", "MistralConfig"])
def test_equals_sentencepiece_beside_a_model(config, directory, reference, tmp_path):
    """transformers chooses the tokenizer class by config.json; the vocabulary must not change."""
    load_tokenizer(directory).save_pretrained(tmp_path)
    getattr(transformers, config)(vocab_size=500).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    for text in [*CORPUS, "é 日 😀\n"]:
        assert tokenizer.encode(text) == reference.Encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bare_model_file(directory, reference, tmp_path):
    (tmp_path / MODEL_FILE).write_bytes((directory / MODEL_FILE).read_bytes())
    for path in (tmp_path, tmp_path / MODEL_FILE):
        assert load_tokenizer(path).encode(CORPUS[0]) == reference.Encode(CORPUS[0])


def train_plain(path, **options):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_prefix=str(path / "tokenizer"),
        minloglevel=2,
        **options,
    )
    return path / MODEL_FILE


def test_bare_model_with_a_prepended_space(tmp_path):
    """Llama 2 has a model of this kind."""
    options = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
    }
    file = train_plain(tmp_path, model_type="bpe", vocab_size=400, **options)
    reference = sentencepiece.SentencePieceProcessor()
    reference.Load(str(file))
    tokenizer = load_tokenizer(file)
    assert reference.Encode("She sold", out_type=str)[0].startswith("▁")
    for text in CORPUS:
        ids = reference.Encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


def test_refuses_what_it_cannot_convert(tmp_path):
    file = train_plain(tmp_path, model_type="unigram", vocab_size=150, hard_vocab_limit=False)
    with pytest.raises(DataError, match="not BPE, or it normalises text"):
        load_tokenizer(file)


def test_digits_stand_alone_and_parts_join(directory):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("37+48=") + tokenizer.encode("85") == tokenizer.encode("37+48=85")
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1024")] == ["1", "0", "2", "4"]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("\n\n")] == ["\n", "\n"]
    assert tokenizer.encode_response("85") == [*tokenizer.encode("85"), tokenizer.eos_id]


def test_small_vocabulary_without_bytes(tmp_path):
    texts = [*"0123456789+=", *(f"{a}+{a}={2 * a}" for a in range(50))]
    tokenizer = load_tokenizer(
        train_sentencepiece(texts, tmp_path, vocab_size=32, byte_fallback=False)
    )
    assert len(tokenizer.ids) == 4 + 1 + 12  # special, newline, symbols
    assert tokenizer.decode(tokenizer.encode("37+48=")) == "37+48="
    assert tokenizer.encode("xyz") == [3]


def chat_directory(directory, tmp_path, template):
    load_tokenizer(directory).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": template})
    )
    return tmp_path


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_prompts_begin_as_the_family_has_it_and_do_not_end(directory):
    """If a tokenizer puts bos and eos around a text, a prompt keeps bos and a response gets eos."""
    wrapping = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    wrapping.backend_tokenizer.post_processor = TemplateProcessing(
        "<s> $A </s>", None, [("<s>", 1), ("</s>", 2)]
    )
    tokenizer = Tokenizer(wrapping)
    assert wrapping.encode("2+2=")[-1] == 2
    assert tokenizer.encode_prompt("2+2=") == ("2+2=", [1, *tokenizer.encode("2+2=")])
    assert tokenizer.encode_response("4") == [*tokenizer.encode("4"), 2]


def test_chat_template(directory, tmp_path):
    tokenizer = load_tokenizer(chat_directory(directory, tmp_path, TEMPLATE))
    text, ids = tokenizer.encode_prompt([{"role": "user", "content": "2+2?"}])
    assert text == "<s>[user]2+2?\n[assistant]"
    assert ids == [1, *tokenizer.encode("[user]2+2?\n[assistant]")]
    assert tokenizer.encode_prompt("2+2?") == ("2+2?", tokenizer.encode("2+2?"))


def test_chat_template_from_a_file(directory, tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(directory, chat_template=tmp_path / "chat.jinja")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"


def test_no_chat_template_says_what_to_set(directory):
    tokenizer = load_tokenizer(directory)
    assert not tokenizer.has_chat_template
    with pytest.raises(DataError, match=r"set data\.chat_template to a jinja file"):
        tokenizer.encode_prompt([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("whole", [False, True])
def test_code_beside_a_tokenizer_is_never_run(directory, tmp_path, whole, monkeypatch):
    """It is refused where nothing else would serve, and not used where the files are enough."""
    if whole:
        load_tokenizer(directory).save_pretrained(tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["theirs.Tokenizer", "theirs.Tokenizer"]}
    config["tokenizer_class"] = "PreTrainedTokenizerFast" if whole else "Theirs"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    (tmp_path / "theirs.py").write_text("raise SystemExit('ran')\n")

    if whole:
        expected = load_tokenizer(directory).encode(CORPUS[0])
        assert load_tokenizer(tmp_path).encode(CORPUS[0]) == expected
    else:
        message = r"needs Python code of its own \(auto_map\), which is never run; save it anew"
        with pytest.raises(DataError, match=message):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        None,
        {},
        {"config.json": {"model_type": "qwen2"}},
        {"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}},
        {"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "</s>"}},
    ],
)
def test_a_directory_without_a_tokenizer_is_said_to_be(files, tmp_path):
    if files is None:
        with pytest.raises(DataError, match="does not exist"):
            load_tokenizer(tmp_path / "nowhere")
        return

    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"tokenizer {tmp_path}: the directory holds no tokenizer.json, tokenizer.model, "
        "vocab.json or vocab.txt; name one that holds the tokenizer's files"
    )


@pytest.mark.parametrize("name", ["tokenizer.json", MODEL_FILE])
def test_a_git_lfs_pointer_is_said_to_be(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\nsize 12345\n")
    with pytest.raises(DataError, match=f"{name}: a Git LFS pointer .*; run `git lfs pull` there"):
        load_tokenizer(tmp_path)


def test_a_pipe_in_the_place_of_a_model_is_refused(tmp_path):
    os.mkfifo(tmp_path / MODEL_FILE)
    with pytest.raises(DataError, match="it is a directory, a pipe or a device"):
        load_tokenizer(tmp_path)


def broken(text, **changes):
    return json.dumps({**json.loads(text), **changes})


BROKEN_MODELS = {
    "no file at all": (lambda text: "", r"tokenizer\.json: not readable as JSON"),
    "cut": (lambda text: text[:500], r"tokenizer\.json: not readable as JSON"),
    "empty": (lambda text: "{}", r'tokenizer\.json: no "model"'),
    "list": (lambda text: "[]", r"tokenizer\.json: a JSON object is needed, not list"),
    "null": (lambda text: "null", r"tokenizer\.json: a JSON object is needed, not NoneType"),
    "no model": (lambda text: broken(text, model=None), r'tokenizer\.json: no "model"'),
    "unknown model": (lambda text: broken(text, model={"type": "x"}), "cannot load a tokenizer"),
    "other version": (lambda text: broken(text, version="9"), "Unknown tokenizer version '9'"),
    "odd tokens": (lambda text: broken(text, added_tokens="x"), "cannot load a tokenizer"),
    "odd decoder": (lambda text: broken(text, decoder={"type": "x"}), "cannot load a tokenizer"),
    "no text": (
        lambda text: broken(text, model={"type": "BPE", "vocab": {}, "merges": []}),
        "has no tokens for text; its files are damaged",
    ),
}
BROKEN_CONFIGS = {
    "nothing": (lambda text: "", r"tokenizer_config\.json: not readable as JSON"),
    "list": (lambda text: "[1]", r"tokenizer_config\.json: a JSON object is needed, not list"),
    "class": (lambda text: broken(text, tokenizer_class=3), "cannot load a tokenizer"),
    "eos": (lambda text: broken(text, eos_token=2), "Special token eos_token has to be"),
    "no eos": (lambda text: broken(text, eos_token=None), "has no eos token"),
    "added": (lambda text: broken(text, added_tokens_decoder=[]), "cannot load a tokenizer"),
    "length": (lambda text: broken(text, model_max_length="x"), "cannot load a tokenizer"),
    "template": (lambda text: broken(text, chat_template=[1]), "cannot load a tokenizer"),
}


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [("tokenizer.json", *case) for case in BROKEN_MODELS.values()]
    + [("tokenizer_config.json", *case) for case in BROKEN_CONFIGS.values()],
    ids=[*BROKEN_MODELS, *(f"config {name}" for name in BROKEN_CONFIGS)],
)
def test_a_broken_tokenizer_is_one_line(name, change, expected, directory, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((directory / file).read_bytes())
    (tmp_path / name).write_text(change((directory / name).read_text()))
    with pytest.raises(DataError, match=expected) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("content", [b"", b"hello", b"{}", bytes(100)])
@pytest.mark.parametrize("config", [None, {"tokenizer_class": "LlamaTokenizer"}])
def test_a_broken_sentencepiece_model_is_one_line(content, config, tmp_path):
    (tmp_path / MODEL_FILE).write_bytes(content)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"not a sentencepiece model|no tokens for text") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_chat_template_is_bounded_in_length_and_time_and_in_what_it_writes(
    directory, tmp_path, monkeypatch
):
    monkeypatch.setattr(tokenizer_file, "_LONGEST_RENDER_S", 0.05)
    file = tmp_path / "chat.jinja"
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for template, expected in (
        (loops, r"chat\.jinja has not ended after 0\.05 s of computing"),
        ("x" * 1_000_001, r"chat\.jinja has more than 1000000 characters"),
        ("{% for i in range(200) %}{{ 'x' * 9999 }}{% endfor %}", "makes 1999800 characters"),
    ):
        file.write_text(template)
        with pytest.raises(DataError, match=expected) as caught:
            load_tokenizer(directory, chat_template=file)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300

    # The tokenizer's own template, which is first used with the data.
    own = load_tokenizer(chat_directory(directory, tmp_path, loops))
    with pytest.raises(DataError, match="the chat template has not ended after"):
        own.encode_prompt([{"role": "user", "content": "2+2?"}])


def test_broken_chat_templates_are_one_line(directory, tmp_path):
    file = tmp_path / "chat.jinja"
    for content, expected in (
        (b"\xff\xfe", "cannot read the chat template"),
        (b"{% for m in messages %}", r"chat\.jinja is no jinja: "),
        (b"{{ messages[ }}", r"chat\.jinja is no jinja: "),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=expected) as caught:
            load_tokenizer(directory, chat_template=file)
        assert "\n" not in str(caught.value)

    # These fail with some messages, or with all, but only when they are run.
    for template, expected in (
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ({"other": "x"}, "multiple chat templates with no default"),
        (3, "Can't compile non template nodes"),
    ):
        tokenizer = load_tokenizer(chat_directory(directory, tmp_path, template))
        with pytest.raises(DataError, match=f"the chat template refuses .*{expected}") as caught:
            tokenizer.encode_prompt([{"role": "user", "content": "hi"}])
        assert "\n" not in str(caught.value)


def test_text_that_cannot_be_encoded_is_one_line(directory):
    with pytest.raises(DataError, match=r"cannot encode the text that begins 'a\\udc00'") as caught:
        load_tokenizer(directory).encode("a\udc00")
    assert "\n" not in str(caught.value)


def test_the_pieces_of_tokens_add_up_to_the_text(directory):
    tokenizer = load_tokenizer(directory)
    text = "Weng earns $12.50 — a “small” 和 sum.\nGood: é"
    ids = tokenizer.encode(text)
    (pieces,) = tokenizer.pieces([ids])
    assert len(pieces) == len(ids)
    assert "".join(pieces).removeprefix(" ") == tokenizer.decode(ids) == text
