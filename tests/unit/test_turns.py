"""Tokens built turn by turn against the whole conversation rendered at once.

The chat templates of `tests/chat_templates` are those of published families.
"""

import datetime

import pytest
from transformers.utils import chat_template_utils

from mrlhf.episodes.template import Mismatch, Turn, TurnRenderer
from mrlhf.errors import DataError
from tests.models.chat import CHATS, DRAWN, HERMES_CALL, TEMPLATES, chat_tokenizer, end_ids

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 2?"}]
RESULT = {"role": "tool", "name": "add", "content": '{"sum": 3}'}
OTHER_RESULT = {"role": "tool", "name": "add", "content": "30"}
QUESTION = {"role": "user", "content": "Are you sure?"}
ADD_ONE = {"name": "add", "arguments": {"a": 1}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "call00000", "function": ADD_ONE}],
}
# Families to whose template a call or an answer is not given as the text that was drawn.
AS_MESSAGES = {
    "glm4": (CALL, "It is 3."),
    "mistral_v3": (CALL, "It is 3."),
    "harmony": (CALL, "It is 3."),
    "smollm3": (f"<think>\nso\n</think>\n{HERMES_CALL}", "<think>\nwell</think>It is 3."),
}
WITHOUT_TOOLS = ("chatml", "gemma", "phi4")
WITH_TOOLS = sorted(set(CHATS) - set(WITHOUT_TOOLS))
# Families whose template alters what stands before a further question.
REWRITING = ("qwen3", "mistral_v3", "harmony")
RESULTS = [RESULT, OTHER_RESULT]


@pytest.fixture(autouse=True)
def one_day(monkeypatch):
    """Some templates write the date."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2025, 1, 2)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


@pytest.fixture(scope="module")
def tokenizers():
    return {name: chat_tokenizer(name) for name in CHATS}


def renderer_of(tokenizer, name, tools=TOOLS):
    return TurnRenderer(tokenizer, tools, end_ids(name, tokenizer))


def prompt_of(name):
    """A prompt with a system message, where the template keeps it at its place."""
    return PROMPT[1:] if name in ("gemma", "mistral_v3") else PROMPT


def is_call(messages):
    return bool(messages) and messages[0]["role"] == "tool"


def has_text_of_call(name):
    """Whether the template takes a call as the text of a message."""
    return AS_MESSAGES.get(name, [""])[0] != CALL


def turns_of(tokenizer, name, *followings):
    """A turn for each list of messages that follow: a call before results, or else an answer."""
    turns = []
    for messages in followings:
        drawn = tokenizer.encode(DRAWN[name][0 if is_call(messages) else 1])
        turns.append(Turn(drawn, True, messages))
    return turns


def built(renderer, messages, turns):
    """The tokens of an episode as a driver joins them."""
    tokens = renderer.first(messages)
    for turn in turns:
        tokens += [*turn.drawn, *renderer.after(turn.drawn, turn.stopped, turn.messages)]
    return tokens


def rendered_at_once(tokenizer, name, followings, tools):
    """The tokens of the whole conversation, ready for a further answer."""
    conversation = list(prompt_of(name))
    for messages in followings:
        number = 0 if is_call(messages) else 1
        end = (*CHATS[name].ends, CHATS[name].eos)
        text = DRAWN[name][number]
        text = text[: max(text.rfind(token) for token in end)]
        given = AS_MESSAGES.get(name, (text, text))[number]
        conversation.append({"role": "assistant", "content": given} if given != CALL else CALL)
        conversation += [
            {**message, "tool_call_id": f"call0000{index}"} if is_call(messages) else message
            for index, message in enumerate(messages)
        ]
    return tokenizer.encode(tokenizer.apply_chat_template(conversation, True, tools))


def replaced(name, old, new):
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    assert old in source
    return source.replace(old, new)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_turns_with_tools_are_the_conversation_rendered_at_once(tokenizers, name):
    tokenizer = tokenizers[name]
    renderer = renderer_of(tokenizer, name)
    followings = [[RESULT], RESULTS, [OTHER_RESULT]]
    turns = turns_of(tokenizer, name, *followings)
    expected = rendered_at_once(tokenizer, name, followings, TOOLS)
    assert built(renderer, prompt_of(name), turns) == expected

    assert renderer.check(prompt_of(name), []) is None
    answered = turns_of(tokenizer, name, *followings, [])
    assert (renderer.check(prompt_of(name), turns) is None) == has_text_of_call(name)
    assert (renderer.check(prompt_of(name), answered) is None) == has_text_of_call(name)


@pytest.mark.parametrize("name", sorted(set(CHATS) - set(REWRITING)))
def test_questions_between_turns_are_the_conversation_rendered_at_once(tokenizers, name):
    tokenizer = tokenizers[name]
    tools = None if name in WITHOUT_TOOLS else TOOLS
    renderer = renderer_of(tokenizer, name, tools or ())
    followings = [[QUESTION], [QUESTION] if tools is None else [RESULT], [QUESTION]]
    turns = turns_of(tokenizer, name, *followings)
    expected = rendered_at_once(tokenizer, name, followings, tools)
    assert built(renderer, prompt_of(name), turns) == expected
    found = renderer.check(prompt_of(name), turns_of(tokenizer, name, *followings, []))
    assert (found is None) == (tools is None or has_text_of_call(name))


QWEN_RESULTS = (
    '\n<|im_start|>user\n<tool_response>\n{"sum": 3}\n</tool_response>\n'
    "<tool_response>\n30\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
# What follows a call, with two results, and what the template writes before it if the turn was cut.
AFTER_CALL = {
    "qwen2.5": ("<|im_end|>", QWEN_RESULTS),
    "qwen3": ("<|im_end|>", QWEN_RESULTS),
    "llama3.1": (
        "<|eot_id|>",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"{\\"sum\\": 3}"<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"30"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral_v3": (
        "</s>",
        '[TOOL_RESULTS] {"content": "{\\"sum\\": 3}", "call_id": "call00000"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": "30", "call_id": "call00001"}[/TOOL_RESULTS]',
    ),
    "mistral_nemo": (
        "</s>",
        '[TOOL_RESULTS]{"sum": 3}[/TOOL_RESULTS][TOOL_RESULTS]30[/TOOL_RESULTS]',
    ),
    "deepseek_v3": (
        "<｜end▁of▁sentence｜>",
        '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{"sum": 3}<｜tool▁output▁end｜>\n'
        "<｜tool▁output▁begin｜>30<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
    "glm4": ("<|observation|>", '\n{"sum": 3}<|observation|>\n30<|assistant|>'),
    "phi4_mini": (
        "<|end|>",
        '<|tool_response|>{"sum": 3}<|end|><|tool_response|>30<|end|><|assistant|>',
    ),
    "smollm3": (
        "<|im_end|>",
        '\n<|im_start|>user\n{"sum": 3}<|im_end|>\n<|im_start|>user\n30<|im_end|>\n'
        "<|im_start|>assistant\n<think>\n",
    ),
    "harmony": (
        "<|call|>",
        "<|start|>functions.add to=assistant<|channel|>commentary<|message|>"
        '"{\\"sum\\": 3}"<|end|>'
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"30"<|end|>'
        "<|start|>assistant",
    ),
}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_what_follows_a_call(tokenizers, name):
    tokenizer = tokenizers[name]
    renderer = renderer_of(tokenizer, name)
    end, rest = AFTER_CALL[name]
    drawn = tokenizer.encode(DRAWN[name][0])
    assert renderer.after(drawn, True, RESULTS) == tokenizer.encode(rest)
    # Cut by a limit, or ended by a stop string: the template's end is written.
    assert renderer.after(drawn[:-2], False, RESULTS) == tokenizer.encode(end + rest)
    assert renderer.after(drawn[:-1], True, RESULTS) == tokenizer.encode(end + rest)


# What follows an answer, with a question.
AFTER_ANSWER = {
    "chatml": "\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n",
    "gemma": "\n<start_of_turn>user\nAre you sure?<end_of_turn>\n<start_of_turn>model\n",
    "phi4": "<|im_start|>user<|im_sep|>Are you sure?<|im_end|><|im_start|>assistant<|im_sep|>",
    "phi4_mini": "<|user|>Are you sure?<|end|><|assistant|>",
    "glm4": "\nAre you sure?<|assistant|>",
    "deepseek_v3": "<｜User｜>Are you sure?<｜Assistant｜>",
    "harmony": "<|start|>user<|message|>Are you sure?<|end|><|start|>assistant",
}


@pytest.mark.parametrize("name", AFTER_ANSWER)
def test_what_follows_an_answer(tokenizers, name):
    tokenizer = tokenizers[name]
    renderer = renderer_of(tokenizer, name, ())
    drawn = tokenizer.encode(DRAWN[name][1])
    assert renderer.after(drawn, True, [QUESTION]) == tokenizer.encode(AFTER_ANSWER[name])


@pytest.mark.parametrize(
    ("name", "drawn", "rest"),
    [
        # The drawn end stands in the place of the template's, which is another one.
        ("llama3.1", "<|python_tag|>add<|eom_id|>", AFTER_CALL["llama3.1"][1]),
        ("qwen2.5", "a<|endoftext|>", AFTER_CALL["qwen2.5"][1]),
        ("phi4_mini", "a<|end|><|endoftext|>", AFTER_CALL["phi4_mini"][1]),
        # An end that is no header: the header follows.
        ("glm4", "a<|endoftext|>", "<|observation|>" + AFTER_CALL["glm4"][1]),
    ],
)
def test_an_end_token_of_another_kind(tokenizers, name, drawn, rest):
    tokenizer = tokenizers[name]
    follows = renderer_of(tokenizer, name).after(tokenizer.encode(drawn), True, RESULTS)
    assert follows == tokenizer.encode(rest)


def test_an_end_that_the_template_writes_elsewhere():
    """It ends the last message alone, or behind a line of its own."""
    last = chat_tokenizer(
        "gemma",
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{{ '<start_of_turn>model\n' if add_generation_prompt else '<end_of_turn>' }}",
    )
    follows = renderer_of(last, "gemma", ()).after(last.encode("a<end_of_turn>"), True, [QUESTION])
    rest = "<start_of_turn>user\nAre you sure?<start_of_turn>model\n"
    assert follows == last.encode(rest)

    template = replaced("harmony", "message.content ~ ('<|ret", "message.content ~ '\\n' ~ ('<|ret")
    line = chat_tokenizer("harmony", template)
    renderer = renderer_of(line, "harmony")
    drawn = line.encode("a<|return|>")
    assert renderer.after(drawn, True, RESULTS) == line.encode(AFTER_CALL["harmony"][1])
    assert renderer.after(drawn, True, [QUESTION]) == line.encode(AFTER_ANSWER["harmony"])


def test_the_end_of_the_last_turn(tokenizers):
    tokenizer = tokenizers["qwen3"]
    renderer = renderer_of(tokenizer, "qwen3")
    assert renderer.after(tokenizer.encode("a<|im_end|>"), True, []) == tokenizer.encode("\n")
    assert renderer.after(tokenizer.encode("a"), False, []) == tokenizer.encode("<|im_end|>\n")


def test_a_result_may_hold_the_texts_of_the_placeholders(tokenizers):
    for name in ("qwen2.5", "harmony"):
        tokenizer = tokenizers[name]
        hostile = {**RESULT, "content": "Qqz7answer Qqz7question Qqz7following0z"}
        drawn = tokenizer.encode(DRAWN[name][0])
        follows = renderer_of(tokenizer, name).after(drawn, True, [hostile])
        text = tokenizer.decode(follows, skip_special_tokens=False)
        assert text.count(hostile["content"]) == 1
        assert text.partition(hostile["content"])[0] == {
            "qwen2.5": "\n<|im_start|>user\n<tool_response>\n",
            "harmony": '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"',
        }.get(name)


def test_a_kind_of_messages_is_tried_once(tokenizers, monkeypatch):
    tokenizer = tokenizers["harmony"]
    renderer = renderer_of(tokenizer, "harmony")
    drawn = tokenizer.encode(DRAWN["harmony"][0])
    renders = []
    apply = type(tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(tokenizer),
        "apply_chat_template",
        lambda *arguments: renders.append(arguments) or apply(*arguments),
    )
    counts = []
    for _ in range(3):
        renderer.after(drawn, True, RESULTS)
        counts.append(len(renders))

    assert counts == [3, 4, 5]  # at first a refused and a taken placeholder as well


MISMATCHES = [
    # Thoughts of turns before a further question.
    ("qwen3", [QUESTION], [], 2, "dropped", "<think>\nwell\n</think>\n\n", "It is 3.<|im_end|>"),
    ("qwen3", [RESULT], [QUESTION], 2, "dropped", "<think>\nso\n</think>\n\n", "<tool_call>"),
    # The tools move to the last question.
    ("mistral_v3", [QUESTION], [], 0, "dropped", "[AVAILABLE_TOOLS] [{", "[INST] What is 1 + 2?"),
    # The end of an answer is another one in the midst of a conversation.
    ("harmony", [QUESTION], [], 2, "changed", "<|return|><|start|>", "<|end|><|start|>user"),
]


@pytest.mark.parametrize(
    ("name", "first", "second", "message", "kind", "ours", "theirs"), MISMATCHES
)
def test_a_template_that_rewrites_is_told(
    tokenizers, name, first, second, message, kind, ours, theirs
):
    tokenizer = tokenizers[name]
    renderer = renderer_of(tokenizer, name)
    followings = [first, second] if second else [first]
    found = renderer.check(prompt_of(name), turns_of(tokenizer, name, *followings, []))
    assert found is not None and (found.message, found.kind) == (message, kind)
    assert found.built.startswith(ours) and found.rendered.startswith(theirs)
    assert f"message {message} is {kind}" in str(found) and "\n" not in str(found)
    if name == "qwen3":
        assert found.built == ours


def test_a_system_message_that_is_dropped(tokenizers):
    """Mistral's stands before the question only as long as it is the last message."""
    tokenizer = tokenizers["mistral_v3"]
    found = renderer_of(tokenizer, "mistral_v3", ()).check(
        PROMPT, turns_of(tokenizer, "mistral_v3", [QUESTION], [])
    )
    assert found is not None
    assert (found.message, found.kind, found.built) == (0, "dropped", "Be brief.\n\n")


def test_tokens_that_merge_are_told(tokenizers):
    tokenizer = tokenizers["chatml"]
    renderer = renderer_of(tokenizer, "chatml", ())
    letters = [token for letter in "answer" for token in tokenizer.encode(letter)]
    assert len(letters) > len(tokenizer.encode("answer"))
    end = tokenizer.encode("<|im_end|>")
    turn = Turn([*tokenizer.encode("the "), *letters, *end], True, [QUESTION])
    found = renderer.check(PROMPT, [turn])
    assert found is not None and (found.message, found.kind) == (2, "merged")
    assert found.built == found.rendered and found.built.startswith(" answer<|im_end|>")


def test_tokens_that_merge_over_the_end_of_a_turn_are_told():
    """A template that ends messages with plain lines, and a token for a full stop with a line."""
    tokenizer = chat_tokenizer(
        "chatml",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}",
    )
    assert len(tokenizer.encode(".\n\n")) < 1 + len(tokenizer.encode("\n\n"))
    drawn = tokenizer.encode(" so.")
    found = renderer_of(tokenizer, "chatml", ()).check(PROMPT, [Turn(drawn, True, [QUESTION])])
    assert found is not None and (found.message, found.kind) == (2, "merged")


def test_a_message_that_is_changed_is_named():
    template = replaced("chatml", "message.content ~", "message.content | replace('30', '31') ~")
    tokenizer = chat_tokenizer("chatml", template)
    renderer = renderer_of(tokenizer, "chatml", ())
    answer = tokenizer.encode("so<|im_end|>")
    turns = [Turn(answer, True, [QUESTION]), Turn(answer, True, [QUESTION, OTHER_RESULT])]
    assert renderer.check(PROMPT, turns) is None  # the same change in both

    drawn = tokenizer.encode("it is 30<|im_end|>")
    found = renderer.check(PROMPT, [*turns, Turn(drawn, True, [QUESTION])])
    assert found is not None and (found.message, found.kind) == (7, "changed")
    assert found.built.startswith("30<|im_end|>") and found.rendered.startswith("31<|im_end|>")


def test_what_the_template_adds_to_a_turn_is_told_of_the_turn():
    tokenizer = chat_tokenizer("chatml", replaced("chatml", "content ~ '<", "content ~ '!<"))
    renderer = renderer_of(tokenizer, "chatml", ())
    # A turn that was cut gets the template's end, and one that stopped has its own.
    drawn = tokenizer.encode("so")
    assert renderer.check(PROMPT, [Turn(drawn, False, [QUESTION])]) is None
    ended = [*drawn, *tokenizer.encode("<|im_end|>")]
    found = renderer.check(PROMPT, [Turn(ended, True, [QUESTION])])
    assert found is not None and (found.message, found.kind) == (2, "changed")
    assert found.built.startswith("<|im_end|>") and found.rendered.startswith("!<|im_end|>")


def test_the_turn_at_whose_end_they_part():
    change = "message.content | replace('so', 'so!') ~"
    tokenizer = chat_tokenizer("chatml", replaced("chatml", "message.content ~", change))
    turn = Turn(tokenizer.encode("so"), False, [QUESTION, OTHER_RESULT])  # it was cut
    found = renderer_of(tokenizer, "chatml", ()).check(PROMPT, [turn])
    assert found is not None and (found.message, found.kind) == (2, "changed")
    assert found.built.startswith("<|im_end|>") and found.rendered.startswith("!<|im_end|>")


def test_a_conversation_that_the_template_refuses_is_a_mismatch(tokenizers):
    """A call that could not be read has no message that Mistral's template takes."""
    tokenizer = tokenizers["mistral_v3"]
    turns = turns_of(tokenizer, "mistral_v3", [RESULT], [])
    found = renderer_of(tokenizer, "mistral_v3").check(prompt_of("mistral_v3"), turns)
    assert found == Mismatch(
        1,
        "changed",
        "",
        "the chat template refuses the messages: After the optional system message, roles ...",
    )


SILENT = replaced("qwen2.5", "message.role == 'tool'", "message.role == 'none'")
RAISING = replaced(
    "qwen2.5",
    "{%- for message in messages %}",
    """
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- raise_exception('no tools here') }}{%- endif %}""",
)


@pytest.mark.parametrize(
    ("name", "template", "words"),
    [
        ("gemma", None, "the chat template ignores tools; set data.chat_template"),
        ("phi4", None, "the chat template ignores tools; set data.chat_template"),
        ("chatml", None, "the chat template ignores tools; set data.chat_template"),
        ("qwen2.5", SILENT, "no messages of role 'tool' after the assistant's: it leaves them out"),
        ("qwen2.5", RAISING, "no messages of role 'tool' after the assistant's: .*no tools here"),
        ("chatml", "{{ messages[-1].content }}", "the chat template ignores tools"),
        ("chatml", "{{ tools }}hello", "the chat template leaves out messages"),
    ],
)
def test_a_template_without_tools_is_refused(name, template, words):
    with pytest.raises(DataError, match=words) as caught:
        renderer_of(chat_tokenizer(name, template), name)
    assert "\n" not in str(caught.value) and "set data.chat_template to a jinja" in str(
        caught.value
    )


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(DataError, match=r"turns need a chat template.*; set data\.chat_template"):
        TurnRenderer(chat_tokenizer("chatml", ""))


def test_messages_that_the_template_refuses(tokenizers):
    gemma = renderer_of(tokenizers["gemma"], "gemma", ())
    with pytest.raises(DataError, match="System role not supported"):
        gemma.first(PROMPT)
    with pytest.raises(DataError, match=r"no messages of role 'user' .* roles must alternate"):
        gemma.after([1], False, [QUESTION, QUESTION])
    # Its tools stand in the system message alone.
    phi = renderer_of(tokenizers["phi4_mini"], "phi4_mini")
    with pytest.raises(DataError, match="writes no tools beside the prompt's messages; begin them"):
        phi.first(PROMPT[1:])


def anew(renderer, messages, turns):
    """The turns behind which the template writes a conversation anew, each with its tokens."""
    found = {}
    for number in range(len(turns)):
        tokens = renderer.new_context(messages, turns[: number + 1])
        if tokens is not None:
            found[number] = tokens
    return found


@pytest.mark.parametrize("name", sorted(set(CHATS) - set(REWRITING)))
def test_a_template_that_only_adds_goes_on(tokenizers, name):
    tokenizer = tokenizers[name]
    tools = () if name in WITHOUT_TOOLS else TOOLS
    has_results = tools and name not in AS_MESSAGES
    followings = [[QUESTION], [RESULT] if has_results else [QUESTION], [QUESTION]]
    turns = turns_of(tokenizer, name, *followings)
    assert anew(renderer_of(tokenizer, name, tools), prompt_of(name), turns) == {}


def test_a_template_that_drops_thoughts_begins_anew_behind_a_question(tokenizers):
    tokenizer = tokenizers["qwen3"]
    followings = [[RESULT], [QUESTION], [RESULT]]
    turns = turns_of(tokenizer, "qwen3", *followings)
    found = anew(renderer_of(tokenizer, "qwen3"), prompt_of("qwen3"), turns)
    assert found == {1: rendered_at_once(tokenizer, "qwen3", followings[:2], TOOLS)}
    assert "<think>" in tokenizer.decode(turns[0].drawn, False)
    assert "<think>" not in tokenizer.decode(found[1], False)
