"""A model family: the facts that mrlhf knows of one Hugging Face `model_type`.

A family is one object, made in one file. This file knows no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mrlhf.models.lora import adapter_rules, adapter_shapes, linear_layers, with_adapters
from mrlhf.models.spec import Head, ModelSpec
from mrlhf.weights.forms import OtherForm
from mrlhf.weights.shard import Rule, Shape

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


@dataclass(frozen=True)
class Chunk:
    """The part of a model that one module on one rank holds.

    Attributes:
        layers: the global numbers of its transformer layers.
        is_first: whether the model begins here, with the embedding.
        is_last: whether the model ends here, with the final norm and the output layer.
        experts: the numbers of the experts that it holds of each mixture; empty in a dense model.
    """

    layers: range
    is_first: bool
    is_last: bool
    experts: range = range(0)


def whole_model(spec: ModelSpec) -> Chunk:
    """All layers and experts, the embedding and the output layer."""
    experts = range(0 if spec.experts is None else spec.experts.count)
    return Chunk(range(spec.num_layers), is_first=True, is_last=True, experts=experts)


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`: their configuration, their layers and their weight map.

    Attributes:
        model_type: the value of that key in `config.json`.
        class_stem: how the names of its transformers classes begin; "Llama" in "LlamaForCausalLM".
        embedding: the tensor of the embedding.
        language_head: the tensor of a language model's output layer. Where the output layer is the
            embedding the model has no such tensor, but some checkpoints store a copy.
        scalar_head: the tensor of a scalar model's output layer.
        required_keys: the keys that a `config.json` of the family must state. transformers would
            replace a missing number by that of a model which the file does not describe. A key that
            has two names is written "one or other".
        read_config: (config, head) -> the spec. `config` is the `config.json` as transformers
            completes it. Raises ConfigError if the model needs a feature that is not supported.
        megatron_options: (spec) -> the fields of megatron-core's TransformerConfig that depend on
            the model, and not on the layout or the run.
        decoder_spec: (spec, chunk, whether to use TransformerEngine) -> megatron-core's layer specs
            and final norm for the layers of the chunk.
        base_shapes: (spec) -> name and full shape of every tensor of a Hugging Face checkpoint,
            in the order of the checkpoint.
        base_rules: (spec, chunk) -> the named tensors that each parameter of the chunk holds, in
            the order of `GPTModel.named_parameters()`. Layers are numbered from 0. If the build
            with TransformerEngine names a parameter otherwise, that name comes later. A rule of
            tensors that the model does not have means no parameter.
        other_forms: (spec) -> by their names in a file, tensors that it may hold in place of those
            of `tensor_shapes`.
        written_forms: (spec) -> by their names in a file, tensors that stack some of the model's in
            the files that are written. Each holds whole tensors, in the order of its parts.
        quantisations: the values of `quant_method` in a `config.json` whose weights can be read.
        ignored_prefixes: (spec) -> how the names of tensors begin that a checkpoint may hold
            although the model has no place for them, such as the layers of a draft model.
        float32_endings: how the names of tensors end that are float32 whatever the others are.
        classifier_stem: `class_stem` of a sequence classifier, if that is another.
        wrapper: the `model_type` of models that also read images, and hold one of these as their
            `text_config`.
        renamed: other `model_type`s of models that are computed alike and have the same tensors,
            whose code transformers does not have. Exports have `model_type`.
        window_base_key: the key of transformers 4 for the rotary base of layers with a window.
    """

    model_type: str
    class_stem: str
    embedding: str
    language_head: str
    scalar_head: str
    required_keys: tuple[str, ...]
    read_config: Callable[[dict[str, Any], Head], ModelSpec]
    megatron_options: Callable[[ModelSpec], dict[str, Any]]
    decoder_spec: Callable[[ModelSpec, Chunk, bool], TransformerBlockSubmodules]
    base_shapes: Callable[[ModelSpec], dict[str, Shape]]
    base_rules: Callable[[ModelSpec, Chunk], Mapping[str, Rule]]
    other_forms: Callable[[ModelSpec], dict[str, OtherForm]] = lambda spec: {}
    written_forms: Callable[[ModelSpec], dict[str, OtherForm]] = lambda spec: {}
    quantisations: tuple[str, ...] = ()
    ignored_prefixes: Callable[[ModelSpec], tuple[str, ...]] = lambda spec: ()
    float32_endings: tuple[str, ...] = ()
    classifier_stem: str | None = None
    wrapper: str | None = None
    renamed: tuple[str, ...] = ()
    window_base_key: str | None = None

    def tensor_shapes(self, spec: ModelSpec) -> dict[str, Shape]:
        """The name and full shape of every tensor, those of adapters last."""
        shapes = self.base_shapes(spec)
        if spec.lora is None:
            return shapes
        factors: dict[str, Shape] = {}
        for rule in self.all_rules(spec).values():
            factors |= adapter_shapes(spec, shapes, rule)
        return shapes | factors

    def linear_layers(self, spec: ModelSpec) -> list[str]:
        """The names of all layers that can have an adapter, in the order of the checkpoint."""
        shapes = self.base_shapes(spec)
        layers: set[str] = set()
        for rule in self.all_rules(spec).values():
            layers.update(linear_layers(rule, shapes))
        names = (name.removesuffix(".weight") for name in shapes)
        return [name for name in names if name in layers]

    def parameter_names(self, spec: ModelSpec, chunk: Chunk) -> list[str]:
        """The names of a chunk's parameters in their order, adapters included.

        They are those of the build without TransformerEngine.
        """
        shapes = _base_shapes(self.base_shapes, spec)
        first_names: dict[Rule, str] = {}
        for name, rule in self.base_rules(spec, chunk).items():
            if rule.names[0] in shapes:
                first_names.setdefault(rule, name)
        names = list(first_names.values())
        if spec.lora is None:
            return names
        return list(with_adapters(names, self._adapter_rules(spec, chunk)))

    def rules_of(self, spec: ModelSpec, chunk: Chunk) -> Mapping[str, Rule]:
        """The named tensors that each parameter of a chunk holds, adapters included."""
        rules = self.base_rules(spec, chunk)
        return rules if spec.lora is None else {**rules, **self._adapter_rules(spec, chunk)}

    def all_rules(self, spec: ModelSpec) -> Mapping[str, Rule]:
        """The rules of the base's parameters as one chunk."""
        return self.base_rules(spec, whole_model(spec))

    def _adapter_rules(self, spec: ModelSpec, chunk: Chunk) -> dict[str, Rule]:
        shapes = _base_shapes(self.base_shapes, spec)
        rules: dict[str, Rule] = {}
        for name, rule in self.base_rules(spec, chunk).items():
            rules |= adapter_rules(spec, shapes, name, rule)
        return rules

    def class_name(self, head: Head) -> str:
        """The transformers class that loads an exported model with this head."""
        if head == "lm":
            return f"{self.class_stem}ForCausalLM"
        return f"{self.classifier_stem or self.class_stem}ForSequenceClassification"


@lru_cache(maxsize=4)
def _base_shapes(
    base_shapes: Callable[[ModelSpec], dict[str, Shape]], spec: ModelSpec
) -> Mapping[str, Shape]:
    return base_shapes(spec)
