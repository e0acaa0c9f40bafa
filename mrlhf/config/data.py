"""The section `data` of each launcher: which files are read, and how much of them at once.

It does not know what stands in the files.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mrlhf.config.fields import Count, Files, PathText, Section, Switch, Tokens

Overlong = Literal["error", "drop"]


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
    gen_batch_size: Count = Field(
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

    switches = (Switch("val_files", bool, ("held_out_fraction",), "is set", "leave that empty"),)

    batch_size: Count = Field(256, description="pairs in one optimizer step")
    held_out_fraction: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="fraction of the prompts of train_files that is kept for validation if "
        "val_files is empty",
    )
