"""Which prompts an engine can answer. It knows token ids and limits, and no engine."""

from __future__ import annotations

from collections.abc import Sequence

from mrlhf.errors import EngineError


def check_prompts(
    prompts: Sequence[Sequence[int]], max_tokens: int, max_length: int, vocab_size: int
) -> None:
    """Refuse prompts that are empty, too long, or of another vocabulary.

    Args:
        prompts: token ids.
        max_tokens: longest response, tokens.
        max_length: longest prompt and response together, tokens.
        vocab_size: of the model.

    Raises:
        EngineError: naming the first such prompt.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise EngineError(f"prompt {number} is empty: give every prompt at least one token")
        if len(prompt) + max_tokens > max_length:
            raise EngineError(
                f"prompt {number}: {len(prompt)} tokens + max_tokens {max_tokens} exceed the engine's max_length "
                f"{max_length}; shorten the prompt or raise data.max_prompt_length"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise EngineError(
                f"prompt {number} has token ids from {min(prompt)} to {max(prompt)}, the model's vocabulary is "
                f"{vocab_size}; use the tokenizer that belongs to the model"
            )
