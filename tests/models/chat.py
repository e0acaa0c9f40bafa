"""Small tokenizers with the special tokens and the chat templates of published models.

The templates are written after the formats that the models document, in `tests/chat_templates`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Pipeline
from transformers import PreTrainedTokenizerFast

from mrlhf.data.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[1] / "chat_templates"
_CORPUS = [
    'What is 1 + 2? It is 3. {"name": "add", "arguments": {"a": 1, "b": 2}} assistant user system',
    "I think so.\n\nThe sum is 3, the answer is 30, and so on.\n\n",
] * 4
# As in newer vocabularies, lines' ends stay together, whatever follows them.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Chat:
    """The tokens of a family."""

    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    ends: tuple[str, ...] = ()  # further tokens that end a response


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]"),
    *("[/SYSTEM_PROMPT]", "[ARGS]", "[CALL_ID]"),
)
_TOOL_MARKS = ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
_OUTPUT_MARKS = ("outputs▁begin", "output▁begin", "output▁end", "outputs▁end")
CHATS = {
    "qwen2.5": Chat((*_CHATML, "<tool_call>", "</tool_call>"), "<|im_end|>", None, _CHATML[:1]),
    "qwen3": Chat(
        (*_CHATML, "<tool_call>", "</tool_call>", "<think>", "</think>"),
        *("<|im_end|>", None, _CHATML[:1]),
    ),
    "llama3.1": Chat(
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        ),
        *("<|eot_id|>", "<|begin_of_text|>", ("<|eom_id|>", "<|end_of_text|>")),
    ),
    "mistral_v3": Chat(_MISTRAL, "</s>", "<s>"),
    "mistral_nemo": Chat(_MISTRAL, "</s>", "<s>"),
    "deepseek_v3": Chat(
        (
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *(f"<｜tool▁{mark}｜>" for mark in (*_TOOL_MARKS, *_OUTPUT_MARKS)),
        ),
        *("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
    ),
    "glm4": Chat(
        (
            *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
            "<|observation|>",
        ),
        *("<|endoftext|>", None, ("<|user|>", "<|observation|>")),
    ),
    "gemma": Chat(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>", ("<end_of_turn>",)
    ),
    "phi4": Chat((*_CHATML, "<|im_sep|>"), "<|im_end|>"),
    "phi4_mini": Chat(
        (
            *("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>"),
            *("<|/tool|>", "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
        ),
        *("<|endoftext|>", None, ("<|end|>",)),
    ),
    "chatml": Chat(_CHATML, "<|im_end|>"),
    "smollm3": Chat((*_CHATML, "<think>", "</think>"), "<|im_end|>"),
    "harmony": Chat(
        (
            *("<|endoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>"),
            "<|return|>",
        ),
        *("<|return|>", None, ("<|endoftext|>", "<|call|>")),
    ),
}
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
# Family: how it draws a call and an answer, with the token that ends each.
DRAWN = {
    "qwen2.5": (f"{HERMES_CALL}<|im_end|>", "It is 3.<|im_end|>"),
    "qwen3": (
        f"<think>\nso\n</think>\n\n{HERMES_CALL}<|im_end|>",
        "<think>\nwell\n</think>\n\nIt is 3.<|im_end|>",
    ),
    "llama3.1": ('{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "It is 3.<|eot_id|>"),
    "mistral_v3": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "call00000"}]</s>',
        " It is 3.</s>",
    ),
    "mistral_nemo": ('[TOOL_CALLS]add[ARGS]{"a": 1}</s>', "It is 3.</s>"),
    "deepseek_v3": (f"{DEEPSEEK_CALL}<｜end▁of▁sentence｜>", "It is 3.<｜end▁of▁sentence｜>"),
    "glm4": ('add\n{"a": 1}<|observation|>', "\nIt is 3.<|user|>"),
    "gemma": ("", "It is 3.<end_of_turn>"),
    "phi4": ("", "It is 3.<|im_end|>"),
    "phi4_mini": (
        '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|><|end|>',
        "It is 3.<|end|>",
    ),
    "chatml": ("", "It is 3.<|im_end|>"),
    "smollm3": (f"so\n</think>\n{HERMES_CALL}<|im_end|>", "well</think>It is 3.<|im_end|>"),
    "harmony": (
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        "<|channel|>final<|message|>It is 3.<|return|>",
    ),
}


def chat_tokenizer(name: str, template: str | None = None) -> Tokenizer:
    """The family's small tokenizer, with its template, with another, or ("") with none."""
    chat = CHATS[name]
    pipeline = Pipeline(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pipeline.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator(_CORPUS, trainer)
    pipeline.add_special_tokens([AddedToken(token, normalized=False) for token in chat.special])

    names = {"eos_token": chat.eos, **({"bos_token": chat.bos} if chat.bos else {})}
    backend = PreTrainedTokenizerFast(tokenizer_object=pipeline, **names)
    own = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    backend.chat_template = (own if template is None else template) or None
    return Tokenizer(backend)


def end_ids(name: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a response of the family."""
    return [tokenizer.encode(token)[0] for token in (CHATS[name].eos, *CHATS[name].ends)]
