"""The index of papers names every preset, and keys and tests that exist."""

from __future__ import annotations

import re

from mrlhf.config import DPOConfig, PPOConfig
from mrlhf.config.tree import nodes
from tests.pages import ROOT

ROWS = re.findall(
    r"^\| (?!paper|-)(.+?) \| (.+?) \| (.+?) \|$",
    (ROOT / "docs" / "papers.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_every_preset_has_its_paper() -> None:
    shipped = {file.stem for file in (ROOT / "configs" / "algorithms").glob("*.yaml")}
    named = {preset for _, here, _ in ROWS for preset in re.findall(r"preset `(\w+)`", here)}
    assert named == shipped


def test_keys_and_tests_exist() -> None:
    known = {*nodes(PPOConfig), *nodes(DPOConfig)}
    assert len(ROWS) > 15
    for paper, here, test in ROWS:
        keys = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", here)
        assert set(keys) <= known, paper
        assert (ROOT / test.strip("`")).is_file(), paper
