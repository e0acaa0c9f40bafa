"""Which named slices each parameter of vLLM's Llama-like models holds, in vLLM's own arrangement.

    qkv_proj        all q rows of the rank, then its k rows, then its v rows; where there are more
                    ranks than KV heads, several ranks hold the same k and v
    gate_up_proj    all gate rows of the rank, then its up rows
    embed_tokens    the vocabulary, padded to a multiple of 64, in equal shares of rows

The families in FAMILIES have these parameters in vLLM. A model with other features needs a map
of its own.

This is arithmetic on a spec: it does not import vLLM and knows no tensors.
"""

from __future__ import annotations

from mrlhf.errors import WeightError
from mrlhf.inference.engine_sizes import engine_tp_problem, vllm_vocabulary
from mrlhf.models.families import family_of
from mrlhf.models.rope import rope_type_of
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.weights.shard import Piece, Shape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
Interval = tuple[int, int]


def vllm_pieces(spec: ModelSpec, layout: EngineLayout, rank: int) -> list[Piece]:
    """The pieces that global rank `rank` holds in vLLM replicas of this layout, by parameter."""
    _, tp_rank = layout.place(rank)
    by_parameter = parameter_pieces(spec, tp_rank, layout.tp)
    return [piece for pieces in by_parameter.values() for piece in pieces]


def parameter_pieces(spec: ModelSpec, tp_rank: int, tp_size: int) -> dict[str, tuple[Piece, ...]]:
    """The pieces of each parameter on one tensor-parallel rank.

    A parameter that is only padding on this rank has no pieces.

    Args:
        spec: a language model.
        tp_rank: which rank of the replica.
        tp_size: how many ranks there are.

    Raises:
        WeightError: the model has a feature that is not supported here, or its heads, MLP or padded
            vocabulary do not divide over the ranks.
    """
    feature = unsupported_feature(spec)
    if feature is not None:
        raise WeightError(
            f"vLLM is not supported for a model with {feature}; set rollout.engine=native"
        )
    problem = engine_tp_problem("vllm", tp_size, spec)
    if problem is not None:
        raise WeightError(f"vLLM: {problem}")

    q = _share(spec.num_heads * spec.head_dim, tp_rank, tp_size)
    # If there are more ranks than KV heads, each KV head is a part that several ranks hold.
    kv_parts = min(tp_size, spec.num_kv_heads)
    kv = _share(spec.num_kv_heads * spec.head_dim, tp_rank * kv_parts // tp_size, kv_parts)
    mlp = _share(spec.ffn_size, tp_rank, tp_size)

    maker = _Maker(family_of(spec).tensor_shapes(spec))
    maker.vocabulary("model.embed_tokens.weight", tp_rank, tp_size)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        attention = prefix + "self_attn."
        maker.whole(prefix + "input_layernorm.weight")
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            qkv = {
                f"{attention}q_proj.{kind}": q,
                f"{attention}k_proj.{kind}": kv,
                f"{attention}v_proj.{kind}": kv,
            }
            maker.fused(f"{attention}qkv_proj.{kind}", qkv, dim=0)
        if spec.qk_norm != "none":
            maker.whole(attention + "q_norm.weight")
            maker.whole(attention + "k_norm.weight")
        maker.fused(attention + "o_proj.weight", {attention + "o_proj.weight": q}, dim=1)
        maker.whole(prefix + "post_attention_layernorm.weight")
        gate_up = {prefix + "mlp.gate_proj.weight": mlp, prefix + "mlp.up_proj.weight": mlp}
        maker.fused(prefix + "mlp.gate_up_proj.weight", gate_up, dim=0)
        maker.fused(prefix + "mlp.down_proj.weight", {prefix + "mlp.down_proj.weight": mlp}, dim=1)

    maker.whole("model.norm.weight")
    if not spec.tied_embeddings:
        maker.vocabulary("lm_head.weight", tp_rank, tp_size)
    return maker.pieces


def unsupported_feature(spec: ModelSpec) -> str | None:
    """What the model has that our use of vLLM does not know, in words; None if there is nothing."""
    rope_types = {rope_type_of(spec, kind) for kind in spec.ropes if kind is not None}
    features = {
        f"the family {spec.family}": spec.family not in FAMILIES,
        "biases on o_proj or the MLP": spec.o_bias or spec.mlp_bias,
        "biases on q, k and v": spec.qkv_bias and spec.family != "qwen2",
        "windows on some layers only": len(set(spec.windows)) > 1,
        "yarn rotation": "yarn" in rope_types,
    }
    return next((feature for feature, is_there in features.items() if is_there), None)


def parameter_shapes(spec: ModelSpec, tp_size: int) -> dict[str, Shape]:
    """The shape of each parameter, which is the same on every rank; vocabulary padding included."""
    shapes = {}
    # The first rank holds rows of every parameter, so its pieces show all shapes.
    for name, pieces in parameter_pieces(spec, 0, tp_size).items():
        first = pieces[0]
        shape = list(first.full_shape)
        shape[first.dim] = first.period
        shapes[name] = tuple(shape)
    return shapes


class _Maker:
    """Collects the pieces of one rank; vLLM's parameters do not repeat, so each is one period."""

    def __init__(self, shapes: dict[str, Shape]) -> None:
        self._shapes = shapes
        self.pieces: dict[str, tuple[Piece, ...]] = {}

    def whole(self, name: str) -> None:
        """Add a parameter that every rank holds whole."""
        self.fused(name, {name: (0, self._shapes[name][0])}, dim=0)

    def fused(self, parameter: str, intervals: dict[str, Interval], dim: int) -> None:
        """Add a parameter made of the given interval of each tensor, one after the other."""
        period = sum(stop - start for start, stop in intervals.values())
        pieces = []
        offset = 0
        for name, (start, stop) in intervals.items():
            size = stop - start
            pieces.append(
                Piece(name, self._shapes[name], dim, start, stop, parameter, offset, size, period)
            )
            offset += size
        self.pieces[parameter] = tuple(pieces)

    def vocabulary(self, name: str, tp_rank: int, tp_size: int) -> None:
        """Add this rank's rows of the vocabulary; padding rows belong to no piece."""
        rows = self._shapes[name][0]
        share = vllm_vocabulary(rows) // tp_size
        start = min(rows, tp_rank * share)
        stop = min(rows, (tp_rank + 1) * share)
        piece = Piece(name, self._shapes[name], 0, start, stop, name, 0, stop - start, share)
        self.pieces[name] = (piece,) if start < stop else ()


def _share(size: int, part: int, parts: int) -> Interval:
    return part * size // parts, (part + 1) * size // parts
