"""Calls of tools in the text of a turn: literal texts of each format, and damaged ones."""

import random
import sys

import pytest

from mrlhf.episodes.tool_calls import PARSERS, ParsedTurn, parser_for
from mrlhf.errors import DataError

F = ("f", {"a": 1})
G = ("g", {})
DEEPSEEK_V3 = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n"
    "```json\n{arguments}\n```<｜tool▁call▁end｜>"
)
DEEPSEEK_V31 = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def deepseek(form, *calls):
    written = [form.replace("{name}", n).replace("{arguments}", a) for n, a in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


TWO = (("f", '{"a": 1}'), ("g", "{}"))
# Format: a text, what stands beside the calls, the calls.
READABLE = {
    "hermes": [
        ("no call", "no call", []),
        (
            'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            "I look.",
            [F],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and '
            '<tool_call>{"arguments": "{}", "name": "g"}</tool_call>.',
            "and .",
            [F, G],
        ),
        (
            '<think>a <tool_call> may help</think>\n<tool_call>{"name": "g", "arguments": {}}'
            "</tool_call>",
            "<think>a <tool_call> may help</think>",
            [G],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"text": "</tool_call>\\n"}}</tool_call>',
            "",
            [("f", {"text": "</tool_call>\n"})],
        ),
    ],
    "llama3": [
        ('{"name": "f", "parameters": {"a": 1}}', "", [F]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F]),
        ('{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [F, G]),
        (
            'So: <|python_tag|>{"name": "f", "parameters": {"a": 1}};{"name": "g", "parameters": '
            "{}};",
            "So:",
            [F, G],
        ),
        ('{"answer": 4}', '{"answer": 4}', []),
        ("the set {1, 2}", "the set {1, 2}", []),
        ("{1, 2} is the set", "{1, 2} is the set", []),
    ],
    "mistral": [
        ("no call", "no call", []),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [F]),
        (
            'Well. [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": '
            '{}, "id": "abcdefghi"}]',
            "Well.",
            [F, G],
        ),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}', "", [F]),
        ('a [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}', "a", [F, G]),
    ],
    "deepseek": [
        ("no call", "no call", []),
        ("Well. " + deepseek(DEEPSEEK_V3, *TWO), "Well.", [F, G]),
        (deepseek(DEEPSEEK_V31, *TWO), "", [F, G]),
        (deepseek(DEEPSEEK_V3 + "\n", *TWO), "", [F, G]),
    ],
    "json": [
        ("no call", "no call", []),
        ('{"name": "f", "arguments": {"a": 1}}', "", [F]),
        (' [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}] ', "", [F, G]),
        ('See:\n```json\n{"name": "f", "arguments": {"a": 1}}\n```\nso.', "See:\n\nso.", [F]),
        (
            '```python\n{}\n```\nthen\n```\n[{"name": "f", "arguments": {"a": 1}}]\n```',
            "```python\n{}\n```\nthen",
            [F],
        ),
        ('{"answer": [4]}', '{"answer": [4]}', []),
    ],
}


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [(name, *case) for name, cases in READABLE.items() for case in cases],
)
def test_calls_and_the_text_beside_them(name, text, content, calls):
    assert PARSERS[name](text) == ParsedTurn(content, tuple(calls), None)


ONE = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
# Format, a text, the calls before the mistake, words of the error.
UNREADABLE = [
    ("hermes", "<tool_call>", [], "call 1 cannot be read: no valid JSON"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', [], "</tool_call> is missing"),
    ("hermes", ONE + '<tool_call>{"name": "f" "arguments": {}}</tool_call>', [F], "call 2 cannot"),
    ("hermes", ONE + '<tool_call>{"arguments": {}}</tool_call>', [F], 'it has no "name"'),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [], 'no "arguments"; {} stands for none'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', [], "its name is no word"),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>', [], "name is no word"),
    ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', [], "is no word"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [], "no JSON object"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>', [], "no JSON object"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{} 1"}</tool_call>', [], "more than one"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{"}</tool_call>', [], "no valid JSON"),
    ("hermes", '<tool_call>["f"]</tool_call>', [], "it is no JSON object"),
    ("llama3", "<|python_tag|>print(1)", [], "no valid JSON (Expecting value, 0 characters"),
    ("llama3", '{"name": "f", "parameters": {"a": 1}}; {"name"', [F], "call 2 cannot be read"),
    ("llama3", '{"parameters": {}}', [], 'it has no "name"'),
    ("mistral", "[TOOL_CALLS]", [], "neither a list nor [ARGS] follows"),
    ("mistral", "[TOOL_CALLS] []", [], "the list is empty"),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"na', [F], "call 2 cannot"),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}', [], "neither ',' nor ']'"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]3', [F], "no JSON object"),
    ("mistral", "[TOOL_CALLS]a [TOOL_CALLS]b[ARGS]{}", [], "its name is no word"),
    ("deepseek", "<｜tool▁calls▁begin｜>", [], "<｜tool▁call▁begin｜> is missing"),
    ("deepseek", deepseek(DEEPSEEK_V31, TWO[0])[:-8], [F], "<｜tool▁calls▁end｜> is missing"),
    ("deepseek", deepseek(DEEPSEEK_V31, TWO[0])[:-24], [], "<｜tool▁call▁end｜> is missing"),
    ("deepseek", deepseek(DEEPSEEK_V31, TWO[0], ("g", "{")), [F], "no valid JSON"),
    ("deepseek", deepseek(DEEPSEEK_V3, TWO[0]).replace("json", ""), [], "no ```json block"),
    ("deepseek", deepseek("<｜tool▁call▁begin｜>f", TWO[0]), [], "<｜tool▁sep｜> is missing"),
    ("json", '{"name": "f", "arguments": {"a": NaN}}', [], "NaN is no number of JSON"),
    ("json", '```\n[{"name": "f", "arguments": {"a": 1}}, 3]\n```', [F], "it is no JSON object"),
    ("json", '```\n{"name": "f", "arguments": {"a": 1}}', [F], "call 2 cannot be read: ```"),
    ("json", '{"name": "f", "arguments": ' + "[" * 100_000, [], "too many brackets"),
    ("json", '{"name": "f", "arguments": {"a": ' + "9" * 9_999, [], "too long a number"),
]


@pytest.mark.parametrize(("name", "text", "calls", "words"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_what_cannot_be_read_is_one_line_after_the_calls_before_it(name, text, calls, words):
    parsed = PARSERS[name](text)
    assert parsed.calls == tuple(calls)
    assert parsed.error is not None and words in parsed.error and "; expected " in parsed.error
    assert "\n" not in parsed.error and len(parsed.error) < 400


def test_what_cannot_be_read_stays_in_the_text():
    assert PARSERS["hermes"]("a " + ONE + " b <tool_call>c").content == "a  b <tool_call>c"


def mutated(text, rng):
    """The text with a few parts cut out, repeated, moved or replaced."""
    for _ in range(rng.randrange(1, 4)):
        first, second = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        part = text[first:second]
        junk = rng.choice(["", '"', "{", "}", "\\", "```", ";", "[", "]", "\n", "\ud800", part * 2])
        text = text[:first] + junk + text[second:]
    return text


def test_damaged_texts_never_raise_and_lose_no_call_before_the_damage():
    rng = random.Random(0)
    errors = dict.fromkeys(PARSERS, 0)
    texts = [(name, *case) for name, cases in READABLE.items() for case in cases]
    for name, text, _, calls in texts:
        for cut in range(len(text)):
            parsed = PARSERS[name](text[:cut])
            assert parsed.calls == tuple(calls[: len(parsed.calls)])
        for _ in range(200):
            parsed = PARSERS[rng.choice([name, *PARSERS])](mutated(text, rng))
            assert parsed.error is None or "\n" not in parsed.error
        errors[name] += sum(PARSERS[name](text[:cut]).error is not None for cut in range(len(text)))
    assert all(errors.values())


class Counted(str):
    """A text that counts the characters that its searches and its cuts pass over."""

    passed = 0

    def find(self, part, start=0, end=None):
        end = len(self) if end is None else end
        found = super().find(part, start, end)
        self.passed += (found if found >= 0 else end) - start + 1
        return found

    def __getitem__(self, index):
        cut = super().__getitem__(index)
        self.passed += len(cut)
        return cut


HOSTILE = [
    *("<tool_call>", "<tool_call>{", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    *("```", "```\n", "```\n{", '```\n{"name": "f", "arguments": {}}```', "``` \n \n"),
    *("[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]f[ARGS]", '[TOOL_CALLS] [{"name"'),
    *("<|python_tag|>", "{", "[", " ", "</think>", '"name"', '{"name": "f", "parameters": {}};'),
    *("<｜tool▁calls▁begin｜>", DEEPSEEK_V31.replace("{arguments}", "{}"), "<｜tool▁sep｜>"),
]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("part", HOSTILE)
def test_the_steps_grow_with_the_text_and_no_faster(name, part):
    """The calls of functions, and the characters passed over, of a text and of one twice as long.

    A text that is read anew from each of its parts takes four times as many.
    """

    def steps(copies):
        start = {"deepseek": "<｜tool▁calls▁begin｜>", "json": 'a "name"'}.get(name, "")
        text = Counted(start + part * copies)
        events = 0

        def count(frame, event, argument):
            nonlocal events
            events += 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            PARSERS[name](text)
        finally:
            sys.setprofile(before)
        return events, text.passed

    for few, many in zip(steps(500), steps(1000), strict=True):
        assert many <= 2.2 * few + 100


def test_a_quadratic_reader_is_seen_by_the_count():
    text = Counted("a" * 1000)
    for start in range(0, 1000, 10):
        text.find("b", start)
    assert text.passed > 40 * len(text)


QWEN = '...within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>'


@pytest.mark.parametrize(
    ("name", "template", "chosen"),
    [
        *((name, "", name) for name in PARSERS),
        ("auto", QWEN, "hermes"),
        ("auto", "{{ '<|start_header_id|>ipython<|end_header_id|>' }}", "llama3"),
        ("auto", "{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("auto", "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", "deepseek"),
    ],
)
def test_a_parser_is_chosen_by_name_or_by_the_template(name, template, chosen):
    assert parser_for(name, template) is PARSERS[chosen]


@pytest.mark.parametrize("template", ["", QWEN + "<function=name>", "<tool_call>name<arg_key>"])
def test_a_format_that_is_not_known_is_refused(template):
    names = "hermes, llama3, mistral, deepseek, json"
    with pytest.raises(
        DataError, match=f"shows no known format of tool calls; name one of {names}"
    ):
        parser_for("auto", template)
    with pytest.raises(
        DataError, match=f"no format of tool calls 'xml'; use auto or one of {names}"
    ):
        parser_for("xml", template)
