"""Which tensor- and pipeline-parallel sizes fit a model: arithmetic on its spec.

Checks before a run and the engines use it, so that what they refuse and the sizes that they name
agree. It knows no ranks and no tensors.
"""

from __future__ import annotations

from collections.abc import Callable

from mrlhf.models.spec import ModelSpec

Misfit = Callable[[ModelSpec, int], str | None]


def tp_problem(
    key: str,
    tp: int,
    spec: ModelSpec,
    *,
    whole_kv_heads: bool = False,
    vocabulary: Misfit | None = None,
    ranks: int | None = None,
) -> str | None:
    """Why a tensor-parallel size does not fit a model, and which sizes do, in one line.

    Args:
        key: names the size in the message.
        tp: tensor-parallel size, ranks.
        spec: the model.
        whole_kv_heads: whether ranks that share a key and value head each hold all of it, as in an
            engine. In training each holds a part.
        vocabulary: what of the model's vocabulary does not fit a size, in words, or None if it
            fits. Left out, every size fits, since training pads the vocabulary.
        ranks: the sizes that are named divide it; None: any size.

    Returns:
        None if the size fits.
    """
    misfits = _misfits(tp, spec, whole_kv_heads, vocabulary)
    if not misfits:
        return None

    # More ranks than attention heads cannot fit.
    fits = [
        str(size)
        for size in range(1, spec.num_heads + 1)
        if not _misfits(size, spec, whole_kv_heads, vocabulary)
        and (ranks is None or ranks % size == 0)
    ]
    return f"{key} {tp} does not fit the model's {' and '.join(misfits)}; use {_one_of(fits)}"


def pp_problem(key: str, pp: int, spec: ModelSpec) -> str | None:
    """Why a pipeline-parallel size does not fit a model, and which sizes do, in one line.

    Returns:
        None if the size fits.
    """
    layers = spec.num_layers
    if layers % pp == 0:
        return None
    fits = [str(size) for size in range(1, layers + 1) if layers % size == 0]
    return f"{key} {pp} does not fit the model's {layers} layers; use {_one_of(fits)}"


def _misfits(
    tp: int, spec: ModelSpec, whole_kv_heads: bool, vocabulary: Misfit | None
) -> list[str]:
    """What of the model a tensor-parallel size does not divide, or not as it must."""
    heads = spec.num_heads
    kv_heads = spec.num_kv_heads
    misfits = []
    if heads % tp:
        # Key and value heads divide the attention heads, so that theirs is the same problem.
        misfits.append(f"{heads} attention heads")
    elif kv_heads % tp and tp % kv_heads:
        misfits.append(
            f"{kv_heads} key and value heads (it must divide them or be a multiple of them)"
        )
    elif tp > kv_heads and spec.qk_norm == "projection":
        misfits.append(f"{kv_heads} key and value heads (which share one norm)")
    elif tp > kv_heads and not whole_kv_heads and kv_heads * spec.head_dim % tp:
        misfits.append(
            f"{kv_heads} key and value heads of {spec.head_dim} rows (the {tp // kv_heads} ranks "
            "of a head hold equal parts of it)"
        )

    if spec.ffn_size % tp:
        misfits.append(f"intermediate size {spec.ffn_size}")
    misfit = None if vocabulary is None else vocabulary(spec, tp)
    if misfit is not None:
        misfits.append(misfit)
    return misfits


def _one_of(sizes: list[str]) -> str:
    return sizes[0] if len(sizes) == 1 else f"one of {', '.join(sizes)}"
