"""SmolLM2-135M-Instruct as tests use it: its chats, and what transformers says of them.

Its vocabulary of 49,152 is made of bytes: a character of Chinese or an emoji is several tokens. It
has nine heads, three heads of keys and values, and an output layer that is the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

MAX_TOKENS = 40
CHATS = [
    "What is the capital of France?",
    "Write one sentence about a rainy weekend. 🌧️☔",
    "用一句话介绍北京。",
    'What does `for i in range(3): print(i)` do?\n```python\nprint("<b>hi</b> & bye")\n```',
    "Say this again: naïve café, 北京 🌧️ <b>bold</b> & more",
    "Напиши одно предложение о зиме.",
    "👨‍👩‍👧‍👦 What does this emoji show?",
    "اكتب جملة عن البحر.",
    "Why is the sky blue?",
    "List three colours.",
    "What is 37 plus 48? Answer with the number only.",
    "<script>alert('x')</script> What is this?",
    "Tell me a joke about a cat.",
    "Give me a name for a dog.",
    "Is water wet? Answer yes or no.",
    "Translate 'good morning' to Spanish.",
    "नमस्ते कहो।",
    "Who wrote Hamlet?",
    "Finish: roses are red,",
    ".",
]


@dataclass(frozen=True)
class Answer:
    """What transformers generates greedily, and its logits at each token."""

    token_ids: list[int]
    logits: Tensor  # float32 [response_len, vocab]


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers has it, each operation as the formulas say."""
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]]) -> list[Answer]:
    """Greedy answers to all prompts in one batch, each up to its end token or `MAX_TOKENS`."""
    end = model.generation_config.eos_token_id
    width = max(map(len, prompts))
    ids = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        pad_token_id=end,
        return_dict_in_generate=True,
        output_logits=True,
    )

    logits = torch.stack(output.logits, dim=1).float()
    answers = []
    for row, tokens in enumerate(output.sequences[:, width:].tolist()):
        length = tokens.index(end) + 1 if end in tokens else len(tokens)
        answers.append(Answer(tokens[:length], logits[row, :length]))
    return answers


@torch.no_grad()
def evaluate(
    model: Any, prompts: list[list[int]], responses: list[list[int]], temperature: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Of each sequence alone: log-probs of the response's tokens, and the states they come from.

    Returns:
        float32 [response_len], and [response_len, hidden], one of each for a sequence.
    """
    logprobs = []
    states = []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([prompt + response])
        hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
        log_p = F.log_softmax(model.lm_head(hidden).float() / temperature, dim=-1)
        logprobs.append(log_p.gather(1, torch.tensor(response)[:, None])[:, 0])
        states.append(hidden)
    return logprobs, states
