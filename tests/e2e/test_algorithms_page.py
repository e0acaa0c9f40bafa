"""docs/algorithms.md agrees with the code: its command runs, and it names all keys and methods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from mrlhf.config import PPOConfig, load_config
from mrlhf.config.correction import PRESETS, CorrectionPreset
from mrlhf.config.schema import default_in_words
from mrlhf.config.tree import nodes
from mrlhf.rl.names import (
    AdvantageEstimator,
    BypassLoss,
    FilterMetric,
    KlControllerKind,
    KlKind,
    KlPlacement,
    LossAggMode,
    LossMode,
    RewardKlKind,
    RewardNorm,
    Statistic,
    WeightLevel,
)
from tests.e2e.programs import ROOT, run_commands, succeed
from tests.pages import commands_of

PAGE = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
SECTIONS = {section.split("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
KEYS = nodes(PPOConfig)
FULL_KEY = re.compile(r"`((?:algorithm|actor|critic|rollout|data|trainer)(?:\.\w+)+)`")
CHOICES: list[Any] = [
    AdvantageEstimator,
    LossMode,
    LossAggMode,
    RewardKlKind,
    KlKind,
    KlPlacement,
    KlControllerKind,
    RewardNorm,
    FilterMetric,
    Statistic,
    CorrectionPreset,
    WeightLevel,
    BypassLoss,
]
VALUES = {name for choice in CHOICES for name in get_args(choice)}


def section(start: str) -> str:
    (found,) = [text for title, text in SECTIONS.items() if title.startswith(start)]
    return found


def first_column(text: str) -> list[list[str]]:
    """The words in backticks of the first cell of each row of the section's tables."""
    rows = [line.split(" | ")[0] for line in text.split("\n") if line.startswith("| ")]
    return [re.findall(r"`([^`]+)`", cell) for cell in rows if "`" in cell]


def plain(default: str) -> object:
    try:
        return float(default)
    except ValueError:
        return default


def test_its_command_checks_the_combination() -> None:
    # `make demo` writes the model and the data that it names.
    output = succeed(run_commands(commands_of("docs/algorithms.md"), "--allow-missing"))
    assert "algorithm.adv_estimator grpo" in output and " fits " in output


def test_its_defaults_are_the_defaults() -> None:
    value = r"(?:`([\w-]+)`|(null|true|false|\d[\d.]*\d|\d))"
    stated = re.findall(rf"{FULL_KEY.pattern} (?:[αμN] )?\(?{value}(?![\w.]*_)", PAGE)
    assert len(stated) > 45
    wrong = {
        name: (text, number)
        for name, text, number in stated
        if plain(default_in_words(PPOConfig, KEYS[name])) != plain(text or number)
    }
    assert not wrong


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: get_args(choice)[0])
def test_it_names_every_choice(choice: Any) -> None:
    assert not [name for name in get_args(choice) if f"`{name}`" not in PAGE]


def test_it_lists_the_shipped_files() -> None:
    shipped = {file.name for file in (ROOT / "configs" / "algorithms").glob("*.yaml")}
    (table,) = re.findall(r"\| file in `configs/algorithms/`.*?\n\n", PAGE, re.DOTALL)
    assert {
        name for names in first_column(table) for name in names if name.endswith(".yaml")
    } == shipped


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs" / "algorithms").glob("*.yaml")), ids=lambda file: file.stem
)
def test_shipped_files_are_as_the_page_has_them(file: Path) -> None:
    config = load_config(PPOConfig, [ROOT / "configs" / "arithmetic_cpu.yaml", file])
    (row,) = re.findall(rf"^\| `{file.name}` \| (.+) \|$", PAGE, re.MULTILINE)
    assert row.split(" | ")[:3] == [
        f"`{config.algorithm.adv_estimator}`",
        f"`{config.actor.policy_loss.loss_mode}`",
        f"`{config.actor.agg_mode}`",
    ]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_as_the_page_has_them(preset: str) -> None:
    rows = [
        line
        for line in section("Rollout correction").split("\n")
        if re.match(rf"\| [^|]*`{preset}`", line)
    ]
    (row,) = rows
    names, weights, rejection = (cell.strip() for cell in row.strip("|").split("|"))

    wanted = PRESETS[preset]
    if "rollout_is" in wanted:
        assert f"`{wanted['rollout_is']}`" in weights
        assert str(wanted["rollout_is_threshold"]) in weights
    else:
        assert not weights

    if "rollout_rs" in wanted:
        assert f"`{wanted['rollout_rs']}` {wanted['rollout_rs_threshold']}" in rejection
    else:
        assert not rejection or rejection.startswith("none, ")

    assert ("bypass" in names) == ("bypass_mode" in wanted)


def test_names_elsewhere_are_of_things_that_exist_here() -> None:
    for names in first_column(section("Names elsewhere")):
        for name in names:
            is_key = any(key == name or key.endswith(f".{name}") for key in KEYS)
            is_section = name.endswith(".*") and any(f".{name[:-1]}" in key for key in KEYS)
            assert is_key or is_section or name in VALUES or name.startswith('"'), name
