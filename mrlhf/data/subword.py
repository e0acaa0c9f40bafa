"""Converts sentencepiece models to fast tokenizers.

The sentencepiece model and the Hugging Face fast tokenizer encode a text to the same tokens, with
one exception: the fast tokenizer reads "</s>" within a text as the special token. This file knows
sentencepiece and tokenizers. It does not know prompts, chat templates or data files.
"""

from __future__ import annotations

from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from mrlhf.errors import DataError

MODEL_FILE = "tokenizer.model"

_SPACE = "▁"
_PROBES = (
    "37+48=85",
    "a b",
    "  two  spaces ",
    "one\n\n\ttwo\r\n",
    "é ½ ① ﬁ Ａ 日本 😀",
    "aaaaaaa 1,000.50$ <<3*4=12>>",
)


def convert_sentencepiece(model_file: Path) -> PreTrainedTokenizerFast:
    """The fast tokenizer that encodes and decodes like the sentencepiece model in `model_file`.

    A DataError says that the file is none, or that the model is not BPE or normalises text.
    """
    processor = check_sentencepiece(model_file)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_pipeline(processor),
        clean_up_tokenization_spaces=False,
        **_special_tokens(processor),
    )
    _check_equal(processor, fast, model_file)
    return fast


def check_sentencepiece(model_file: Path) -> sentencepiece.SentencePieceProcessor:
    """The sentencepiece model in `model_file`; DataError if the file is none."""
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.Load(str(model_file))
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{model_file} is not a sentencepiece model: {reason}") from error
    return processor


def _pipeline(processor: sentencepiece.SentencePieceProcessor) -> Pipeline:
    pieces = [processor.IdToPiece(i) for i in range(processor.GetPieceSize())]
    bpe = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=_merges(processor, pieces),
        unk_token=pieces[processor.unk_id()],
        fuse_unk=True,
        byte_fallback=any(processor.IsByte(i) for i in range(len(pieces))),
    )

    to_pieces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    to_words: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if processor.Normalize("a").startswith(_SPACE):
        to_pieces.insert(0, normalizers.Prepend(_SPACE))
        to_words.append(decoders.Strip(content=" ", left=1))

    pipeline = Pipeline(bpe)
    pipeline.normalizer = normalizers.Sequence(to_pieces)
    pipeline.decoder = decoders.Sequence(to_words)
    return pipeline


def _merges(
    processor: sentencepiece.SentencePieceProcessor, pieces: list[str]
) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a third piece, those of the best score first."""
    is_special = (processor.IsByte, processor.IsControl, processor.IsUnknown, processor.IsUnused)
    plain = {piece: i for i, piece in enumerate(pieces) if not any(test(i) for test in is_special)}

    ranked: list[tuple[float, int, int]] = []
    for piece, i in plain.items():
        for cut in range(1, len(piece)):
            if piece[:cut] in plain and piece[cut:] in plain:
                ranked.append((-processor.GetScore(i), i, cut))

    return [(pieces[i][:cut], pieces[i][cut:]) for _, i, cut in sorted(ranked)]


def _special_tokens(processor: sentencepiece.SentencePieceProcessor) -> dict[str, str]:
    ids = {
        "pad_token": processor.pad_id(),
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "unk_token": processor.unk_id(),
    }
    return {role: processor.IdToPiece(i) for role, i in ids.items() if i >= 0}


def _check_equal(
    processor: sentencepiece.SentencePieceProcessor, fast: PreTrainedTokenizerFast, model_file: Path
) -> None:
    for text in _PROBES:
        expected = processor.Encode(text)
        same_tokens = fast.encode(text, add_special_tokens=False) == expected
        has_unknown = processor.unk_id() in expected
        same_text = has_unknown or fast.decode(expected) == processor.Decode(expected)
        if not (same_tokens and same_text):
            raise DataError(
                f"{model_file} splits {text!r} in a way that cannot be converted (not BPE, or it "
                "normalises text); convert it with transformers (AutoTokenizer, then "
                "save_pretrained) and give that directory"
            )
