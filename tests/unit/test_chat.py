"""Talking to a policy: its turns against transformers, and the program on a real terminal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from mrlhf.data.tokenizer import Tokenizer
from mrlhf.errors import DataError
from mrlhf.inference.base import SamplingParams
from mrlhf.rollout.talk import Talk, TextStream
from tests.models.chat import CHATS, chat_tokenizer, end_ids
from tests.models.engines import SIZES, make_engine, random_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, seed=1)
BLOCK = 16
MOST = 400


def talk_of(model: Any, name: str, template: str | None = None, **limits: Any) -> Talk:
    tokenizer = chat_tokenizer(name, template)
    ends = end_ids(name, tokenizer)
    limits = {"max_num_seqs": 1, "max_length": MOST, "block_size": BLOCK, **limits}
    engine = make_engine(model, decode=tokenizer.decode, **limits)
    return Talk(engine, tokenizer.ending_with(ends), ends, limits["max_length"])


def tiny_model(tokenizer: Tokenizer, seed: int = 0) -> Any:
    sizes = {**SIZES, "vocab_size": tokenizer.highest_id + 1, "max_position_embeddings": 2 * MOST}
    return random_model(LlamaConfig(**sizes, tie_word_embeddings=False), seed)


def ignore(text: str) -> None:
    """Show nothing."""


def never() -> bool:
    return False


def by_transformers(model: Any, prompt: list[int], ends: list[int], most: int) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": most, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
    with torch.no_grad():
        said = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    drawn: list[int] = said[0, len(prompt) :].tolist()
    return drawn


@pytest.mark.parametrize("name", sorted(CHATS))
def test_turns_are_those_of_transformers_and_compute_no_turn_again(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    model = tiny_model(tokenizer)
    talk = talk_of(model, name)

    computed = 0
    for text, most in (("What is 1 + 2?", 24), ("Are you sure?", 10), ("I think so.", 24)):
        pieces: list[str] = []
        ended_by_user = partial(lambda pieces: len(pieces) == 10, pieces) if most == 10 else never
        answer = talk.answer(text, GREEDY, 0, pieces.append, ended_by_user)
        context = talk._tokens[: -len(answer.token_ids)]
        assert answer.token_ids == by_transformers(model, context, list(talk.end_ids), most)
        assert "".join(pieces) == talk.tokenizer.decode(answer.token_ids)
        if not computed:
            messages = [{"role": "user", "content": text}]
            assert context == tokenizer.encode(tokenizer.apply_chat_template(messages))

        # The last token of an answer is not computed, nor a block of the cache that is not full.
        assert answer.stats.computed_prompt_tokens == len(context) - computed // BLOCK * BLOCK
        computed = len(context) + len(answer.token_ids) - 1


def test_a_character_is_shown_when_it_is_whole() -> None:
    tokenizer = chat_tokenizer("chatml")
    text = "N\u00e9 \U0001f642 " * 20 + "\u6f22!"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    stream = TextStream(tokenizer.decode)
    pieces = [stream.add([token]) for token in ids] + [stream.add([], is_end=True)]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert max(map(len, pieces)) <= 2

    torn = tokenizer.encode("\U0001f642")[:2]
    for tokens in (torn, [*torn, *tokenizer.encode("a")], torn * 50):
        stream = TextStream(tokenizer.decode)
        pieces = [stream.add([token]) for token in tokens]
        shown = "".join(pieces) + stream.add([], is_end=True)
        assert shown == tokenizer.decode(tokens) and pieces[0] == ""


def test_a_text_goes_on_until_the_model_ends_it() -> None:
    talk = talk_of(tiny_model(chat_tokenizer("chatml")), "chatml", template="")
    tokenizer = talk.tokenizer
    with pytest.raises(DataError, match="no system message"):
        talk.check_system("Be brief.")
    first = talk.answer("I think", GREEDY, 0, ignore)
    assert not talk.has_template and not first.stopped
    talk.answer(" so", GREEDY, 0, ignore)
    begun = [*tokenizer.encode("I think"), *first.token_ids, *tokenizer.encode(" so")]
    assert talk._tokens[: len(begun)] == begun

    talk.end_ids = range(tokenizer.highest_id + 1)
    assert talk.answer("a", GREEDY, 0, ignore).stopped
    talk.answer("I think", GREEDY, 0, ignore)
    assert talk._tokens == [*tokenizer.encode("I think"), first.token_ids[0]]


def test_a_system_message_a_long_conversation_and_seeds() -> None:
    model = tiny_model(chat_tokenizer("chatml"))
    talk = talk_of(model, "chatml", max_length=100)
    talk.check_system(" Be brief. ")
    talk.begin("Be brief.")
    hot = SamplingParams(temperature=1.0, max_tokens=12, seed=1)
    first = talk.answer("What is 1 + 2?", hot, 0, ignore).token_ids
    with pytest.raises(DataError, match="has [0-9]{3} tokens.* room for 100.*/new"):
        talk.answer("I think so. " * 40, hot, 1, ignore)
    before = list(talk._tokens)
    second = talk.answer("Sure?", SamplingParams(temperature=1.0, max_tokens=99, seed=1), 1, ignore)
    assert talk._tokens[: len(before)] == before
    assert len(talk._tokens) == 100 and not second.stopped

    answers = []
    for number, seed in ((0, 1), (1, 1), (0, 2)):
        talk.begin(None)
        answers.append(talk.answer("What is 1 + 2?", replace(hot, seed=seed), number, ignore))
    assert answers[0].token_ids == first
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    assert "Be brief." in talk.tokenizer.decode(talk._tokens)
    talk.begin("")
    talk.answer("What is 1 + 2?", hot, 0, ignore)
    assert "Be brief." not in talk.tokenizer.decode(talk._tokens)

    silent = talk_of(
        model,
        "chatml",
        "{% for m in messages if m.role != 'system' %}<|im_start|>"
        "{{ m.role + '\n' + m.content }}<|im_end|>{% endfor %}",
    )
    with pytest.raises(DataError, match="leaves out the system message"):
        silent.check_system("Be brief.")
