"""The section `data` of each launcher: which files are read, and how much of them at once.

It does not know the contents of the files.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrlhf.config.fields import Count, Files, PathText, Section, Tokens
from mrlhf.config.reads import NotRead, Place, ReadIf, read_if

Overlong = Literal["error", "drop"]
_FILTERS = "algorithm.filter_groups.enable"


def _not_filtered(place: Place) -> NotRead | None:
    """A different number of prompts to generate, although none of them is dropped."""
    if place.value(_FILTERS):
        return None
    prompts = place.value("train_batch_size")
    why = f" beside data.train_batch_size {prompts}, since {_FILTERS} is false"
    return NotRead(why, "turn that on", (_FILTERS,))


class PromptDataSection(Section):
    """Prompts with reference answers."""

    train_files: Files = Field(
        min_length=1, description="jsonl or parquet files: one name, or a list"
    )
    val_files: Files = Field(
        default_factory=list, description="the same for validation; may be empty"
    )
    test_files: Files = Field(
        default_factory=list,
        description="the same for the figures to report: asked before training and at the end "
        "alone, and nothing is chosen by them; may be empty",
    )
    tokenizer: PathText = Field(description="directory of the tokenizer")
    train_batch_size: Count = Field(
        1024, description="prompts in one training step (x rollout.n = samples)"
    )
    gen_batch_size: Annotated[Count, ReadIf(_not_filtered)] = Field(
        description="prompts generated at once; another number only with algorithm.filter_groups"
    )
    max_prompt_length: Tokens = Field(512, description="longest prompt, tokens")
    max_response_length: Tokens = Field(512, description="longest response, tokens")
    overlong_prompts: Overlong = Field(
        "error", description="error: refuse a longer prompt; drop: leave it out"
    )
    shuffle: bool = Field(True, description="use a new order in every epoch, made from seed")
    chat_template: PathText | None = Field(
        None, description="jinja file; null: the tokenizer's own template"
    )

    @property
    def max_length(self) -> int:
        """Longest prompt and response together, tokens."""
        return self.max_prompt_length + self.max_response_length


class SupervisedDataSection(Section):
    """Sequences to learn from."""

    train_files: Files = Field(
        min_length=1, description="jsonl or parquet files: one name, or a list"
    )
    val_files: Files = Field(
        default_factory=list, description="the same for validation; may be empty"
    )
    tokenizer: PathText = Field(description="directory of the tokenizer")
    max_length: Tokens = Field(
        1024, description="longest sequence, prompt and response together, tokens"
    )
    overlong: Overlong = Field(
        "error", description="error: refuse a longer sequence; drop: leave it out"
    )
    shuffle: bool = Field(True, description="use a new order in every epoch, made from seed")
    chat_template: PathText | None = Field(
        None, description="jinja file; null: the tokenizer's own template"
    )


class SFTDataSection(SupervisedDataSection):
    """Prompts with the responses to learn."""

    batch_size: Count = Field(256, description="sequences in one optimizer step")


class PreferenceDataSection(SupervisedDataSection):
    """Prompts with a chosen and a rejected response."""

    batch_size: Count = Field(256, description="pairs in one optimizer step")
    held_out_fraction: Annotated[
        float, read_if("val_files", lambda files: not files, "is set", "leave that empty")
    ] = Field(
        0.1,
        ge=0,
        lt=1,
        description="fraction of the prompts of train_files that is kept for validation if "
        "val_files is empty",
    )
