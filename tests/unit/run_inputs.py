"""A directory with all that a run reads, and the configurations of runs in it."""

import json

import pytest
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from configs.recipes.data.vocabulary import train_sentencepiece
from mrlhf.config import PPOConfig
from mrlhf.errors import MrlhfError
from mrlhf.inputs import read_ppo_inputs
from mrlhf.preflight import dry_run, preflight
from tests.unit.configurations import changed
from tests.users_file import REWARDS

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROWS = {
    "train.jsonl": [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)],
    "val.jsonl": [{"prompt": "9+1=", "answer": "10"}],
    "pairs.jsonl": [
        {"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "0"} for n in range(10)
    ],
}
FILES = {
    "broken.py": "import nothing_of_this_name\n",
    "chat.jinja": "{% for m in messages %}{{ m.content }}={% endfor %}",
    "alternates.jinja": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}={% endfor %}"
    ),
    "greets.py": """
class Greets:
    def reset(self, row):
        return "2=" + row["answer"]

    def reply(self, text): ...

class Fails(Greets):
    def reset(self, row):
        raise KeyError("no server here")
""",
}


def _write_model(directory, kind, vocab_size):
    """A model with random weights; its config.json stays as it is written here."""
    config = MODEL | {"architectures": [kind.__name__], "vocab_size": vocab_size, "num_labels": 1}
    model = kind(LlamaConfig(**config))
    directory.mkdir()
    save_file(model.state_dict(), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def write_inputs(root):
    """Write models, a tokenizer, rows, rewards and environments into the directory `root`."""
    train_sentencepiece([*"0123456789+="], root / "tokenizer", vocab_size=32, byte_fallback=False)
    _write_model(root / "model", LlamaForCausalLM, 64)
    _write_model(root / "small", LlamaForSequenceClassification, 9)
    _write_model(root / "large", LlamaForCausalLM, 96)
    _write_model(root / "scores", LlamaForSequenceClassification, 64)
    for name, rows in ROWS.items():
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rewards.py").write_text(REWARDS)
    for name, text in FILES.items():
        (root / name).write_text(text)


def ppo(**changes):
    tree = {
        "actor": {"path": "model", "ppo_mini_batch_size": 4},
        "reward": {"terms": [{"name": "rewards.py:score"}]},
        "data": {
            "train_files": "train.jsonl",
            "val_files": "val.jsonl",
            "tokenizer": "tokenizer",
            "train_batch_size": 4,
            "max_prompt_length": 8,
            "max_response_length": 8,
        },
        "trainer": {"output_dir": "out", "total_epochs": 3},
    }
    return PPOConfig.model_validate(changed(tree, changes))


def supervised(root, file, **changes):
    tree = {
        "model": {"path": "model"},
        "data": {"train_files": file, "tokenizer": "tokenizer", "max_length": 32, "batch_size": 4},
        "trainer": {"output_dir": "out", "total_epochs": 3},
    }
    return root.model_validate(changed(tree, changes))


def refusal(config):
    """The one line with which both the dry run and a run refuse `config`."""
    with pytest.raises(MrlhfError) as dry:
        dry_run(config, 1)
    with pytest.raises(MrlhfError) as real:
        preflight(config, 1)
        read_ppo_inputs(config)
    assert str(dry.value) == str(real.value)
    assert "\n" not in str(dry.value)
    return str(dry.value)
