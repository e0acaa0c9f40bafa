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

# The families with indexers, and whether these rotate neighbours.
INDEXER_FAMILIES = {"deepseek_v32": False, "glm_moe_dsa": True}
_VARIANT = "experimental_attention_variant"
_INTERLEAVED = "dsa_indexer_rope_interleaved"
_ROTATE = "dsa_indexer_rotate_activation"
# Sizes, and their keys in `config.json`.
_SIZES = {
    "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim",
    "dsa_indexer_topk": "index_topk",
}
# Which layers choose, with Megatron-LM's defaults.
_SHARING = {"dsa_indexer_topk_freq": 1, "dsa_indexer_skip_topk_offset": 0}
_THEIRS = "self_attention.core_attention.indexer."
INDEXER_MODULES = tuple(f"{_THEIRS}linear_{name}" for name in ("wq_b", "wk", "weights_proj"))
# Megatron-LM's names of parameters, by ours.
INDEXER_NAMES = {
    f"self_attention.indexer.{name}": _THEIRS + ("" if name.startswith("k_norm") else "linear_") + name
    for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
}
_TOO_OLD = (
    "the checkpoint's indexers are of megatron-core before 0.19, which computes otherwise than "
    f"transformers; only those with the argument {_INTERLEAVED} are converted"
)


def indexer_arguments(spec: ModelSpec) -> dict[str, Any]:
    """The arguments of Megatron-LM for the indexers of a model, which may have none."""
    indexer = None if spec.latent is None else spec.latent.indexer
    if indexer is None:
        return {}
    sizes = (indexer.heads, indexer.head_dim, indexer.most)
    return {
        _VARIANT: "dsa",
        **dict(zip(_SIZES, sizes, strict=True)),
        **dict(zip(_SHARING, _distances(indexer.layers) or (1, 0), strict=True)),
        _INTERLEAVED: indexer.interleaved,
        _ROTATE: False,  # changes no product, and needs a GPU
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "apply_rope_fusion": False,
    }


def indexer_options(arguments: Mapping[str, Any]) -> list[str]:
    """The options of `pretrain_gpt.py` that make the indexers of `indexer_arguments`."""
    if arguments.get(_VARIANT) != "dsa":
        return []
    names = (_VARIANT, *_SIZES, *_SHARING, "dsa_indexer_k_norm_epsilon")
    options = [f"--{name.replace('_', '-')} {arguments[name]}" for name in names]
    if arguments[_INTERLEAVED]:
        options.append("--dsa-indexer-rope-interleaved")
    return [*options, "--no-dsa-indexer-rotate-activation", "--no-rope-fusion"]


def beyond_indexers(spec: ModelSpec) -> dict[str, bool]:
    """Features, in words, that Megatron-LM's indexers lack, and whether the model has them."""
    indexer = None if spec.latent is None else spec.latent.indexer
    shares = indexer is not None and not all(indexer.layers)
    return {
        "indexers at irregular distances": indexer is not None and not _distances(indexer.layers),
        # It would stack the indexers of all layers, and some have none.
        "indexers in some layers and experts in all": shares
        and spec.experts is not None
        and all(spec.experts.layers),
    }


def family_with_indexers(arguments: Mapping[str, Any]) -> str | None:
    """The family of a checkpoint that has indexers; None: it has none."""
    if arguments.get(_VARIANT) != "dsa":
        return None
    return "glm_moe_dsa" if arguments.get(_INTERLEAVED) else "deepseek_v32"


def indexer_config(arguments: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The keys of a `config.json` for indexers; CheckpointError: there are none, or older ones."""
    if arguments.get(_VARIANT) != "dsa":
        raise CheckpointError(f"the checkpoint has no indexers, and so is no {family} model")
    if _INTERLEAVED not in arguments:
        raise CheckpointError(_TOO_OLD)
    config: dict[str, Any] = {key: arguments.get(name) for name, key in _SIZES.items()}
    if family == "glm_moe_dsa":
        kinds = {True: "full", False: "shared"}
        config["indexer_types"] = [kinds[chooses] for chooses in _stated_layers(arguments)]
    return config


def indexer_contradictions(spec: ModelSpec, arguments: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What a checkpoint states of indexers otherwise than the model: name, stated, expected.

    Raises:
        CheckpointError: they are of a version that computes otherwise.
    """
    expected = indexer_arguments(spec)
    stated = arguments.get(_VARIANT)
    if _VARIANT not in arguments or not (expected or stated == "dsa"):
        return []
    if not expected or stated != "dsa":
        return [(_VARIANT, stated, expected.get(_VARIANT))]
    if _INTERLEAVED not in arguments:
        raise CheckpointError(_TOO_OLD)

    found = [
        (name, arguments[name], expected[name])
        for name in (*_SIZES, _INTERLEAVED)
        if arguments.get(name) not in (None, expected[name])
    ]
    if not arguments.get("dsa_indexer_scoring_relu", True):
        found.append(("dsa_indexer_scoring_relu", False, True))
    size = expected["dsa_indexer_head_dim"]
    if arguments.get(_ROTATE) and size & (size - 1):  # it fills up heads, and cuts them again
        found.append((_ROTATE, True, False))
    if _stated_layers(arguments) != spec.latent.indexer.layers:
        stated_numbers = [arguments.get(name, default) for name, default in _SHARING.items()]
        found.append((" and ".join(_SHARING), stated_numbers, [expected[name] for name in _SHARING]))
    return found


def _stated_layers(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each layer whether it has an indexer."""
    frequency, offset = (arguments.get(name) or default for name, default in _SHARING.items())
    return _choosing(frequency, offset, arguments.get("num_layers") or 0)


def _choosing(frequency: int, offset: int, num_layers: int) -> tuple[bool, ...]:
    first = max(offset, 1)
    return tuple(max(layer - first, 0) % frequency == 0 for layer in range(1, num_layers + 1))


def _distances(layers: tuple[bool, ...]) -> tuple[int, int] | None:
    """Megatron-LM's frequency and offset of the layers that choose; None: they have none."""
    if all(layers):
        return 1, 0
    numbers = range(1, len(layers) + 1)
    pairs = ((frequency, first) for frequency in numbers for first in numbers)
    return next((pair for pair in pairs if _choosing(*pair, len(layers)) == layers), None)
