"""What `train_step.py` measures: lengths, prompts and models, written to a directory.

Every contender reads the same directory, so all have the same weights, the same prompts token for
token, and have to generate responses of the same lengths. This file knows no contender.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from model_sizes import model_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

PAD = 0
EOS = 1
FIRST_WORD = 3  # after <pad>, <eos> and <unk>
SPREAD = 4  # the longest prompt or response is so many times the shortest
MEAN_PROMPT = 32
MEAN_RESPONSE = 64
EPOCHS = 2
MINI_BATCHES = 2
LEARNING_RATE = 1e-6
KL_COEF = 0.05
LAMBDA = 0.95


@dataclass(frozen=True)
class Case:
    """One step of PPO."""

    size: str  # the model's name in `model_sizes`
    dtype: str  # of the models, "float32" or "bfloat16"
    lengths: str  # "equal" or "spread"
    prompts: list[list[int]]  # token ids of each prompt
    response_lengths: list[int]  # tokens of the response to each prompt, its end included

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]

    @property
    def mini_batch(self) -> int:
        """Sequences of one optimizer step."""
        return len(self.prompts) // MINI_BATCHES

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Tokens of each prompt with its response, and of the response alone."""
        pairs = zip(self.prompt_lengths, self.response_lengths, strict=True)
        return [(prompt + response, response) for prompt, response in pairs]

    @property
    def tokens(self) -> int:
        """Tokens of the batch, prompts and responses."""
        return sum(length for length, _ in self.sequences)


def lengths_of(kind: str, count: int, mean: int, seed: int) -> list[int]:
    """`count` lengths whose mean is exactly `mean`.

    Args:
        kind: "equal", or "spread": as a log-uniform distribution whose longest length is `SPREAD`
            times its shortest.
        count: of lengths.
        mean: their mean.
        seed: of their order.
    """
    if kind == "equal":
        return [mean] * count

    quantiles = [SPREAD ** ((index + 0.5) / count) for index in range(count)]
    scale = count * mean / sum(quantiles)
    exact = [scale * quantile for quantile in quantiles]

    # Round so that the sum stays: the largest remainders are rounded up.
    lengths = [int(length) for length in exact]
    missing = count * mean - sum(lengths)
    by_remainder = sorted(range(count), key=lambda i: lengths[i] - exact[i])
    for index in by_remainder[:missing]:
        lengths[index] += 1

    random.Random(seed).shuffle(lengths)
    return lengths


def make_case(size: str, dtype: str, lengths: str, prompts: int) -> Case:
    """A case of so many prompts, of `MEAN_PROMPT` + `MEAN_RESPONSE` tokens in the mean."""
    vocab = model_config(size).vocab_size
    draw = random.Random(1)
    return Case(
        size,
        dtype,
        lengths,
        [
            [draw.randrange(FIRST_WORD, vocab) for _ in range(length)]
            for length in lengths_of(lengths, prompts, MEAN_PROMPT, seed=2)
        ],
        lengths_of(lengths, prompts, MEAN_RESPONSE, seed=3),
    )


def write_case(case: Case, directory: Path, batches: int) -> None:
    """Write the case, its tokenizer, models and rows of data.

    Args:
        case: what to write.
        directory: where to.
        batches: how often all prompts stand in the file of data, one batch after the other.
    """
    (directory / "case.json").write_text(json.dumps(asdict(case)))
    _write_tokenizer(directory / "tokenizer", model_config(case.size).vocab_size)
    _write_models(directory, case.size)

    rows = [json.dumps({"prompt": _text(prompt)}) for prompt in case.prompts]
    (directory / "train.jsonl").write_text("\n".join(rows * batches) + "\n")


def read_case(directory: Path) -> Case:
    """What `write_case` wrote."""
    return Case(**json.loads((directory / "case.json").read_text()))


def _text(tokens: Sequence[int]) -> str:
    """The text of which the tokenizer makes these tokens."""
    return " ".join(f"w{token}" for token in tokens)


def _write_tokenizer(directory: Path, vocab: int) -> None:
    """A tokenizer with one token a word."""
    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2}
    for token in range(FIRST_WORD, vocab):
        words[f"w{token}"] = token
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(directory)


def _write_models(directory: Path, size: str) -> None:
    """The policy, which is its own reference, a critic and a reward model; float32."""
    config = model_config(size)
    config.bos_token_id = None
    config.eos_token_id = EOS
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory / "policy")

    config.num_labels = 1
    config.pad_token_id = PAD
    for name in ("critic", "reward"):
        LlamaForSequenceClassification(config).save_pretrained(directory / name)
