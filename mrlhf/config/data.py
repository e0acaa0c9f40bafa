"""The section `data` of each launcher: which files are read, and how much of them at once.

It does not know the contents of the files.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrlhf.config.fields import Count, Day, Files, PathText, Section, Tokens
from mrlhf.config.reads import KeyPlace, NotRead, ReadIf, read_if

Overlong = Literal["error", "drop"]
_FILTERS = "algorithm.filter_groups.enable"


def _not_filtered(place: KeyPlace) -> NotRead | None:
    """A different number of prompts to generate, although none of them is dropped."""
    if place.value(_FILTERS):
        return None
    prompts = place.value("train_batch_size")
    why = f" beside data.train_batch_size {prompts}, since {_FILTERS} is false"
    return NotRead(why, "turn that on", (_FILTERS,))


class PromptDataSection(Section):
    """Prompts with reference answers."""

    train_files: Files = Field(min_length=1)
    """jsonl or parquet files, or org/name:split of the Hub: one name, or a list"""
    val_files: Files = Field(default_factory=list)
    """the same for validation; may be empty"""
    test_files: Files = Field(default_factory=list)
    """the same for the figures to report: asked before training and at the end alone, and nothing
    is chosen by them; may be empty"""
    tokenizer: PathText
    """directory of the tokenizer, or org/name of the Hub"""
    train_batch_size: Count = 1024
    """prompts in one training step (x rollout.n = samples)"""
    gen_batch_size: Annotated[Count, ReadIf(_not_filtered)]
    """prompts generated at once; another number only with algorithm.filter_groups"""
    max_prompt_length: Tokens = 512
    """longest prompt, tokens"""
    max_response_length: Tokens = 512
    """longest response, tokens"""
    overlong_prompts: Overlong = "error"
    """error: refuse a longer prompt; drop: leave it out"""
    shuffle: bool = True
    """use a new order in every epoch, made from seed"""
    chat_template: PathText | None = None
    """jinja file; null: the tokenizer's own template"""
    date: Day = None
    """the day that a chat template writes as today; null: that of the run's first start"""

    @property
    def validates(self) -> bool:
        """Whether there are rows for validation."""
        return bool(self.val_files)

    @property
    def max_length(self) -> int:
        """Longest prompt and response together, tokens."""
        return self.max_prompt_length + self.max_response_length


class AnyPromptsSection(PromptDataSection):
    """Prompts to answer, none of them to train on."""

    train_files: Files = Field(default_factory=list)
    """not read"""


class SupervisedDataSection(Section):
    """Sequences to learn from."""

    train_files: Files = Field(min_length=1)
    """jsonl or parquet files, or org/name:split of the Hub: one name, or a list"""
    val_files: Files = Field(default_factory=list)
    """the same for validation; may be empty"""
    tokenizer: PathText
    """directory of the tokenizer, or org/name of the Hub"""
    max_length: Tokens = 1024
    """longest sequence, prompt and response together, tokens"""
    overlong: Overlong = "error"
    """error: refuse a longer sequence; drop: leave it out"""
    batch_size: Count = 256
    """rows in one optimizer step: sequences, pairs or responses"""
    shuffle: bool = True
    """use a new order in every epoch, made from seed"""
    chat_template: PathText | None = None
    """jinja file; null: the tokenizer's own template"""
    date: Day = None
    """the day that a chat template writes as today; null: that of the run's first start"""

    @property
    def validates(self) -> bool:
        """Whether there are rows for validation."""
        return bool(self.val_files)


class SplitDataSection(SupervisedDataSection):
    """Rows of which a part is held out."""

    held_out_fraction: Annotated[
        float, read_if("val_files", lambda files: not files, "is set", "leave that empty")
    ] = Field(0.1, ge=0, lt=1)
    """fraction of the prompts of train_files that is kept for validation if val_files is empty"""

    @property
    def validates(self) -> bool:
        """Whether there are rows for validation."""
        return bool(self.val_files) or self.held_out_fraction > 0
