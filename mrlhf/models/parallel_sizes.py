"""The sizes of the parallel axes that fit a model: arithmetic on its spec.

Checks before a run and the engines use it, so that they refuse and name the same sizes. It knows no
ranks and no tensors.
"""

from __future__ import annotations

from collections.abc import Callable

from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.layout import AxisSizes
from mrlhf.parallel.stages import Stages

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
    """Say in one line why `key` of `tp` does not fit a model, and which sizes do; None if it fits.

    Args:
        whole_kv_heads: whether ranks that share a KV head each hold all of it, as in an engine. In
            training each holds a part.
        vocabulary: names in words what does not fit a size in the model's vocabulary; None if every
            size fits, as in training, which pads the vocabulary.
        ranks: only divisors of it are named; None: any size.
    """
    misfits = _misfits(tp, spec, whole_kv_heads, vocabulary)
    if not misfits:
        return None

    # More ranks than attention heads cannot fit.
    fits = [
        size
        for size in range(1, spec.num_heads + 1)
        if not _misfits(size, spec, whole_kv_heads, vocabulary)
        and (ranks is None or ranks % size == 0)
    ]
    return f"{key} {tp} does not fit the model's {' and '.join(misfits)}; use {_one_of(fits)}"


def pp_problem(role: str, stages: Stages, spec: ModelSpec) -> str | None:
    """Say in one line why the stages of a pipeline do not fit a model, and what does.

    `role` is the section whose keys are named in the message; "" for none. If the stages name
    layers, they do so for each virtual stage.

    Returns:
        None if they fit.
    """
    layers = spec.num_layers
    prefix = f"{role}." if role else ""
    if spec.links_layers and stages.count > 1:
        return (
            f"{prefix}pp {stages.pp} does not fit a model whose layers take inputs of their own, "
            f"or keys and values of others; set {prefix}pp=1"
        )
    if stages.split(layers) is not None:
        return _choices_between(prefix, stages, spec)
    if stages.pp_layers is not None:
        named = list(stages.pp_layers)
        return (
            f"{prefix}pp_layers {named} has {sum(named)} layers and the model {layers}; give "
            f"{stages.count} numbers that add up to {layers}"
        )

    sizes = f"{prefix}pp {stages.pp}"
    if stages.vpp > 1:
        sizes += f" x {prefix}vpp {stages.vpp} = {stages.count}"
    first = 1 if stages.vpp == 1 else 2  # virtual stages take turns with those of other ranks
    fits = [
        size
        for size in range(first, layers + 1)
        if Stages(size, stages.vpp).split(layers) is not None
    ]
    remedy = f"name the layers of each stage in {prefix}pp_layers"
    if fits:
        remedy = f"set {prefix}pp to {_one_of(fits)}, or {remedy}"
    return f"{sizes} does not fit the model's {layers} layers; {remedy}"


def _choices_between(prefix: str, stages: Stages, spec: ModelSpec) -> str | None:
    """Say in one line which stage begins with a layer that takes the choice of the one before."""
    indexer = None if spec.latent is None else spec.latent.indexer
    of_stages = [stages.layers(number, spec.num_layers) for number in range(stages.count)]
    firsts = [layers.start for layers in of_stages if layers]
    first = next((n for n in firsts if indexer is not None and not indexer.layers[n]), None)
    if indexer is None or first is None:
        return None
    return (
        f"{prefix}pp {stages.pp}: a stage begins with layer {first}, which attends to what the "
        f"indexer of layer {indexer.chooser_of(first)} chooses; name the layers of each stage in "
        f"{prefix}pp_layers, so that each begins with a layer that has an indexer"
    )


def ep_problem(role: str, sizes: AxisSizes, spec: ModelSpec) -> str | None:
    """Say in one line why the sizes of expert parallelism do not fit a model, and which do.

    `role` is the section whose keys are named in the message; "" for none.

    Returns:
        None if the sizes fit.
    """
    prefix = f"{role}." if role else ""
    experts = spec.experts
    if experts is None:
        if sizes.ep > 1:
            return f"{prefix}ep {sizes.ep} does not fit a model without experts; set {prefix}ep=1"
        if sizes.expert_tp != sizes.tp:
            return (
                f"{prefix}etp {sizes.etp} does not fit a model without experts; set "
                f"{prefix}etp={sizes.tp}"
            )
        return None

    if experts.count % sizes.ep:
        return (
            f"{prefix}ep {sizes.ep} does not fit the model's {experts.count} experts; use "
            f"{_one_of(divisors(experts.count))}"
        )
    if experts.ffn_size % sizes.expert_tp:
        return (
            f"{prefix}etp {sizes.expert_tp} does not fit the experts' intermediate size "
            f"{experts.ffn_size}; set {prefix}etp to a divisor of it, such as 1"
        )
    return None


def cp_problem(key: str, sizes: AxisSizes, spec: ModelSpec) -> str | None:
    """Say in one line why the size of context parallelism at `key` does not fit a model, if so."""
    if spec.delta is None or sizes.cp == 1 or spec.delta.key_heads % sizes.tp:
        return None  # `tp_problem` says the last
    heads = spec.delta.key_heads // sizes.tp
    if heads % sizes.cp == 0:
        return None
    return (
        f"{key} {sizes.cp} does not divide the {heads} key heads that a tensor-parallel rank "
        f"has of the model's delta nets; use {_one_of(divisors(heads))}"
    )


def _misfits(
    tp: int, spec: ModelSpec, whole_kv_heads: bool, vocabulary: Misfit | None
) -> list[str]:
    """Name the sizes of the model that `tp` ranks cannot share as they must."""
    heads = spec.num_heads
    misfits = []
    if heads % tp:
        # Key and value heads divide the attention heads, so that theirs is the same problem.
        misfits.append(f"{heads} attention heads")
    else:
        found = (_kv_misfit(tp, kind, whole_kv_heads) for kind in spec.head_kinds)
        misfits += [misfit for misfit in found if misfit is not None]

    if spec.delta is not None and spec.delta.key_heads % tp:
        misfits.append(f"{spec.delta.key_heads} key heads of its delta nets")
    if spec.has_dense_layers and spec.ffn_size % tp:
        misfits.append(f"intermediate size {spec.ffn_size}")
    if spec.experts is not None and spec.experts.shared_ffn_size % tp:
        misfits.append(f"shared expert of intermediate size {spec.experts.shared_ffn_size}")
    misfit = None if vocabulary is None else vocabulary(spec, tp)
    if misfit is not None:
        misfits.append(misfit)
    return misfits


def _kv_misfit(tp: int, spec: ModelSpec, whole_kv_heads: bool) -> str | None:
    """Name the key and value heads that `tp` ranks cannot share as they must, if so."""
    kv_heads = spec.num_kv_heads
    if kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} key and value heads (it must divide them or be a multiple of them)"
    if tp > kv_heads and spec.qk_norm == "projection":
        return f"{kv_heads} key and value heads (which share one norm)"
    if tp > kv_heads and not whole_kv_heads and kv_heads * spec.head_dim % tp:
        return (
            f"{kv_heads} key and value heads of {spec.head_dim} rows (the {tp // kv_heads} ranks "
            "of a head hold equal parts of it)"
        )
    return None


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]


def _one_of(sizes: list[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"one of {', '.join(map(str, sizes))}"
