"""What a configuration is refused for, and how a run is described: tables with one case a row.

A row is a line of changed keys. A line in brackets names the kind of training and the number of
ranks of the rows that follow.

In `refusals.txt` the lines below a row, indented, hold the words that the message must hold: keys,
values and numbers; a row without words must pass. The message is one line. In `descriptions.txt`
they are the lines of the description, where "..." stands for any others.
"""

from __future__ import annotations

import re

import pytest

from mrlhf.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig, load_config
from mrlhf.config.roots import AnyConfig
from mrlhf.errors import ConfigError
from mrlhf.preflight import check, describe
from tests.unit.config_files import read_cases

SUPERVISED = [
    "model={path: none, tp: 2, micro_batch_tokens: 256}",
    "data={train_files: a.jsonl, max_length: 128, batch_size: 16}",
    "trainer.output_dir=out",
]
# What is changed: it fits, and no number stands twice where a message could confuse them.
BASES: dict[str, tuple[type, list[str]]] = {
    "PPOConfig": (
        PPOConfig,
        [
            "actor={path: none, tp: 2, pp: 2, ppo_mini_batch_size: 16, micro_batch_tokens: 512}",
            "critic={tp: 2, micro_batch_tokens: 512}",
            "reward.terms=[{name: gsm8k}]",
            "rollout={n: 2, tp: 2}",
            "data={train_files: a.jsonl, train_batch_size: 64}",
            "data.max_prompt_length=40",
            "data.max_response_length=60",
            "trainer={output_dir: out, total_steps: 10}",
        ],
    ),
    "SFTConfig": (SFTConfig, SUPERVISED),
    "DPOConfig": (DPOConfig, SUPERVISED),
    "RewardModelConfig": (RewardModelConfig, SUPERVISED),
}

CASES = read_cases("refusals.txt")


def changed(kind: str, changes: str) -> AnyConfig:
    """The base with these changes."""
    root, base = BASES[kind]
    given = [] if changes == "(none)" else changes.split("; ")
    return load_config(root, None, [*base, *given])


def said_of(kind: str, ranks: int, changes: str) -> str:
    """What is said of the base with these changes; nothing if it passes."""
    try:
        check(changed(kind, changes), ranks)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "ranks", "changes", "words"), CASES, ids=[f"{case[0]}: {case[2]}" for case in CASES]
)
def test_it_is_refused_with_these_words_or_passes(
    kind: str, ranks: int, changes: str, words: list[str]
) -> None:
    said = said_of(kind, ranks, changes)
    assert bool(said) == bool(words), said or "this passes"
    assert not re.search(r"\n|\w  \w", said)
    for word in " ".join(words).split():
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", said), f"no {word} in: {said}"


def test_no_case_is_there_twice() -> None:
    rows = [case[:3] for case in CASES]
    assert not [row for row in set(rows) if rows.count(row) > 1]


def test_several_mistakes_are_all_told() -> None:
    changes = "algorithm.lam_length_alpha=0.001; rollout.tp=3; trainer.test_freq=1"
    said = said_of("PPOConfig", 6, changes)
    assert [line.split()[0] for line in said.splitlines()] == [
        "actor:",
        "rollout.tp",
        "algorithm.lam_length_alpha",
        "trainer.test_freq",
    ]


@pytest.mark.parametrize(("kind", "ranks", "changes", "lines"), read_cases("descriptions.txt"))
def test_it_is_described_in_these_lines(
    kind: str, ranks: int, changes: str, lines: list[str]
) -> None:
    said = describe(changed(kind, changes), ranks)
    wanted = (r"(?:.*\n)*" if line == "..." else re.escape(f"{line}\n") for line in lines)
    assert re.fullmatch("".join(wanted), f"{said}\n"), said
