"""Equal rows in jsonl and in parquet, and messages in the forms that other programs write."""

import datetime
import json
import random
import uuid
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import processors

from mrlhf.data.preferences import encode_preferences
from mrlhf.data.prompts import PromptDataset
from mrlhf.data.reference_answers import reference_answer
from mrlhf.data.rows import read_rows
from mrlhf.data.sft import encode_sft
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.episodes.environments.programs import ProgramError, said
from mrlhf.errors import DataError
from mrlhf.messages import read_message
from tests.models.chat import chat_tokenizer

ASK = {"role": "user", "content": "What is 1 + 2?"}
ADD = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": 1}}}
TOLD = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "3"}
WITH_TOOLS = ("qwen2.5", "qwen3", "llama3.1", "mistral_v3", "mistral_nemo", "deepseek_v3", "glm4")
DAY = datetime.date(2024, 2, 29)
MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 1)


def thinned(value, rng):
    """A copy of a value of JSON in which some entries of objects are missing."""
    if isinstance(value, dict):
        kept = {"role", "content", "type", "function", "name", "properties", "text"}
        names = [name for name in value if name in kept or rng.random() < 0.6]
        return {name: thinned(value[name], rng) for name in names}
    if isinstance(value, list):
        return [thinned(item, rng) for item in value]
    return value


def full_row(rng):
    """A row with every key that one may have, as JSON."""
    number = rng.choice([1, 0.5, 7.25, 10**6])
    note = {"type": "string", "description": "a word", "enum": ["x", "y"], "minimum": number}
    parameters = {"type": "object", "properties": {"a": note, "b": note}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    arguments = {"a": number, "b": {"c": [number, 2], "d": True}, "e": "x"}
    call = {"type": "function", "id": "call00000", "function": {"name": "add"}}
    call["function"]["arguments"] = arguments
    said_before = {"role": "assistant", "content": "so", "tool_calls": [call]}
    last = {"role": "assistant", "content": str(number), "name": "x"}
    talk = [ASK, said_before, TOLD]

    return {
        "prompt": talk,
        "response": "3",
        "tools": [tool],
        "answer": {"value": number, "units": {"m": number, "s": None}, "of": [{"k": 1, "l": 2}]},
        "extra_info": {"level": number, "tags": [{"t": 1}, {"u": "v"}]},
        "chosen": [*talk, last],
        "rejected": [*talk, {**last, "content": "no"}],
    }


@pytest.mark.parametrize("seed", range(12))
def test_rows_give_the_same_in_both_forms(seed, tmp_path):
    rng = random.Random(seed)
    every = [full_row(rng), *(thinned(full_row(rng), rng) for _ in range(5))]
    for row in every[1:]:  # the columns that a program needs
        row |= {key: row.get(key, every[0][key]) for key in ("prompt", "response")}
        for side in ("chosen", "rejected"):
            row[side] = [*row["prompt"], thinned(every[0][side][-1], rng)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in every))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(every), tmp_path / "a.parquet")

    for family in ("qwen2.5", "mistral_nemo"):
        tokenizer = chat_tokenizer(family)
        found = []
        for name in ("a.jsonl", "a.parquet"):
            rows = read_rows([tmp_path / name])
            data = PromptDataset([tmp_path / name], tokenizer, max_prompt_length=9999)
            prompts = data.batch(range(len(data)))
            pairs = encode_preferences(rows, tokenizer, max_length=9999)
            examples = [e.token_ids for e in encode_sft(rows, tokenizer, max_length=9999)]
            answers = (prompts.token_ids, prompts.ground_truth, prompts.extra_info)
            found.append((*answers, examples, pairs.responses))
            assert not any("null" in text or "None" in text for text in prompts.text)
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pyarrow.float16(), [0.1, 2.5, 3.14], ["0.1", "2.5", "3.14"]),
        (pyarrow.float32(), [3.14, 1e-7, 16777216.0], ["3.14", "0.0000001", "16777216"]),
        (pyarrow.float64(), [3.14, 0.1, 18.0], ["3.14", "0.1", "18"]),
        (pyarrow.decimal128(38, 10), [Decimal("3.14"), Decimal(18)], ["3.14", "18"]),
        (pyarrow.int8(), [7, None], ["7", None]),
        (pyarrow.bool_(), [True, False], [True, False]),
        (pyarrow.large_string(), ["a"], ["a"]),
        (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), ["a", "b"], ["a", "b"]),
        (pyarrow.list_view(pyarrow.float32()), [[0.1, None]], [[0.1, None]]),
        (pyarrow.large_list(pyarrow.decimal128(9, 3)), [[Decimal("0.1")]], [[0.1]]),
        (pyarrow.map_(pyarrow.string(), pyarrow.float32()), [[("a", 0.1)]], [{"a": 0.1}]),
        (pyarrow.date32(), [DAY], ["2024-02-29"]),
        (pyarrow.timestamp("us"), [MOMENT], ["2024-02-29 12:30:01"]),
        (pyarrow.timestamp("ns"), [MOMENT], ["2024-02-29 12:30:01"]),
        (pyarrow.time64("us"), [MOMENT.time()], ["12:30:01"]),
        (pyarrow.uuid(), [uuid.UUID(int=7).bytes], [str(uuid.UUID(int=7))]),
    ],
)
def test_values_are_read_as_json_has_them(kind, values, expected, tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"answer": pyarrow.array(values, kind)})
    pyarrow.parquet.write_table(table, path)
    assert [reference_answer(row, {}) for row in read_rows([path])] == expected


def test_a_decimal_with_more_digits_than_a_float_is_kept(tmp_path):
    digits = "3.14159265358979323846264338327950288"
    kind = pyarrow.decimal128(38, 36)
    table = pyarrow.table({"answer": pyarrow.array([Decimal(digits)], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert reference_answer(read_rows([tmp_path / "a.parquet"])[0], {}) == digits


def prompt_ids(tmp_path, tokenizer, prompt, **columns):
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps({"prompt": prompt, **columns}) + "\n")
    return PromptDataset([path], tokenizer, max_prompt_length=9999)[0].token_ids[0]


def adding(family, single):
    """The family's tokenizer, which adds special tokens itself, as `single` says."""
    backend = chat_tokenizer(family)._backend
    special = [
        (token, backend.convert_tokens_to_ids(token)) for token in single.split() if token != "$A"
    ]
    backend._tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=special
    )
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("family", "single"),
    [
        ("llama3.1", "<|begin_of_text|> $A"),
        ("llama3.1", "<|begin_of_text|> $A <|end_of_text|>"),  # another end than eos
        ("gemma", "<bos> $A <eos>"),
        ("glm4", "[gMASK] <sop> $A"),
        ("qwen2.5", "$A <|im_end|>"),
    ],
)
def test_special_tokens_of_a_text_are_neither_doubled_nor_lost(family, single, tmp_path):
    tokenizer = adding(family, single)
    eos = tokenizer.decode([tokenizer.eos_id], False)
    begin = tokenizer.encode(single.partition("$A")[0].replace(" ", ""))
    rendered = tokenizer.apply_chat_template([ASK])
    for text, expected in (
        (rendered, prompt_ids(tmp_path, tokenizer, [ASK])),
        ("1 + 1 = 2", [*begin, *tokenizer.encode("1 + 1 = 2")]),
        (f"1{eos}2{eos}", [*begin, *tokenizer.encode(f"1{eos}2{eos}")]),
        (f"{tokenizer.decode(begin, False)}1", [*begin, *tokenizer.encode("1")]),
    ):
        if not rendered.startswith(tokenizer.decode(begin, False)) and text == rendered:
            continue  # such a template leaves the beginning out
        assert prompt_ids(tmp_path, tokenizer, text) == expected

    # What is to be learned ends once, if its text has the end too.
    for response in ("3", f"3{eos}"):
        assert tokenizer.encode_response(response) == [*tokenizer.encode("3"), tokenizer.eos_id]


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_calls_of_other_forms_are_those_of_templates(family, tmp_path):
    tokenizer = chat_tokenizer(family)
    function = ADD["function"]

    def ids(call, **message):
        said_before = {"role": "assistant", "content": "", "tool_calls": [call]} | message
        return prompt_ids(tmp_path, tokenizer, [ASK, said_before, TOLD])

    expected = ids(ADD)
    text = tokenizer.decode(expected, False)
    assert "add" in text
    assert '{"a": 1}' in text
    as_text = {**ADD, "function": {**function, "arguments": '{"a": 1}'}}
    assert ids(as_text) == expected
    assert ids(as_text, content=None) == expected
    assert ids(ADD, content=[{"type": "text", "text": ""}]) == expected
    assert ids({"id": "call00000", **function}) == expected
    for key in ("parameters", "input"):
        assert ids({"id": "call00000", "name": "add", key: {"a": 1}}) == expected
    assert ids({**ADD, "function": {**function, "arguments": {"a": 1.0}}}) == expected


WANTS_NONE = (  # and text, as the templates of DeepSeek do
    "{% for m in messages %}{% if m.content is not none %}{{ m.role + m.content }}{% else %}"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
TO_JSON = ("c.function.arguments", "(c.function.arguments | tojson(ensure_ascii=False))")
WRITES_TEXT = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("template", [WANTS_NONE, WRITES_TEXT])
def test_a_template_may_take_arguments_as_text(template, tmp_path):
    tokenizer = chat_tokenizer("qwen2.5", template)
    for arguments in ({"a": 1}, '{"a": 1}'):
        for content in ({}, {"content": None}, {"content": ""}):
            call = {**ADD, "function": {"name": "add", "arguments": arguments}}
            said_before = {"role": "assistant", "tool_calls": [call], **content}
            ids = prompt_ids(tmp_path, tokenizer, [said_before, TOLD])
            assert 'add{"a": 1}' in tokenizer.decode(ids, False)
            assert "None" not in tokenizer.decode(ids, False)

    # Text of other scripts stays as it is, and what a tool quotes as Python does decides nothing.
    call = {**ADD, "function": {"name": "add", "arguments": {"a": "東"}}}
    told = {**TOLD, "content": "{'a': '東'} is 3"}
    for form in (template, template.replace(*TO_JSON)):
        messages = [{"role": "assistant", "tool_calls": [call]}, told]
        ids = prompt_ids(tmp_path, chat_tokenizer("qwen2.5", form), messages)
        assert 'add{"a": "東"}' in tokenizer.decode(ids, False)


IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}
OF_SHAREGPT = {"from": "human", "value": "hi"}


def calls(*every):
    return {"role": "assistant", "content": "", "tool_calls": every}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [IMAGE]}, "must have text"),
        ({**ASK, "images": ["x.png"]}, "'images'"),
        (OF_SHAREGPT, 'has no "role".*"content"'),
        ({"role": "assistant", "content": None}, 'has no "content"'),
        ({"role": "assistant", "function_call": {"name": "a"}, "content": ""}, "tool_calls"),
        ({"role": "function", "name": "a", "content": "1"}, "role tool|tool_calls"),
        (calls({"function": {"name": "a", "arguments": "{"}}), "'a' whose arguments are no"),
        (calls({"function": {"name": "a", "arguments": "[1]"}}), "'a' whose arguments are no"),
        (calls({"function": {"arguments": {}}}), "has a call that is no"),
        (calls("add"), "has a call that is no"),
        ({"role": "assistant", "tool_calls": "[]"}, "must have a list"),
        ("hi", "must be an object"),
    ],
)
def test_messages_that_are_not_read_are_refused_wherever_they_stand(message, words, tmp_path):
    tokenizer = chat_tokenizer("qwen2.5")
    message = json.loads(json.dumps(message))
    with pytest.raises(DataError, match=words):
        prompt_ids(tmp_path, tokenizer, [message, ASK])
    with pytest.raises(ProgramError, match=words):
        said([message], "reset")

    good = {"role": "assistant", "content": "3"}
    path = tmp_path / "pairs.jsonl"
    pair = {"chosen": [message, ASK, good], "rejected": [message, ASK, {**good, "content": "4"}]}
    path.write_text(json.dumps(pair) + "\n")
    with pytest.raises(DataError, match=words):
        encode_preferences(read_rows([path]), tokenizer, max_length=999)


def test_an_environment_may_say_messages_of_these_forms():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    read = said([{"role": "user", "content": parts}, calls(ADD) | {"content": None}], "reset")
    assert [message["content"] for message in read] == ["ab", ""]
    assert read_message(ASK | {"name": None}) == ASK


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([ASK]),
        str([ASK]),
        json.dumps({"messages": [ASK]}),
        json.dumps([OF_SHAREGPT], indent=1),
        json.dumps([{"id": 1, "name": None, **ASK}]),
        json.dumps(json.dumps([ASK])),
        f"array([{ASK}], dtype=object)",
    ],
)
def test_messages_as_text_are_refused_in_every_column(text, tmp_path):
    tokenizer = chat_tokenizer("qwen2.5")
    path = tmp_path / "a.jsonl"
    for column in ("prompt", "chosen", "rejected", "response"):
        row = {"prompt": "a", "chosen": "b", "rejected": "c", "response": "d"} | {column: text}
        path.write_text(json.dumps(row) + "\n")
        encode = encode_sft if column == "response" else encode_preferences
        with pytest.raises(DataError, match=rf"a\.jsonl:1: '{column}' is a text that holds chat"):
            encode(read_rows([path]), tokenizer, max_length=999)
    mail = '{"from": "system", "to": "user"}'
    for other in ("[1, 2] is a list", '{"value": 3}', 'What does {"role": "user"} mean?', mail):
        prompt_ids(tmp_path, tokenizer, other)


@pytest.mark.parametrize("column", ["images", "image", "videos", "audio"])
def test_rows_with_images_are_refused(column, tmp_path):
    tokenizer = chat_tokenizer("qwen2.5")
    columns = {"prompt": [ASK], "response": "3", "chosen": "3", "rejected": "4"}
    path = tmp_path / "a.parquet"

    for value in ([{"bytes": b"\x89PNG", "path": None}], None):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([columns | {column: value}]), path)
        for read in (
            lambda: PromptDataset([path], tokenizer, max_prompt_length=999),
            lambda: encode_sft(read_rows([path]), tokenizer, max_length=999),
            lambda: encode_preferences(read_rows([path]), tokenizer, max_length=999),
        ):
            if value is None:
                read()
                continue
            with pytest.raises(DataError, match=f"a.parquet:1: the row holds '{column}'"):
                read()


def test_tools_may_be_json_text(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {}}}
    tokenizer = chat_tokenizer("qwen2.5")
    found = []
    for tools in ([tool], json.dumps([tool])):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps({"prompt": [ASK], "response": "3", "tools": tools}) + "\n")
        found.append(encode_sft(read_rows([path]), tokenizer, max_length=999))
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["llama3.1", "smollm3", "harmony"])
def test_a_template_writes_the_day_that_is_given(family):
    backend = chat_tokenizer(family)._backend
    tokenizer = Tokenizer(backend, date="2020-02-03")
    for one in (tokenizer, tokenizer.ending_with([1])):
        text = one.apply_chat_template([ASK])
        assert "2020-02-03" in text or "03 Feb" in text


def test_empty_calls_are_none_and_blanks_behind_an_end_are_left_out(tmp_path):
    tokenizer = chat_tokenizer("qwen2.5")
    last = {"role": "assistant", "content": "3", "tool_calls": []}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"chosen": [ASK, last], "rejected": [ASK, last | {"content": "4"}]}))
    pairs = encode_preferences(read_rows([path]), tokenizer, max_length=999)
    assert tokenizer.decode(pairs.responses[0][0], False).endswith("3<|im_end|>")
    ended = tokenizer.encode_response("3<|im_end|>\n")
    assert ended == tokenizer.encode_response("3")
    assert tokenizer.encode_response("3<|im_end|>\n4")[-1] == tokenizer.eos_id
