"""Engines whose package is missing, or of another version."""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest

from mrlhf.errors import ConfigError
from mrlhf.inference.installed import require_engine


def test_absent_vllm_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"vllm, which is not installed; run 'make vllm' .*pip install 'vllm==0\.32\.\*'",
    ):
        require_engine("vllm")
    require_engine("native")


def test_another_version_of_vllm_is_named(monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(origin="vllm/__init__.py")
    )
    found = [SimpleNamespace(name="vllm", version="0.31.2")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    with pytest.raises(ConfigError, match=r"vLLM 0.31.2 is not 0.32; run 'make vllm'"):
        require_engine("vllm")
    found[0].version = "0.32.4"
    require_engine("vllm")
