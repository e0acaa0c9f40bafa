"""Indexers of sparse attention under the names of Megatron-LM's command line, and of `config.json`.

megatron-core's indexers compute what those of transformers compute from version 0.19 on. Before,
they take the latents of queries before their norm, and rotate other dimensions. Pure: this file
knows no files and no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrlhf.errors import CheckpointError
from mrlhf.models.spec import ModelSpec

INDEXER_FAMILIES = ("deepseek_v32", "glm_moe_dsa")
_VARIANT = "experimental_attention_variant"
_INTERLEAVED = "dsa_indexer_rope_interleaved"
# Sizes, and their keys in `config.json`.
_SIZES = {
    "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim",
    "dsa_indexer_topk": "index_topk",
}
# Which layers choose, with Megatron-LM's defaults.
_SHARING = {"dsa_indexer_topk_freq": 1, "dsa_indexer_skip_topk_offset": 0}
INDEXER_VALUES = (_VARIANT, *_SIZES, *_SHARING, "dsa_indexer_k_norm_epsilon")
INDEXER_COMPARED = (_VARIANT, *_SIZES, _INTERLEAVED)

_MODULE = "self_attention.core_attention.indexer."
# Megatron-LM's names of parameters, by ours.
INDEXER_NAMES = {
    **{f"self_attention.indexer.k_norm.{x}": f"{_MODULE}k_norm.{x}" for x in ("weight", "bias")},
    **{
        f"self_attention.indexer.{name}.weight": f"{_MODULE}linear_{name}.weight"
        for name in ("wq_b", "wk", "weights_proj")
    },
}


def indexer_arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of Megatron-LM for the indexers of a model, which may have none."""
    indexer = spec.indexer_of(0)
    if indexer is None:
        return {}
    assert spec.experts is not None, "an indexer in a model without experts"
    sharing = _sharing(indexer.layers, spec.experts.layers)
    values = ("dsa", indexer.heads, indexer.head_dim, indexer.most, *sharing, 1e-6)
    return {
        **dict(zip(INDEXER_VALUES, values, strict=True)),
        _INTERLEAVED: indexer.interleaved,
        # A rotation of queries and keys that changes no product of theirs, and needs a GPU.
        "dsa_indexer_rotate_activation": False,
        "apply_rope_fusion": False,
    }


def family_of_latents(arguments: Mapping[str, Any]) -> str:
    """The family of a checkpoint with latent attention."""
    return INDEXER_FAMILIES[bool(arguments.get(_INTERLEAVED))] if _has(arguments) else "deepseek_v3"


def indexer_config(arguments: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The keys of a `config.json` for indexers; CheckpointError: there are none."""
    if not _has(arguments):
        raise CheckpointError(f"the checkpoint has no indexers, and so is no {family} model")
    config: dict[str, Any] = {key: arguments.get(name) for name, key in _SIZES.items()}
    if family == "glm_moe_dsa":
        layers = _stated_layers(arguments)
        config["indexer_types"] = ["full" if chooses else "shared" for chooses in layers]
    return config


def indexer_problems(spec: ModelSpec, arguments: Mapping[str, Any]) -> list[str]:
    """In what a checkpoint's indexers differ from the model's, beside `INDEXER_COMPARED`.

    A CheckpointError says that they are of a version of megatron-core that computes otherwise.
    """
    indexer = spec.indexer_of(0)
    if indexer is None or not _has(arguments):
        return []
    if _INTERLEAVED not in arguments:
        raise CheckpointError(
            f"the checkpoint has indexers and does not state {_INTERLEAVED}: it is of "
            "megatron-core before 0.19, whose indexers compute otherwise than transformers"
        )
    is_same = _stated_layers(arguments) == indexer.layers
    return [] if is_same else [f"{' and '.join(_SHARING)} give indexers to other layers than there"]


def _has(arguments: Mapping[str, Any]) -> bool:
    return arguments.get(_VARIANT) == "dsa"


def _stated_layers(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each layer whether it has an indexer."""
    frequency, offset = (arguments.get(name) or default for name, default in _SHARING.items())
    return _choosing(frequency, offset, arguments.get("num_layers") or 0)


def _choosing(frequency: int, offset: int, num_layers: int) -> tuple[bool, ...]:
    first = max(offset, 1)  # layers count from 1
    return tuple(max(layer - first, 0) % frequency == 0 for layer in range(1, num_layers + 1))


def _sharing(layers: tuple[bool, ...], sparse: tuple[bool, ...]) -> tuple[int, int]:
    """Megatron-LM's frequency and offset of the layers that choose; `sparse` have experts."""
    if all(layers):
        return 1, 0
    numbers = range(1, len(layers) + 1)
    pairs = ((frequency, offset) for frequency in numbers for offset in numbers)
    fit = next((pair for pair in pairs if _choosing(*pair, len(layers)) == layers), None)
    # Where all layers have experts, it stacks each parameter of all, and some have no indexer.
    if fit is None or all(sparse):
        raise CheckpointError(
            f"the layers {[number for number, chooses in enumerate(layers) if chooses]} of "
            f"{len(layers)} have indexers; Megatron-LM's come at regular distances, in a model "
            "with a layer without experts; keep it as a Hugging Face model"
        )
    return fit
