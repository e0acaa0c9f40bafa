"""docs/families.md is followed: its example reads a configuration, and what it names is there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mrlhf.errors import ConfigError
from mrlhf.models.families import FAMILIES, Family
from tests.shards import tiny_spec

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")


def test_the_example_reads_a_configuration() -> None:
    [block] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    example: dict[str, Any] = {}
    exec(block, example)
    family = example["MY_MODEL"]
    assert (family.model_type, family.class_name("lm")) == ("my_model", "MyModelForCausalLM")

    llama = tiny_spec("llama")
    config = {**llama.hf_config, "model_type": "my_model"}
    spec = family.read_config(config, "lm")
    assert spec.qkv_bias and not llama.qkv_bias
    assert "model.layers.0.self_attn.q_proj.bias" in family.tensor_shapes(spec)
    with pytest.raises(ConfigError, match="use_sliding_window"):
        family.read_config({**config, "use_sliding_window": True}, "lm")


def test_the_page_names_files_and_fields_that_exist() -> None:
    for path in re.findall(r"`((?:mrlhf|tests)/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path
    for field in fields(Family):
        assert f"`{field.name}`" in PAGE, field.name


def test_the_page_of_models_names_every_family() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert not [name for name in FAMILIES if f"| `{name}` |" not in page]
