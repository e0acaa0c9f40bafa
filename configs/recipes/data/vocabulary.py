"""Trains the small sentencepiece vocabularies of the examples."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from mrlhf.data.subword import MODEL_FILE, convert_sentencepiece
from mrlhf.errors import DataError


def train_sentencepiece(
    texts: Iterable[str], out_dir: Path, *, vocab_size: int, byte_fallback: bool = True
) -> Path:
    """Train a BPE vocabulary on `texts` and write it, in both forms, into `out_dir`.

    Decoding gives back the exact text: nothing is normalised, and no space is added or removed.
    Every digit and every newline is a token of its own. Because no space is prepended, a response
    has the same tokens alone as after its prompt. pad, bos, eos and unk are tokens 0, 1, 2 and 3.

    Args:
        out_dir: gets tokenizer.model, tokenizer.json and tokenizer_config.json, which
            `load_tokenizer` and `transformers.AutoTokenizer` read. It is returned.
        vocab_size: the most tokens to make, special ones included; a small corpus may yield fewer.
        byte_fallback: add 256 byte tokens, so that no text is unknown. Without them, an unseen
            character becomes unk.
    """
    corpus = [text for text in texts if text]
    if not corpus:
        raise DataError("no text to train a tokenizer on")

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=byte_fallback,
            split_digits=True,
            character_coverage=1.0,
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            user_defined_symbols=["\n"],
            max_sentence_length=1 << 24,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            pad_piece="<pad>",
            bos_piece="<s>",
            eos_piece="</s>",
            unk_piece="<unk>",
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(
            f"sentencepiece cannot train {vocab_size} tokens: {' '.join(str(error).split())}"
        ) from error

    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / MODEL_FILE).write_bytes(model.getvalue())
    convert_sentencepiece(out_dir / MODEL_FILE).save_pretrained(out_dir)
    return out_dir
