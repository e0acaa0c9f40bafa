"""Models and tokenizers as transformers 4 reads them, in a process of its own.

`python tests/models/transformers4.py ROOT` runs under transformers 4, without this package. It
makes tokenizers in ROOT/sources if they are not there, and reads all in ROOT/models and
ROOT/tokenizers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(sys.prefix) / "transformers4"  # the Makefile fills it
TEXTS = ("What is 1 + 2?", " hello", "a  b\n\n<s>x</s> y<|im_start|>user\n", "sums")
TALK = [{"role": "user", "content": "hi"}]
LENGTH = 40
_CORPUS = ["What is 1 + 2? It is 3. hello hello user assistant system sum sums\n\n"] * 20
_SPECIAL = ["<|im_start|>", "<|im_end|>"]


def run_transformers4(root: Path) -> None:
    """Run this file under transformers 4."""
    environment = {"PYTHONPATH": str(FOLDER), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, str(root)], env=environment, check=True)


def encoded(tokenizer: Any) -> list[Any]:
    """What a tokenizer makes of the texts, and the names of its special tokens."""
    special = {
        name: str(tokenizer.special_tokens_map.get(f"{name}_token")) for name in ("eos", "pad")
    }
    ids = [tokenizer.encode(text) for text in TEXTS]
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    decoded = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    talk = ""
    if tokenizer.chat_template:
        talk = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    return [special, ids, plain, decoded, talk]


def read_tokenizer(directory: Path) -> list[Any]:
    """The class of a tokenizer, and what it does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [type(tokenizer).__name__, *encoded(tokenizer)]


def _make_sources(root: Path) -> None:
    """Tokenizers as models of 2024 have them; ROOT/sentencepiece holds a tokenizer.model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        GPT2TokenizerFast,
        LlamaTokenizerFast,
        PreTrainedTokenizerFast,
        Qwen2TokenizerFast,
    )

    pipeline = Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    pipeline.train_from_iterator(_CORPUS, trainer)
    (root / "bytes").mkdir()
    vocab, merges = pipeline.model.save(str(root / "bytes"))
    bpe = {"vocab_file": vocab, "merges_file": merges, "additional_special_tokens": _SPECIAL}
    pipeline.add_special_tokens(["<s>", "</s>"])
    pieces = {"vocab_file": str(root / "sentencepiece" / "tokenizer.model")}

    made = {
        "qwen2": Qwen2TokenizerFast(**bpe),
        "gpt2": GPT2TokenizerFast(**bpe),
        "plain": PreTrainedTokenizerFast(
            tokenizer_object=pipeline,
            eos_token="</s>",
            bos_token="<s>",
            additional_special_tokens=_SPECIAL,
        ),
        "llama": LlamaTokenizerFast(**pieces, additional_special_tokens=_SPECIAL, legacy=True),
        "llama-ends": LlamaTokenizerFast(
            **pieces, add_prefix_space=False, add_bos_token=False, add_eos_token=True
        ),
    }
    for name, tokenizer in made.items():
        tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        tokenizer.save_pretrained(root / "sources" / name)


def _read_models(root: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    for directory in sorted(root.iterdir()):
        stated = json.loads((directory / "config.json").read_text())
        is_scalar = stated["architectures"][0].endswith("ForSequenceClassification")
        auto = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
        try:
            model = auto.from_pretrained(
                directory, dtype="auto", attn_implementation="eager"
            ).eval()
        except Exception as error:
            torch.save(str(error), directory / "logits.pt")
            continue
        with torch.no_grad():
            logits = model.eval()(torch.arange(LENGTH)[None] % model.config.vocab_size).logits
        torch.save([model.dtype, logits], directory / "logits.pt")


def _each(root: Path, read: Callable[[Path], list[Any]]) -> None:
    found = {directory.name: read(directory) for directory in sorted(root.iterdir())}
    (root.parent / f"{root.name}.json").write_text(json.dumps(found))


def _main(root: Path) -> None:
    import transformers

    assert transformers.__version__.startswith("4.57."), transformers.__version__
    if (root / "sentencepiece").is_dir() and not (root / "sources").is_dir():
        _make_sources(root)
        _each(root / "sources", read_tokenizer)
    if (root / "models").is_dir():
        _read_models(root / "models")
    if (root / "tokenizers").is_dir():
        _each(root / "tokenizers", read_tokenizer)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
