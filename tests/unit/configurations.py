"""Configurations that fit, to be changed key by key, and what the checks say of one."""

import re

import pytest
import yaml

from mrlhf.config import PPOConfig
from mrlhf.errors import ConfigError
from mrlhf.preflight import check


def ppo(**changes):
    """A configuration that fits 8 ranks; `changes` replace keys, with `__` for the dot."""
    tree = {
        "actor": {
            "path": "none",
            "tp": 2,
            "pp": 2,
            "ppo_mini_batch_size": 16,
            "micro_batch_tokens": 512,
        },
        "critic": {"tp": 2, "micro_batch_tokens": 512},
        "reward": {"terms": [{"name": "gsm8k"}]},
        "rollout": {"n": 2, "tp": 2},
        "data": {
            "train_files": "a.jsonl",
            "train_batch_size": 64,
            "max_prompt_length": 40,
            "max_response_length": 60,
        },
        "trainer": {"output_dir": "out", "total_steps": 10},
        "algorithm": {},
        "reference": {},
    }

    return PPOConfig.model_validate(changed(tree, changes))


def supervised(root, **changes):
    tree = {
        "model": {"path": "none", "tp": 2, "micro_batch_tokens": 256},
        "data": {"train_files": "a.jsonl", "max_length": 128, "batch_size": 16},
        "trainer": {"output_dir": "out"},
        "optim": {},
    }
    return root.model_validate(changed(tree, changes))


def changed(tree, changes):
    for key, value in changes.items():
        *path, last = key.split("__")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    return tree


def read_changes(row, **places):
    """The changes of a row of a table, as `changed` takes them; `{name}` stands for a place."""
    for name, path in places.items():
        row = row.replace(f"{{{name}}}", str(path))
    pairs = [change.split("=", 1) for change in row.split("; ")]
    return {key.replace(".", "__"): yaml.safe_load(value) for key, value in pairs}


def holds(said, words):
    """Whether a message holds the words of a row, where " ... " stands for anything."""
    return re.search(".*".join(map(re.escape, words.split(" ... "))), said) is not None


def problems(config, world_size):
    with pytest.raises(ConfigError) as caught:
        check(config, world_size)
    return str(caught.value).splitlines()
