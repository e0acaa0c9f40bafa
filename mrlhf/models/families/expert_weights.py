"""The weight map of a layer's mixture of experts: named tensors, parameters, how they correspond.

Checkpoints name the same tensors differently; `ExpertNames` says how. This file knows no family by
name and no ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mrlhf.models.spec import ModelSpec
from mrlhf.weights.forms import MatrixRows, OtherForm, Part
from mrlhf.weights.mxfp4 import BLOCK, BYTES
from mrlhf.weights.shard import Rule, Shape


@dataclass(frozen=True)
class ExpertNames:
    """The names of a mixture's tensors in a checkpoint, below `model.layers.<number>.`.

    Attributes:
        router: the matrix of the router.
        experts: the beginning of the names of the experts' tensors, before the number.
        gate: the matrix of an expert that goes through the activation.
        up: the matrix of an expert that is multiplied with it. None: its rows and those of `gate`
            are in one matrix, and files hold the experts of a layer in stacks, as those of gpt-oss.
            The name of a part has the expert's number: `mlp.experts.3.down_proj`.
        alternates: whether those rows alternate, and the matrices in stacks are transposed.
        down: the matrix of an expert that gives its output.
        shared: the beginning of the names of the shared expert's tensors.
    """

    router: str = "mlp.gate.weight"
    experts: str = "mlp.experts"
    gate: str = "gate_proj.weight"
    up: str | None = "up_proj.weight"
    alternates: bool = False
    down: str = "down_proj.weight"
    shared: str = "mlp.shared_expert"


CORRECTION = "mlp.gate.e_score_correction_bias"
"""The vector that is added to the scores for the choice."""
_SHARED_GATE = "mlp.shared_expert_gate.weight"
# What a mixture with own norms has more: parameters and their tensors.
_ROUTER_SCALES = {
    "mlp.router.scale": "router.scale",
    "mlp.router.expert_scale": "router.per_expert_scale",
}
_OWN_NORMS = {
    "mlp.shared.linear_fc2.output_norm.weight": "post_feedforward_layernorm_1.weight",
    "mlp.input_norm.weight": "pre_feedforward_layernorm_2.weight",
    "mlp.output_norm.weight": "post_feedforward_layernorm_2.weight",
    "mlp.sum_norm.weight": "post_feedforward_layernorm.weight",
}


def expert_shapes(spec: ModelSpec, names: ExpertNames, prefix: str) -> Iterator[tuple[str, Shape]]:
    """Name and full shape of every tensor of the mixture of the layer with this prefix."""
    experts = spec.experts
    assert experts is not None
    hidden = spec.hidden_size

    yield prefix + names.router, (experts.count, hidden)
    if experts.has_biases:
        yield prefix + _bias_of(names.router), (experts.count,)
    if experts.has_correction:
        yield prefix + CORRECTION, (experts.count,)
    for number in range(experts.count):
        expert = f"{prefix}{names.experts}.{number}."
        if names.up is None:
            yield from _shapes_in_stacks(spec, names, expert)
            continue
        yield expert + names.gate, (experts.ffn_size, hidden)
        yield expert + names.up, (experts.ffn_size, hidden)
        yield expert + names.down, (hidden, experts.ffn_size)

    if experts.shared_ffn_size:
        shared = f"{prefix}{names.shared}."
        yield shared + "gate_proj.weight", (experts.shared_ffn_size, hidden)
        yield shared + "up_proj.weight", (experts.shared_ffn_size, hidden)
        yield shared + "down_proj.weight", (hidden, experts.shared_ffn_size)
    if experts.shared_gate:
        yield prefix + _SHARED_GATE, (1, hidden)
    if experts.own_norms:
        yield prefix + "router.scale", (hidden,)
        yield prefix + "router.per_expert_scale", (experts.count,)
        yield from ((prefix + name, (hidden,)) for name in _OWN_NORMS.values())


def _bias_of(weight: str) -> str:
    """The name of the bias that belongs to a weight."""
    module = weight.removesuffix(".weight")
    return f"{module}_bias" if module == weight else f"{module}.bias"


def _shapes_in_stacks(
    spec: ModelSpec, names: ExpertNames, expert: str
) -> Iterator[tuple[str, Shape]]:
    """Name and shape of the tensors of one expert, whose names begin with `expert`."""
    experts = spec.experts
    assert experts is not None
    hidden = spec.hidden_size
    for name, rows, columns in (
        (names.gate, 2 * experts.ffn_size, hidden),
        (names.down, hidden, experts.ffn_size),
    ):
        yield expert + name, (rows, columns)
        if experts.has_biases:
            yield expert + _bias_of(name), (rows,)


def stacked_forms(
    spec: ModelSpec, names: ExpertNames, prefix: str, in_mxfp4: bool
) -> Iterator[tuple[str, OtherForm]]:
    """The stacks of all experts of a layer.

    If `in_mxfp4`, those that hold the matrices as bytes; in these they are not transposed.
    """
    experts = spec.experts
    assert experts is not None
    begin = f"{prefix}{names.experts}."
    for name, shape in _shapes_in_stacks(spec, names, ""):
        parts = {f"{begin}{n}.{name}": MatrixRows(n, 0, shape[0]) for n in range(experts.count)}
        if not in_mxfp4:
            is_transposed = names.alternates and len(shape) == 2
            stack = (experts.count, *(reversed(shape) if is_transposed else shape))
            yield begin + name, OtherForm(stack, parts, is_transposed)
        elif len(shape) == 2 and shape[1] % BLOCK == 0:
            stack = (experts.count, shape[0], shape[1] // BLOCK, BYTES)
            yield f"{begin}{name}_blocks", OtherForm(stack, parts, is_packed=True)


def forms_in_memory(
    spec: ModelSpec, names: ExpertNames, prefix: str
) -> Iterator[tuple[str, OtherForm]]:
    """The form in which transformers holds the layer's mixture in memory, and can write it to
    files.

    All experts are in two tensors, and the router has the same name in all families.
    """
    experts = spec.experts
    assert experts is not None and names.up is not None
    width = experts.ffn_size
    gates_and_ups: dict[str, Part | None] = {}
    downs: dict[str, Part | None] = {}
    for number in range(experts.count):
        expert = f"{prefix}{names.experts}.{number}."
        gates_and_ups[expert + names.gate] = MatrixRows(number, 0, width)
        gates_and_ups[expert + names.up] = MatrixRows(number, width, 2 * width)
        downs[expert + names.down] = MatrixRows(number, 0, spec.hidden_size)

    shape = (experts.count, 2 * width, spec.hidden_size)
    yield prefix + "mlp.experts.gate_up_proj", OtherForm(shape, gates_and_ups)
    shape = (experts.count, spec.hidden_size, width)
    yield prefix + "mlp.experts.down_proj", OtherForm(shape, downs)
    router = OtherForm((experts.count, spec.hidden_size), {prefix + names.router: None})
    yield prefix + "mlp.gate.weight", router


def mixture_rules(
    names: ExpertNames, prefix: str, held: Sequence[int], width: int
) -> dict[str, Rule]:
    """The rules of the parameters of a layer's mixture whose experts `held`, of `width`, are here.

    They are in the module's order.
    """
    router, others = _rules_beside_experts(names, prefix)
    rules = dict(router)
    experts = [_expert_rules(names, prefix, number, width) for number in reversed(held)]
    for matrix in (0, 1):  # the order of `RoutedExperts.named_modules`
        for expert in experts:
            rules.update(expert[matrix])
    return {**rules, **others}


@lru_cache(maxsize=2**15)  # a plan asks for each expert twice, in training and in the engine
def _expert_rules(
    names: ExpertNames, prefix: str, number: int, width: int
) -> tuple[Mapping[str, Rule], Mapping[str, Rule]]:
    """The rules of the first and of the second matrix of an expert, with their biases."""
    own = f"mlp.experts.{number}."
    expert = f"{prefix}{names.experts}.{number}."
    gate = expert + names.gate
    down = expert + names.down
    gate_up = (gate,) if names.up is None else (gate, expert + names.up)
    first = Rule(gate_up, dim=0, of_expert=True)
    if names.up is None and not names.alternates:
        halves = ((0, width), (width, 2 * width))
        first = first._replace(names=(gate, gate), intervals=halves)
    firsts = {own + "linear_fc1.weight": first}
    seconds = {own + "linear_fc2.weight": Rule((down,), dim=1, of_expert=True)}
    if names.up is None:
        firsts[own + "linear_fc1.bias"] = Rule((_bias_of(gate),), dim=0, of_expert=True)
        seconds[own + "linear_fc2.bias"] = Rule((_bias_of(down),), dim=None, of_expert=True)
    return firsts, seconds


@lru_cache(maxsize=128)  # as of what a layer has before its MLP
def _rules_beside_experts(
    names: ExpertNames, prefix: str
) -> tuple[Mapping[str, Rule], Mapping[str, Rule]]:
    """The rules of a mixture's router, and those of its shared expert and own norms."""

    def whole(parameters: Mapping[str, str]) -> dict[str, Rule]:
        return {own: Rule((prefix + name,), dim=None) for own, name in parameters.items()}

    router = {
        "mlp.router.weight": names.router,
        "mlp.router.bias": _bias_of(names.router),
        **_ROUTER_SCALES,
        "mlp.router.correction": CORRECTION,
    }
    shared = f"{prefix}{names.shared}."
    gate_up = (shared + "gate_proj.weight", shared + "up_proj.weight")
    return whole(router), {
        "mlp.shared.linear_fc1.weight": Rule(gate_up, dim=0),
        "mlp.shared.linear_fc2.weight": Rule((shared + "down_proj.weight",), dim=1),
        **whole({"mlp.shared_gate.weight": _SHARED_GATE, **_OWN_NORMS}),
    }
