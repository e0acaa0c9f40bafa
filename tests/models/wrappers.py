"""Checks of the language model within one that also reads images."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrlhf.checkpoint.conversion.convert import SourceOptions, TargetOptions, convert
from mrlhf.checkpoint.conversion.model_files import HuggingFaceSource
from mrlhf.models.families import load_spec
from mrlhf.models.generation_config import end_token_ids
from mrlhf.models.spec import ModelSpec
from mrlhf.models.weight_files import check_weight_files

ENDS = [5, 7]
"""The end tokens that a wrapper's `text_config` states."""
TOKENS = torch.arange(30)[None]


def as_plain(images: Path, text: Path) -> None:
    """Convert a model's files to those of its language model alone."""
    convert(
        images,
        text,
        SourceOptions(),
        TargetOptions(format="huggingface"),
        verify=True,
        start=lambda *_: lambda _: None,
    )


def assert_taken_out(
    directory: Path, spec: ModelSpec, others: int, kind: type[PreTrainedModel], wanted: Tensor
) -> None:
    """The files in `images` hold this language model, and `others` more tensors.

    As `text` they load as transformers' class `kind`, with the logits `wanted` of `TOKENS`.
    """
    images, text = directory / "images", directory / "text"
    assert load_spec(images, "lm") == spec
    assert check_weight_files(images, spec, needs_head=False) == ()
    assert set(end_token_ids(images)) == {*ENDS}
    told = HuggingFaceSource(images).description.left_out
    assert told == [f"tensors of a draft model or of what reads images: {others}"]

    as_plain(images, text)
    assert load_spec(text, "lm") == spec
    written = AutoModelForCausalLM.from_pretrained(text).eval()
    assert type(written) is kind
    with torch.no_grad():
        assert torch.equal(written(TOKENS).logits, wanted)
