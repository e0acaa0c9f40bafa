"""Writes what whole runs of PPO need, with nothing downloaded: random models, a tokenizer, data.

    python benchmarks/gpu_hour_inputs.py --out DIR --json FILE SIZE [SIZE ...]

The models have the shapes of Qwen3. Every word of the vocabulary is a token, prompts are random
words, and the reward of a response is the share of its words with an even number. A random model
hardly ever draws the end of a response, so that nearly all responses have the longest length.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from gpu_record import write_json
from model_sizes import QWEN3, qwen3_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from mrlhf.data.rows import write_rows

SPECIAL = ("<unk>", "<s>", "</s>")
END = SPECIAL.index("</s>")
PROMPTS = 512
# By size: tokens of a prompt and of a response, prompts of a step, samples of each prompt
WORK = {"tiny": (8, 8, 4, 2), "0.25B": (128, 128, 32, 2), "0.6B": (256, 768, 64, 2)}

REWARD = '''
def even_words(data_source, solution_str, ground_truth, extra_info):
    """The share of the words "w<number>" with an even number."""
    words = solution_str.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))
'''


def main() -> None:
    """Write the inputs of all sizes; what is there is written anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", choices=WORK, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True, help="gets what was written")
    arguments = parser.parse_args()
    for size in arguments.sizes:
        write(size, arguments.out / size)
    write_json(arguments.json, [str(arguments.out / size) for size in arguments.sizes])


def write(size: str, root: Path) -> None:
    """Write model/, tokenizer/, train.jsonl, reward.py and ppo.yaml into `root`."""
    # As in Qwen3's own tokenizer, the last rows of the vocabulary have no token.
    words = QWEN3[size]["vocab_size"] * 511 // 512 - len(SPECIAL)
    _write_model(size, root / "model")
    _write_tokenizer(words, root / "tokenizer")

    drawn = random.Random(1)
    prompt_length = WORK[size][0]
    rows = []
    for _ in range(PROMPTS):
        prompt = " ".join(f"w{drawn.randrange(words)}" for _ in range(prompt_length))
        rows.append({"prompt": prompt, "answer": ""})
    write_rows(root / "train.jsonl", rows)
    (root / "reward.py").write_text(REWARD, encoding="utf-8")
    (root / "ppo.yaml").write_text(yaml.safe_dump(_configuration(size, root)), encoding="utf-8")


def _write_model(size: str, directory: Path) -> None:
    torch.manual_seed(1)
    config = qwen3_config(size, bos_token_id=None, eos_token_id=END, pad_token_id=END)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)


def _write_tokenizer(words: int, directory: Path) -> None:
    names = [*SPECIAL, *(f"w{number}" for number in range(words))]
    backend = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=SPECIAL[0]))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.save_pretrained(directory)


def _configuration(size: str, root: Path) -> dict[str, Any]:
    """PPO with a critic and a KL to the reference, all of this size."""
    prompt_length, response_length, prompts, samples = WORK[size]
    trained = {"ppo_mini_batch_size": prompts // 2, "micro_batch_tokens": 16384}
    return {
        "seed": 1,
        "actor": {"path": str(root / "model"), **trained, "optim": {"lr": 1e-6}},
        "critic": {**trained, "optim": {"lr": 1e-5}},
        "reward": {"terms": [{"name": f"{root / 'reward.py'}:even_words"}]},
        "algorithm": {"use_kl_in_reward": True},
        "rollout": {"n": samples},
        "data": {
            "train_files": str(root / "train.jsonl"),
            "tokenizer": str(root / "tokenizer"),
            "train_batch_size": prompts,
            "max_prompt_length": prompt_length,
            "max_response_length": response_length,
        },
        "trainer": {"console": "plain", "save_every_minutes": None, "max_to_keep": 1},
    }


if __name__ == "__main__":
    main()
