"""Configuration files for tests, and what reading one gives."""

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
