"""The named slices in each parameter of vLLM's Llama-like models, in vLLM's own arrangement.

    qkv_proj        all q rows of the rank, then its k rows, then its v rows; where there are more
                    ranks than KV heads, several ranks hold the same k and v. Where values are the
                    keys, its v rows belong to no piece and repeat its k rows
    gate_up_proj    all gate rows of the rank, then its up rows
    w13_weight.3    the same for expert 3 of a mixture, and w2_weight.3 its columns of the output
                    matrix; vLLM stacks the experts of a layer in one parameter, `stack_of` says in
                    which. Where gate and up rows alternate in a checkpoint, they do so here
    w2_bias.3       the bias of that expert's output, which the first rank adds alone
    embed_tokens    the vocabulary, padded to a multiple of 64, in equal shares of rows

The families in FAMILIES have these parameters in vLLM. This is arithmetic on a spec: it does not
import vLLM and knows no tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set

from mrlhf.errors import WeightError
from mrlhf.inference.sizes import engine_tp_problem, vllm_vocabulary
from mrlhf.models.families import Chunk, family_of
from mrlhf.models.rope import rope_type_of
from mrlhf.models.spec import WHOLE_MODEL, ClampedSwish, ModelSpec
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.weights.shard import Piece, Rule, Shape

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma4_text"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss"),
)
CPU_WIDTH = 32
"""On a CPU vLLM supports experts only if the model's hidden size is a multiple of this, and for
gpt_oss, whose experts it does not pad, a rank's part of their width too."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The sizes of a head for which vLLM 0.32 has attention on a CPU; a test compares them."""

_STACKED = re.compile(r"(.+\.(?:w13|w2)_(?:weight|bias))\.(\d+)")
_WITH_QKV_BIAS = ("qwen2", "qwen2_moe", "glm4_moe", "gpt_oss")
_WITH_WINDOWS = ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss")  # on some layers only
# What vLLM calls parts of a gpt_oss model.
_OF_GPT_OSS = {".embed_tokens.": ".embedding.", ".self_attn.": ".attn."}
# The numbers and keys of a gpt_oss model that are constants in vLLM.
_GPT_OSS_GATE = ClampedSwish(alpha=1.702, limit=7.0)
_GPT_OSS_EPS = 1e-5
_GPT_OSS_ROPE = {"rope_type", "rope_theta", "factor", "beta_fast", "beta_slow", "truncate"}
_GPT_OSS_ROPE |= {"original_max_position_embeddings"}
Interval = tuple[int, int]


def vllm_pieces(
    spec: ModelSpec, layout: EngineLayout, rank: int, tensors: Set[str] | None = None
) -> list[Piece]:
    """Return the pieces of global rank `rank` in vLLM replicas of this layout, by parameter."""
    # All of them: leaving out those without some of `tensors` would not be faster here.
    _, tp_rank = layout.place(rank)
    by_parameter = parameter_pieces(spec, tp_rank, layout.tp)
    return [piece for pieces in by_parameter.values() for piece in pieces]


def parameter_pieces(spec: ModelSpec, tp_rank: int, tp_size: int) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of each parameter of a language model on one tensor-parallel rank.

    A parameter that is only padding on this rank has no pieces.

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

    other_names = _OF_GPT_OSS if spec.family == "gpt_oss" else {}
    maker = _Maker(family_of(spec).tensor_shapes(spec), tp_rank, tp_size, other_names)
    maker.vocabulary("model.embed_tokens.weight")
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            maker.whole_if_there(f"{prefix}{place}_layernorm.weight")
        maker.whole_if_there(prefix + "layer_scalar")
        _attention(maker, spec.of_layer(layer), prefix + "self_attn.")
        if spec.has_experts(layer):
            _mixture(maker, spec, layer)
        else:
            maker.gated(prefix + "mlp.", spec.ffn_size)

    maker.whole("model.norm.weight")
    if not spec.tied_embeddings:
        maker.vocabulary("lm_head.weight")
    return maker.pieces


def stack_of(parameter: str) -> tuple[str, int] | None:
    """Return vLLM's parameter that stacks this one with others, and its place there, if it does."""
    match = _STACKED.fullmatch(parameter)
    return None if match is None else (match[1], int(match[2]))


def repeated_rows(pieces: Sequence[Piece]) -> int:
    """Return how many last rows of a parameter repeat those before: values that are the keys."""
    if not pieces or not pieces[-1].parameter.endswith(".qkv_proj.weight"):
        return 0
    last = pieces[-1]
    return last.period - last.offset - last.block


def unsupported_feature(spec: ModelSpec) -> str | None:
    """Name in words a feature of the model that our use of vLLM does not support, if any."""
    rope_types = {rope_type_of(spec, kind) for kind in spec.ropes if kind is not None}
    may_have_bias = spec.family in _WITH_QKV_BIAS
    must_have_bias = spec.family in ("qwen2_moe", "gpt_oss")
    is_gpt_oss = spec.family == "gpt_oss"
    some_windows = len(set(spec.windows)) > 1 and spec.family not in _WITH_WINDOWS
    features = {
        f"the family {spec.family}": spec.family not in FAMILIES,
        "biases on o_proj or the MLP": (spec.o_bias or spec.mlp_bias) and not is_gpt_oss,
        "biases on q, k and v": spec.qkv_bias and not may_have_bias,
        "no biases on q, k and v": must_have_bias and not spec.qkv_bias,
        "windows on some layers only": some_windows,
        "yarn rotation": "yarn" in rope_types and not is_gpt_oss,
        "a partial_rotary_factor that transformers ignores": _ignores_share(spec),
        "inputs of each layer or shared keys": spec.links_layers,
        "an output layer of its own": spec.family == "gemma2" and not spec.tied_embeddings,
        "another form than the published gpt-oss": is_gpt_oss and not _is_published(spec),
    }
    return next((feature for feature, is_there in features.items() if is_there), None)


def _ignores_share(spec: ModelSpec) -> bool:
    """Whether vLLM would rotate a share of each head where transformers rotates the whole."""
    for kind in {kind for kind in spec.ropes if kind is not None}:
        entries = spec.hf_config["rope_parameters"]
        rope = entries if kind == WHOLE_MODEL else entries[kind]
        heads = spec.of_layer(spec.ropes.index(kind))
        share = rope.get("partial_rotary_factor") or 1.0
        is_partial = rope["rope_type"] == "default" and share < 1.0
        if is_partial and int(heads.head_dim * share) != heads.rotary_dim:
            return True
    return False


def _is_published(spec: ModelSpec) -> bool:
    """Whether a gpt_oss model has what vLLM computes whatever its `config.json` says."""
    assert spec.experts is not None
    rope = spec.hf_config["rope_parameters"]
    is_plain = spec.experts.activation == _GPT_OSS_GATE and spec.norm_eps == _GPT_OSS_EPS
    windows = [bool(window) for window in spec.windows]
    every_other = windows == [layer % 2 == 0 for layer in range(spec.num_layers)]
    has_yarn = rope.get("rope_type") == "yarn" and set(rope) | {"truncate"} == _GPT_OSS_ROPE
    return is_plain and every_other and has_yarn and not spec.tied_embeddings


def unsupported_on_cpu(spec: ModelSpec, tp: int) -> str | None:
    """Name in words a feature of the model that vLLM's build for a CPU does not support, if any.

    The engine has `tp` ranks.
    """
    for kind in spec.head_kinds:
        if kind.head_dim not in CPU_HEAD_SIZES:
            sizes = ", ".join(map(str, CPU_HEAD_SIZES))
            return f"head_dim {kind.head_dim} on a CPU, where vLLM has attention for {sizes}"
    if spec.experts is not None and spec.hidden_size % CPU_WIDTH:
        return f"experts and hidden size {spec.hidden_size}, no multiple of {CPU_WIDTH}, on a CPU"
    if spec.family == "gpt_oss" and spec.ffn_size % (CPU_WIDTH * tp):
        width = f"experts of width {spec.ffn_size} on {tp} ranks"
        return f"{width}, whose parts are no multiple of {CPU_WIDTH}, on a CPU"
    return None


def parameter_shapes(spec: ModelSpec, tp_size: int) -> dict[str, Shape]:
    """Return the shape of each parameter, padding included; it is the same on every rank."""
    shapes = {}
    # The first rank holds rows of every parameter, so its pieces show all shapes.
    for name, pieces in parameter_pieces(spec, 0, tp_size).items():
        first = pieces[0]
        shape = list(first.full_shape)
        shape[first.dim] = first.period
        shapes[name] = tuple(shape)
    return shapes


def _attention(maker: _Maker, spec: ModelSpec, prefix: str) -> None:
    """Add the parameters of one layer's attention."""
    q = maker.share(spec.num_heads * spec.head_dim)
    # If there are more ranks than KV heads, each KV head is a part that several ranks hold.
    kv = maker.share(spec.num_kv_heads * spec.head_dim, most_parts=spec.num_kv_heads)

    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        qkv = [
            (f"{prefix}q_proj.{kind}", q),
            (f"{prefix}k_proj.{kind}", kv),
            (f"{prefix}v_proj.{kind}", kv),
        ]
        maker.fused(f"{prefix}qkv_proj.{kind}", qkv, dim=0)
    for name in ("q_norm.weight", "k_norm.weight", "o_proj.bias"):
        maker.whole_if_there(prefix + name)
    if spec.has_sinks:
        maker.fused(prefix + "sinks", [(prefix + "sinks", maker.share(spec.num_heads))], dim=0)
    maker.fused(prefix + "o_proj.weight", [(prefix + "o_proj.weight", q)], dim=1)


def _mixture(maker: _Maker, spec: ModelSpec, layer: int) -> None:
    """Add the parameters of one layer's mixture of experts, each of which all ranks share."""
    experts = spec.experts
    assert experts is not None
    rule_of = _rules_in_checkpoint(spec, layer)

    maker.whole(*rule_of("router.weight").names)
    for part in ("bias", "correction", "scale", "expert_scale"):
        maker.whole_if_there(*rule_of(f"router.{part}").names)
    for norm in ("shared.linear_fc2.output_norm", "input_norm", "output_norm"):
        maker.whole_if_there(*rule_of(f"{norm}.weight").names)
    width = maker.share(experts.ffn_size)
    for number in range(experts.count):
        (down,) = rule_of(f"experts.{number}.linear_fc2.weight").names
        stack = down.rpartition(f".{number}.")[0] + ".routed_experts."
        maker.rows(f"{stack}w13_weight.{number}", rule_of(f"experts.{number}.linear_fc1.weight"))
        maker.fused(f"{stack}w2_weight.{number}", [(down, width)], dim=1, of_expert=True)
        if experts.has_biases:
            maker.rows(f"{stack}w13_bias.{number}", rule_of(f"experts.{number}.linear_fc1.bias"))
            maker.first_alone(
                f"{stack}w2_bias.{number}", *rule_of(f"experts.{number}.linear_fc2.bias").names
            )

    if experts.shared_ffn_size:
        (down,) = rule_of("shared.linear_fc2.weight").names
        maker.gated(down.removesuffix("down_proj.weight"), experts.shared_ffn_size)
    if experts.shared_gate:
        maker.whole(*rule_of("shared_gate.weight").names)


def _rules_in_checkpoint(spec: ModelSpec, layer: int) -> Callable[[str], Rule]:
    """Return the function that gives the rule of a parameter of the layer's mixture."""
    assert spec.experts is not None
    alone = Chunk(range(layer, layer + 1), False, False, range(spec.experts.count))
    rules = family_of(spec).rules_of(spec, alone)
    return lambda parameter: rules[f"decoder.layers.0.mlp.{parameter}"]


class _Maker:
    """Collects the pieces of one rank; vLLM's parameters do not repeat, so each is one period."""

    def __init__(
        self, shapes: dict[str, Shape], tp_rank: int, tp_size: int, other_names: Mapping[str, str]
    ) -> None:
        self._shapes = shapes
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._other_names = other_names
        self.pieces: dict[str, tuple[Piece, ...]] = {}

    def share(self, size: int, most_parts: int | None = None) -> Interval:
        """Return the rank's interval of `size` rows, cut into at most `most_parts` parts."""
        parts = min(self._tp_size, most_parts or self._tp_size)
        part = self._tp_rank * parts // self._tp_size
        return part * size // parts, (part + 1) * size // parts

    def whole(self, name: str) -> None:
        """Add a parameter that every rank holds whole."""
        self.fused(name, [(name, (0, self._shapes[name][0]))], dim=0)

    def whole_if_there(self, name: str) -> None:
        """Add a parameter that every rank holds whole, if the model has it."""
        if name in self._shapes:
            self.whole(name)

    def first_alone(self, parameter: str, name: str) -> None:
        """Add a parameter of an expert that the first rank holds whole, and the others as zeros."""
        self.fused(parameter, [(name, (0, self._shapes[name][0]))], dim=0, of_expert=True)
        if self._tp_rank:
            self.pieces[parameter] = ()

    def rows(self, parameter: str, rule: Rule) -> None:
        """Add a parameter of an expert made of the rank's share of each interval of the rule."""
        shares = []
        for number, name in enumerate(rule.names):
            first, last = rule.interval(number, self._shapes)
            start, stop = self.share(last - first)
            shares.append((name, (first + start, first + stop)))
        self.fused(parameter, shares, dim=0, of_expert=True)

    def gated(self, prefix: str, ffn_size: int) -> None:
        """Add the parameters of a gated MLP."""
        share = self.share(ffn_size)
        gate_up = [(prefix + "gate_proj.weight", share), (prefix + "up_proj.weight", share)]
        self.fused(prefix + "gate_up_proj.weight", gate_up, dim=0)
        self.fused(prefix + "down_proj.weight", [(prefix + "down_proj.weight", share)], dim=1)

    def fused(
        self,
        parameter: str,
        intervals: Sequence[tuple[str, Interval]],
        dim: int,
        of_expert: bool = False,
    ) -> None:
        """Add a parameter made of the given interval of each tensor, one after the other."""
        parameter = self._renamed(parameter)
        period = sum(stop - start for _, (start, stop) in intervals)
        pieces = []
        offset = 0
        for name, (start, stop) in intervals:
            size = stop - start
            place = (parameter, offset, size, period, of_expert)
            if name in self._shapes:  # values that are keys have no tensor
                pieces.append(Piece(name, self._shapes[name], dim, start, stop, *place))
            offset += size
        self.pieces[parameter] = tuple(pieces)

    def vocabulary(self, name: str) -> None:
        """Add this rank's rows of the vocabulary; padding rows belong to no piece."""
        rows = self._shapes[name][0]
        share = vllm_vocabulary(rows) // self._tp_size
        start = min(rows, self._tp_rank * share)
        stop = min(rows, (self._tp_rank + 1) * share)
        parameter = self._renamed(name)
        piece = Piece(name, self._shapes[name], 0, start, stop, parameter, 0, stop - start, share)
        self.pieces[parameter] = (piece,) if start < stop else ()

    def _renamed(self, parameter: str) -> str:
        for ours, theirs in self._other_names.items():
            parameter = parameter.replace(ours, theirs)
        return parameter
