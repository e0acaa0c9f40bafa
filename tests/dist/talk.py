"""What a conversation needs: an environment, a chat template, a tokenizer, a parser of calls.

The environment, and a rollout function that does what it does, are sources of a user's file.
"""

from __future__ import annotations

import string
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline
from transformers import PreTrainedTokenizerFast

from mrlhf.batch import Prompts
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.episodes.tool_calls import ParsedTurn

SILENT = 21  # the uid whose environment hangs
ENVIRONMENT = """
import time


class Talk:
    def reset(self, row):
        if row["uid"] == 3:
            raise ValueError("nothing to say")
        if row["uid"] == 9:
            return "too long" * 5
        if row["uid"] == 21:
            time.sleep(1000)
        self.sizes, self.uid = [], row["uid"]
        return f"go {row['uid']}" if row["uid"] % 2 else None

    def note(self, size: int) -> str:
        self.sizes.append(size)
        if self.uid == 5:
            return "no token: \u00e9"
        return "x" * (size % 5)

    def reply(self, text):
        self.sizes.append(len(text))
        if self.uid == 5:
            return "no token: \u00e9"
        return None if len(self.sizes) > self.uid % 4 else f"ok {len(text)}"

    def turn_reward(self):
        return self.sizes[-1] / 2

    def reward(self):
        return {"score": sum(self.sizes), "turns": len(self.sizes)}
"""
FUNCTION = """
TOOL = {"type": "function", "function": {"name": "note"}}


async def lead(engine, row, sampling):
    uid = row["uid"]
    first = [{"role": "user", "content": f"go {uid}"}] if uid % 2 else []
    one = await engine.prompt(row["prompt"] + first, tools=[TOOL])
    begin, turns = len(one.token_ids), 0
    while True:
        one = await engine.generate(one, max_tokens=60 - (len(one.token_ids) - begin))
        turns += 1
        size = len(one.text)
        if not one.stopped or turns == sampling.max_turns:
            return one
        told = f"ok {size}"
        if one.calls:
            assert one.calls == [{"name": "note", "arguments": {"size": size}}] and not one.content
            told = [{"role": "tool", "name": "note", "content": "x" * (size % 5)}]
        elif turns > uid % 4:
            return one
        longer = await engine.tell(one, told)
        if len(longer.token_ids) - begin >= 60:
            return one
        one = longer
"""
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|tools|>")
TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools[0].function.name }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Writes turns that others follow without some letters.
FORGETS = (
    "{% if tools %}<|tools|>{{ tools[0].function.name }}<|end|>{% endif %}"
    "{% for message in messages %}{% set ns = namespace(text=message.content) %}"
    "{% if message.role == 'assistant' and not loop.last %}{% for letter in 'bcdhjkmpvxy' %}"
    "{% set ns.text = ns.text | replace(letter, '') %}{% endfor %}{% endif %}"
    "<|{{ message.role }}|>{{ ns.text }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """Each character is a token."""
    vocabulary = {text: number for number, text in enumerate((*SPECIAL, *string.printable[:95]))}
    pipeline = Pipeline(models.WordLevel(vocabulary, unk_token="none"))
    pipeline.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    pipeline.decoder = decoders.Fuse()
    pipeline.add_special_tokens(list(SPECIAL))
    backend = PreTrainedTokenizerFast(
        tokenizer_object=pipeline, eos_token="<|end|>", chat_template=template
    )
    return Tokenizer(backend)


def prompts_of(tokenizer: Tokenizer, tools: Any, uids: list[int]) -> Prompts:
    """A prompt for each uid."""
    messages = [[{"role": "user", "content": f"say {uid}"}] for uid in uids]
    texts, tokens = zip(*(tokenizer.encode_prompt(m, tools) for m in messages), strict=True)
    extra = [{"prompt": message} for message in messages]
    nothing = [""] * len(uids)
    return Prompts(list(tokens), uids, list(texts), nothing, nothing, extra)


def parse(text: str) -> ParsedTurn:
    """A turn with an odd number of characters is a call."""
    if len(text) % 2:
        return ParsedTurn("", (("note", {"size": len(text)}),), None)
    return ParsedTurn(text, (), None)


def parse_some(text: str) -> ParsedTurn:
    """The same, but some calls cannot be read."""
    return ParsedTurn("", (), "it is no call") if len(text) % 7 == 3 else parse(text)


def text_of(tokens: list[int]) -> str:
    every = (*SPECIAL, *string.printable[:95])
    return "".join(every[token] for token in tokens)


def tokens_of(text: str) -> list[int]:
    """The tokens of a text with special tokens."""
    tokens = []
    while text:
        special = next((s for s in SPECIAL if text.startswith(s)), text[0])
        tokens.append((*SPECIAL, *string.printable[:95]).index(special))
        text = text[len(special) :]
    return tokens
