"""Which tensor-parallel sizes of an engine fit a model, and how its experts are shared out.

Both engines use it, and so do the checks before a run. It is arithmetic on a model's spec, and
knows no tensors.
"""

from __future__ import annotations

from typing import Literal

from mrlhf.models.parallel_sizes import tp_problem
from mrlhf.models.spec import ModelSpec

VLLM_VOCABULARY_UNIT = 64


def engine_tp_problem(
    engine: Literal["native", "vllm"],
    tp: int,
    spec: ModelSpec,
    ranks: int | None = None,
    ep: int | None = None,
) -> str | None:
    """Why an engine of `tp` ranks does not fit a model, and which sizes do, in one line.

    Args:
        engine: which engine.
        tp: ranks of one replica.
        spec: a language model.
        ranks: the sizes that are named divide it; None: any size.
        ep: over how many parts of a replica the experts are shared out; None: over any that fits.

    Returns:
        None if the size fits.
    """

    def native_misfit(spec: ModelSpec, tp: int) -> str | None:
        return _native_vocabulary(spec, tp) or _experts(spec, tp, ep)

    return tp_problem(
        "rollout.tp",
        tp,
        spec,
        whole_kv_heads=True,
        vocabulary=_vllm_misfit if engine == "vllm" else native_misfit,
        ranks=ranks,
    )


def engine_ep_problem(
    engine: Literal["native", "vllm"], ep: int, tp: int, spec: ModelSpec
) -> str | None:
    """Why experts cannot be shared out over `ep` parts of a replica, in one line.

    Returns:
        None if they can.
    """
    experts = spec.experts
    if experts is None:
        none = f"rollout.ep {ep} does not fit a model without experts; leave it out"
        return none if ep > 1 else None
    if engine == "vllm":
        split = f"rollout.ep {ep}: in vLLM each expert is split over all ranks; leave it out"
        return split if ep > 1 else None

    fits = [str(size) for size in _divisors(tp) if _experts(spec, tp, size) is None]
    if tp % ep == 0 and str(ep) in fits:
        return None
    remedy = f"use one of {', '.join(fits)}" if fits else "use another rollout.tp"
    return (
        f"rollout.ep {ep} does not fit rollout.tp {tp} and the model's {experts.count} experts of "
        f"width {experts.ffn_size}; {remedy}"
    )


def engine_ep(
    engine: Literal["native", "vllm"],
    wanted: int | None,
    tp: int,
    actor_etp: int,
    spec: ModelSpec,
) -> int:
    """Over how many parts of a replica the experts of a layer are shared out.

    vLLM splits each expert over all ranks of a replica. The native engine can do otherwise. If it
    is left open, an expert is split there over as many ranks as in training where that fits: a rank
    that has the same experts on both sides then shares their memory. Otherwise it is split over
    all ranks of the replica, which gives all of them equal work, or else over the most that fit.

    Args:
        engine: which engine.
        wanted: `rollout.ep`; None leaves it open.
        tp: ranks of one replica.
        actor_etp: over how many ranks training splits an expert.
        spec: the model.
    """
    if wanted is not None or spec.experts is None or engine == "vllm":
        return wanted or 1
    sizes = _divisors(tp)
    if tp % actor_etp == 0:
        sizes.insert(0, tp // actor_etp)
    return next((size for size in sizes if _experts(spec, tp, size) is None), 1)


def vllm_vocabulary(rows: int) -> int:
    """Rows of an embedding in vLLM over all ranks, padding included."""
    return -(-rows // VLLM_VOCABULARY_UNIT) * VLLM_VOCABULARY_UNIT


def _vllm_misfit(spec: ModelSpec, tp: int) -> str | None:
    padded = vllm_vocabulary(spec.vocab_size)
    if padded % tp:
        return f"vocabulary {spec.vocab_size} (vLLM pads it to {padded} rows)"
    if spec.experts is not None and spec.experts.count < tp:
        return f"{spec.experts.count} experts (vLLM needs as many as ranks)"
    return _experts(spec, tp, ep=1)


def _native_vocabulary(spec: ModelSpec, tp: int) -> str | None:
    rows = spec.padded_vocab(tp) // tp
    if (tp - 1) * rows < spec.vocab_size:
        return None
    return f"vocabulary {spec.vocab_size} (in parts of {rows}, the last rank would have none)"


def _experts(spec: ModelSpec, tp: int, ep: int | None) -> str | None:
    """What of the experts does not divide over `ep` parts of `tp` ranks, in words."""
    experts = spec.experts
    if experts is None:
        return None
    for size in _divisors(tp) if ep is None else [ep]:
        divides = tp % size == 0 and experts.count % size == 0
        if divides and experts.ffn_size % (tp // size) == 0:
            return None
    return f"{experts.count} experts of width {experts.ffn_size}"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
