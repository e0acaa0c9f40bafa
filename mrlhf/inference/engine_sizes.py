"""Which tensor-parallel sizes of an engine fit a model.

Both engines use it, and so do the checks before a run. It is arithmetic on a model's spec, and
knows no tensors.
"""

from __future__ import annotations

from typing import Literal

from mrlhf.models.parallel_sizes import tp_problem
from mrlhf.models.spec import ModelSpec

VLLM_VOCABULARY_UNIT = 64


def engine_tp_problem(
    engine: Literal["native", "vllm"], tp: int, spec: ModelSpec, ranks: int | None = None
) -> str | None:
    """Why an engine of `tp` ranks does not fit a model, and which sizes do, in one line.

    Args:
        engine: which engine.
        tp: ranks of one replica.
        spec: a language model.
        ranks: the sizes that are named divide it; None: any size.

    Returns:
        None if the size fits.
    """
    vocabulary = _vllm_vocabulary if engine == "vllm" else _native_vocabulary
    return tp_problem(
        "rollout.tp", tp, spec, whole_kv_heads=True, vocabulary=vocabulary, ranks=ranks
    )


def vllm_vocabulary(rows: int) -> int:
    """Rows of an embedding in vLLM over all ranks, padding included."""
    return -(-rows // VLLM_VOCABULARY_UNIT) * VLLM_VOCABULARY_UNIT


def _vllm_vocabulary(spec: ModelSpec, tp: int) -> str | None:
    padded = vllm_vocabulary(spec.vocab_size)
    if padded % tp == 0:
        return None
    return f"vocabulary {spec.vocab_size} (vLLM pads it to {padded} rows)"


def _native_vocabulary(spec: ModelSpec, tp: int) -> str | None:
    rows = spec.padded_vocab(tp) // tp
    if (tp - 1) * rows < spec.vocab_size:
        return None
    return f"vocabulary {spec.vocab_size} (in parts of {rows}, the last rank would have none)"
