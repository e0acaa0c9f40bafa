"""Configuration files and tables of cases for tests, and what reading a file gives."""

import re
from pathlib import Path

import pytest

from mrlhf.config import PPOConfig, load_config
from mrlhf.errors import ConfigError

PPO = """
seed: 7
actor: {path: models/policy, tp: 2, clip_ratio: 0.1, optim: {lr: 1e-4}}
critic: {pp: 2}
rollout:
reward: {terms: [{name: gsm8k}]}
data: {train_files: [a.jsonl, b.parquet], max_response_length: 96}
trainer: {output_dir: out}
"""
SUPERVISED = """
model: {path: models/policy}
data: {train_files: a.jsonl}
trainer: {output_dir: out}
"""


def load_text(tmp_path, text, *overrides, root=PPOConfig):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return load_config(root, path, list(overrides))


def message(tmp_path, text, *overrides, root=PPOConfig):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text, *overrides, root=root)
    return str(caught.value)


def write(path, text):
    path.write_text(text)
    return path


def read_cases(name):
    """The rows of a table: kind of training, ranks, changes, and the lines below them."""
    cases = []
    for line in Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines():
        heading = re.fullmatch(r"\[(\w+)(?:, (\d+) ranks)?\]", line)
        if heading is not None:
            kind = heading[1]
            ranks = int(heading[2] or 1)
        elif line.startswith(" "):
            cases[-1][-1].append(line.removeprefix("    "))
        elif line and not line.startswith("#"):
            cases.append((kind, ranks, line, []))
    return cases
