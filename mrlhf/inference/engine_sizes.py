"""The tensor-parallel sizes of an engine that fit a model, and how its experts are shared out.

Both engines and the checks before a run use it. It is arithmetic on a spec, without tensors.
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
    """Say in one line why an engine of `tp` ranks does not fit a model, and which sizes do.

    Args:
        tp: ranks of one replica.
        ranks: only divisors of it are named; None: any size.
        ep: the number of parts of a replica over which experts are shared out; None: any that fits.

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
    """Say in one line why experts cannot be shared out over `ep` parts of a replica, if so."""
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
    engine: Literal["native", "vllm"], wanted: int | None, tp: int, actor_etp: int, spec: ModelSpec
) -> int:
    """Return the number of parts of a replica over which the experts of a layer are shared out.

    Args:
        engine: vLLM always splits each expert over all ranks of a replica.
        wanted: `rollout.ep`; None leaves it open.
        tp: ranks of one replica.
        actor_etp: over how many ranks training splits an expert.
    """
    if wanted is not None or spec.experts is None or engine == "vllm":
        return wanted or 1
    # Split over as many ranks as in training, experts can share their memory with it. Otherwise
    # all ranks of the replica split each expert, for equal work, or as many as possible.
    sizes = _divisors(tp)
    if tp % actor_etp == 0:
        sizes.insert(0, tp // actor_etp)
    return next((size for size in sizes if _experts(spec, tp, size) is None), 1)


def vllm_vocabulary(rows: int) -> int:
    """Return the rows of an embedding in vLLM over all ranks, padding included."""
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
    """Name in words the experts, if they do not divide over `ep` parts of `tp` ranks."""
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
