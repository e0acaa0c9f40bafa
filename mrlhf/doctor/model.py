"""Checks of a model's directory: its family, its weights, its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mrlhf.checkpoint.conversion.adapter_source import AdapterSource
from mrlhf.checkpoint.conversion.model_files import stated_head
from mrlhf.data.hub import base_of_adapter
from mrlhf.data.hub_files import read_object
from mrlhf.data.tokenizer import Message, Tokenizer, holds_tokenizer, load_tokenizer
from mrlhf.doctor.findings import Finding, broken, judged, look, ok
from mrlhf.errors import ConfigError
from mrlhf.inputs.vocabulary import check_vocabularies, warn_of_ends
from mrlhf.models.families import load_spec
from mrlhf.models.generation_config import end_token_ids
from mrlhf.models.weight_files import check_weight_files
from mrlhf.weights.stored import ADAPTER_CONFIG

_TALK = ("What is 2 + 2?", "<think>\nEasy.\n</think>\n\n4", "And 3 + 3?", "6")


def model(directory: Path) -> Iterator[Finding]:
    """Look over the files of a language model, a reward model, or an adapter and its base.

    It raises as a run that cannot use them.
    """
    weights = directory
    if (directory / ADAPTER_CONFIG).is_file():
        adapter = AdapterSource(directory, base=None, step=None)
        weights = Path(base_of_adapter(read_object(directory / ADAPTER_CONFIG, ConfigError)))
        yield ok("adapter", f"{len(adapter.tensors)} tensors, which fit the model {weights}")

    head = stated_head(weights)
    spec = load_spec(weights, head)
    sizes = f"{spec.num_layers} layers, vocabulary {spec.vocab_size}"
    scores = ", with a scalar head" if head == "scalar" else ""
    yield ok("config.json", f"{spec.family}, {sizes}{scores}")
    for remark in check_weight_files(weights, spec, needs_head=head == "scalar"):
        yield look("weights", remark)
    yield ok("weights", "every tensor is there, in its shape, and none is left over")

    if not holds_tokenizer(directory):
        yield look("tokenizer", "none beside the weights", "name one in data.tokenizer")
        return
    yield from tokenizer(load_tokenizer(directory), spec.vocab_size, end_token_ids(directory))


def tokenizer(loaded: Tokenizer, vocab_size: int, end_tokens: dict[int, str]) -> Iterator[Finding]:
    """Look over a tokenizer beside its model's vocabulary and end tokens; raises a ConfigError."""
    check_vocabularies({"the model": vocab_size}, loaded.highest_id)
    warn_of_ends(end_tokens, loaded, draws=True)
    end = loaded.decode([loaded.eos_id], skip_special_tokens=False)
    yield ok("tokenizer", f"{len(loaded.ids)} tokens; a response ends with {end!r}")
    yield from chat_template(loaded)


def chat_template(loaded: Tokenizer) -> Iterator[Finding]:
    """Whether the text of a conversation begins with that of its first messages."""
    if not loaded.has_chat_template:
        advice = "prompts must be plain text; for chat messages name a file in data.chat_template"
        yield look("chat template", "none", advice)
        return

    roles = ("user", "assistant", "user", "assistant")
    talk: list[Message] = [
        {"role": role, "content": text} for role, text in zip(roles, _TALK, strict=True)
    ]
    whole = loaded.apply_chat_template(talk, add_generation_prompt=False)
    for text in (_TALK[0], _TALK[2], _TALK[3]):
        if text not in whole:
            yield broken("chat template", f"it drops the message {text!r}", "mend it")
            return

    first = loaded.apply_chat_template(talk[:2], add_generation_prompt=False)
    asked = loaded.apply_chat_template(talk[:1], add_generation_prompt=True)
    same_header = first.startswith(asked.rstrip())
    yield judged(
        same_header,
        "chat template",
        f"an answer {'begins' if same_header else 'does not begin'} with its header",
        "what the policy continues differs from what fine-tuning trained on; compare the template "
        "with and without add_generation_prompt",
    )

    stays = whole.startswith(first.rstrip())
    yield judged(
        stays,
        "chat template",
        f"earlier messages {'stay as they are' if stays else 'change when another follows'}",
        "often it drops their thinking; a policy that is trained on several turns then sees other "
        "text than it wrote",
    )
