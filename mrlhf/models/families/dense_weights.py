"""The weight map of Llama-like models: named tensors, parameters, and how they correspond.

The tensors follow from the features that the spec states; `expert_weights` knows those of a mixture
of experts, and `names` is None for a dense model. This file knows no family by name and no ranks:
`weights.shard` cuts the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise

from mrlhf.models.families.base import Chunk
from mrlhf.models.families.expert_weights import (
    ExpertNames,
    expert_shapes,
    mixture_rules,
)
from mrlhf.models.families.mixing_weights import (
    delta_rules,
    delta_shapes,
    indexer_shapes,
    latent_rules,
    latent_shapes,
)
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Rule, Shape

EMBEDDING = "model.embed_tokens.weight"
INPUT_TABLE = "model.embed_tokens_per_layer.weight"
INPUT_PROJECTION = "model.per_layer_model_projection.weight"
INPUT_NORM = "model.per_layer_projection_norm.weight"
LANGUAGE_HEAD = "lm_head.weight"
SCALAR_HEAD = "score.weight"
# The parameters by which a layer adds its own input of a token, and their tensors.
LAYER_INPUT = {
    "layer_input.gate.weight": "per_layer_input_gate.weight",
    "layer_input.projection.weight": "per_layer_projection.weight",
    "layer_input.norm.weight": "post_per_layer_input_norm.weight",
}


def tensor_shapes(spec: ModelSpec, names: ExpertNames | None = None) -> dict[str, Shape]:
    """Hugging Face name and full shape of every tensor of the model, in checkpoint order."""
    hidden = spec.hidden_size

    shapes: dict[str, Shape] = {EMBEDDING: (spec.vocab_size, hidden)}
    if spec.layer_input_size:
        width = spec.num_layers * spec.layer_input_size
        shapes[INPUT_TABLE] = (spec.vocab_size, width)
        shapes[INPUT_PROJECTION] = (width, hidden)
        shapes[INPUT_NORM] = (spec.layer_input_size,)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        if spec.scales_layers:
            shapes[prefix + "layer_scalar"] = (1,)
        if spec.norms_before:
            shapes[prefix + "input_layernorm.weight"] = (hidden,)
        if spec.delta is not None and spec.has_delta(layer):
            shapes.update(delta_shapes(hidden, spec.delta, prefix + "linear_attn."))
        else:
            shapes.update(_attention_shapes(spec.of_layer(layer), prefix + "self_attn."))
        indexer = spec.indexer_of(layer)
        if spec.latent is not None and indexer is not None:
            own = prefix + "self_attn.indexer."
            shapes.update(indexer_shapes(spec, spec.latent, indexer, own))
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if spec.norms == "both":
            shapes[prefix + "pre_feedforward_layernorm.weight"] = (hidden,)
        if spec.norms_after:
            shapes[prefix + "post_feedforward_layernorm.weight"] = (hidden,)
        if spec.has_experts(layer):
            assert names is not None, "a mixture without names"
            shapes.update(expert_shapes(spec, names, prefix))
        else:
            shapes.update(_mlp_shapes(spec.of_layer(layer), prefix + "mlp."))
        if spec.layer_input_size:
            shapes[prefix + "per_layer_input_gate.weight"] = (spec.layer_input_size, hidden)
            shapes[prefix + "per_layer_projection.weight"] = (hidden, spec.layer_input_size)
            shapes[prefix + "post_per_layer_input_norm.weight"] = (hidden,)

    shapes["model.norm.weight"] = (hidden,)
    if spec.head == "scalar":
        shapes[SCALAR_HEAD] = (spec.outputs, hidden)
    elif not spec.tied_embeddings:
        shapes[LANGUAGE_HEAD] = (spec.vocab_size, hidden)
    return shapes


def rules_of(spec: ModelSpec, chunk: Chunk, names: ExpertNames | None = None) -> dict[str, Rule]:
    """The named tensors that each parameter of a chunk holds, and how they are cut; see `Family`.

    The layers of `chunk` are numbered from 0. `names` is what the checkpoint calls the tensors of a
    mixture of experts; None: a dense model. The last of several chunks has an output layer even
    where embeddings are tied: a copy of the embedding.
    """
    embedding = Rule((EMBEDDING,), dim=0)
    rules = {"embedding.word_embeddings.weight": embedding} if chunk.is_first else {}
    width = 0 if spec.experts is None else spec.experts.ffn_size
    for number, layer in enumerate(chunk.layers):
        prefix = f"model.layers.{layer}."
        kind = spec.of_layer(layer)
        mixing = _mixing_rules(kind, prefix, spec.has_delta(layer))
        if spec.has_experts(layer):
            assert names is not None, "a mixture without names"
            mlp = mixture_rules(names, prefix, chunk.experts, width)
        else:
            mlp = _mlp_rules(kind, prefix)
        for name, rule in (*mixing.items(), *mlp.items()):
            rules[f"decoder.layers.{number}.{name}"] = rule
        for name, tensor in LAYER_INPUT.items() if spec.layer_input_size else ():
            rules[f"decoder.layers.{number}.{name}"] = Rule((prefix + tensor,), dim=None)

    if chunk.is_last:
        rules["decoder.final_layernorm.weight"] = Rule(("model.norm.weight",), dim=None)
        output = embedding if spec.tied_embeddings else Rule((LANGUAGE_HEAD,), dim=0)
        is_scalar = spec.head == "scalar"
        rules["output_layer.weight"] = Rule((SCALAR_HEAD,), dim=None) if is_scalar else output
    if chunk.is_first:
        rules["layer_inputs.table.weight"] = Rule((INPUT_TABLE,), dim=0)
        rules["layer_inputs.projection.weight"] = Rule((INPUT_PROJECTION,), dim=None)
        rules["layer_inputs.norm.weight"] = Rule((INPUT_NORM,), dim=None)
    return rules


def _qkv_rows(spec: ModelSpec) -> dict[str, int]:
    """Rows of q_proj, k_proj and v_proj, by their letters, as far as they are there."""
    kv_rows = spec.num_kv_heads * spec.head_dim
    of_head = 2 if spec.output_gate else 1  # each head's q, then its gate
    rows = {"q": of_head * spec.num_heads * spec.head_dim}
    if not spec.has_keys:
        return rows
    return rows | dict.fromkeys("k" if spec.keys_are_values else "kv", kv_rows)


def _attention_shapes(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, Shape]]:
    if spec.latent is not None:
        yield from latent_shapes(spec, spec.latent, prefix)
        return
    rows = _qkv_rows(spec)
    if spec.fused_tensors:
        yield prefix + "qkv_proj.weight", (sum(rows.values()), spec.hidden_size)
    else:
        for letter, count in rows.items():
            yield f"{prefix}{letter}_proj.weight", (count, spec.hidden_size)
            if spec.qkv_bias:
                yield f"{prefix}{letter}_proj.bias", (count,)

    if spec.qk_norm != "none":
        together = spec.qk_norm == "projection"
        yield prefix + "q_norm.weight", (rows["q"] if together else spec.head_dim,)
        if spec.has_keys:
            yield prefix + "k_norm.weight", (rows["k"] if together else spec.head_dim,)

    if spec.has_sinks:
        yield prefix + "sinks", (spec.num_heads,)
    yield prefix + "o_proj.weight", (spec.hidden_size, spec.num_heads * spec.head_dim)
    if spec.o_bias:
        yield prefix + "o_proj.bias", (spec.hidden_size,)


def _mlp_shapes(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, Shape]]:
    if spec.fused_tensors:
        yield prefix + "gate_up_proj.weight", (2 * spec.ffn_size, spec.hidden_size)
    else:
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}{name}.weight", (spec.ffn_size, spec.hidden_size)
            if spec.mlp_bias:
                yield f"{prefix}{name}.bias", (spec.ffn_size,)

    yield prefix + "down_proj.weight", (spec.hidden_size, spec.ffn_size)
    if spec.mlp_bias:
        yield prefix + "down_proj.bias", (spec.hidden_size,)


# A plan asks for a layer once for each rank that has some of its experts.
@lru_cache(maxsize=128)
def _mixing_rules(spec: ModelSpec, prefix: str, has_delta: bool) -> Mapping[str, Rule]:
    """The rules of what a layer has before its MLP, the norm of that included."""
    if spec.delta is not None and has_delta:
        attention = delta_rules(spec.delta, prefix + "linear_attn.")
    elif spec.latent is not None:
        attention = latent_rules(spec.latent, prefix + "self_attn.")
    else:
        attention = _attention_rules(spec, prefix)

    norm = Rule((prefix + "input_layernorm.weight",), dim=None)
    # A lone norm before the MLP has the name of its place, after attention.
    place = "pre_feedforward" if spec.norms_after else "post_attention"
    before_mlp = Rule((f"{prefix}{place}_layernorm.weight",), dim=None)
    return {
        "layer_scalar": Rule((prefix + "layer_scalar",), dim=None),
        "input_layernorm.weight": norm,
        **attention,
        "pre_mlp_layernorm.weight": before_mlp,
        # TransformerEngine fuses each norm into the linear layer that follows it.
        "self_attention.linear_qkv.layer_norm_weight": norm,
        "mlp.linear_fc1.layer_norm_weight": before_mlp,
    }


def _attention_rules(spec: ModelSpec, layer: str) -> dict[str, Rule]:
    prefix = layer + "self_attn."
    rules = {
        "self_attention.sinks": Rule((prefix + "sinks",), dim=0),
        "self_attention.linear_proj.weight": Rule((prefix + "o_proj.weight",), dim=1),
        "self_attention.linear_proj.bias": Rule((prefix + "o_proj.bias",), dim=None),
    }
    if spec.norms_after:
        norm = Rule((layer + "post_attention_layernorm.weight",), dim=None)
        rules["self_attention.linear_proj.output_norm.weight"] = norm

    of_letters = _qkv_rows(spec)
    for kind in ("weight", "bias"):
        names = tuple(f"{prefix}{letter}_proj.{kind}" for letter in of_letters)
        rows = None
        if spec.fused_tensors:
            names = (f"{prefix}qkv_proj.{kind}",) * 3
            rows = _intervals(tuple(of_letters.values()))
        rules[f"self_attention.linear_qkv.{kind}"] = Rule(
            names, dim=0, periods=spec.num_kv_heads if spec.has_keys else None, intervals=rows
        )

    for letter in "qk":
        norm = Rule((f"{prefix}{letter}_norm.weight",), dim=None)
        if spec.qk_norm == "projection":
            norm = Rule(norm.names, dim=0, periods=spec.num_kv_heads)
        rules[f"self_attention.{letter}_layernorm.weight"] = norm
    return rules


def _mlp_rules(spec: ModelSpec, layer: str) -> dict[str, Rule]:
    prefix = layer + "mlp."
    rules = {}
    for kind in ("weight", "bias"):
        names = (f"{prefix}gate_proj.{kind}", f"{prefix}up_proj.{kind}")
        rows = None
        if spec.fused_tensors:
            names = (f"{prefix}gate_up_proj.{kind}",) * 2
            rows = _intervals((spec.ffn_size, spec.ffn_size))
        rules[f"mlp.linear_fc1.{kind}"] = Rule(names, dim=0, intervals=rows)

    norm = Rule((layer + "post_feedforward_layernorm.weight",), dim=None)
    return rules | {
        "mlp.linear_fc2.weight": Rule((prefix + "down_proj.weight",), dim=1),
        "mlp.linear_fc2.bias": Rule((prefix + "down_proj.bias",), dim=None),
        "mlp.linear_fc2.output_norm.weight": norm,
    }


def _intervals(rows: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The rows of parts that follow each other in one tensor."""
    edges = [sum(rows[:number]) for number in range(len(rows) + 1)]
    return tuple(pairwise(edges))
