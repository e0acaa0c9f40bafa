"""megatron-core's sparse attention on a CPU, in a block of layers with latent attention.

Before 0.19, megatron-core's own layers are told here what later ones do: the first dimensions are
rotated, halves or neighbours; nothing is multiplied by a Hadamard matrix, which needs a GPU and
changes no product; some layers take the choice of the one before.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

_ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
IS_NEW = find_spec(_ABSORBED) is not None


class Whole(torch.nn.Linear):
    """A linear layer that every rank has whole, as TransformerEngine's with "duplicated"."""

    def __init__(self, inputs: int, outputs: int, init_method: Any, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=False)
        init_method(self.weight)

    def forward(self, x: Any) -> Any:
        return super().forward(x), None

    def get_extra_state(self) -> None:
        """As all of megatron-core's linear layers have."""

    def set_extra_state(self, state: Any) -> None:
        """It is empty."""


class Indexer(dsa.DSAIndexer):
    """An indexer of megatron-core 0.16 that rotates as those of 0.19 do."""

    def _apply_rope(self, x: Any, rotary_pos_emb: Any, mscale: float) -> Any:
        config = copy.copy(self.config)
        config.multi_latent_attention = self.config.dsa_indexer_rope_interleaved
        size = self.qk_pos_emb_head_dim
        turned = apply_rotary_pos_emb(
            x[..., :size],
            rotary_pos_emb,
            config=config,
            mscale=mscale,
            cp_group=self.pg_collection.cp,
        )
        return torch.cat([turned, x[..., size:]], dim=-1)

    def forward_with_scores(self, *arguments: Any, **options: Any) -> Any:
        found = super().forward_with_scores(*arguments, **options)
        self.config.last_choice = found[1]
        return found


class LastChoice:
    """Stands for the indexer of a layer that has none."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def forward_with_scores(self, *_: Any, **__: Any) -> Any:
        return None, self._config.last_choice


class Attention(dsa.DSAttention):
    """Sparse attention of megatron-core 0.16, of which some layers have no indexer."""

    def __init__(self, config: Any, *, layer_number: int, **options: Any) -> None:
        super().__init__(config, layer_number=layer_number, **options)
        self.indexer.k_norm.eps = config.dsa_indexer_k_norm_epsilon
        first = max(config.dsa_indexer_skip_topk_offset, 1)
        if max(layer_number - first, 0) % config.dsa_indexer_topk_freq:
            del self.indexer
            self.indexer = LastChoice(config)


def attend_sparsely(block: Any) -> None:
    """Give the layers of this specification megatron-core's sparse attention."""
    if not IS_NEW:
        dsa.rotate_activation = lambda x: x
    indexer = ModuleSpec(
        module=dsa.DSAIndexer if IS_NEW else Indexer,
        submodules=dsa.DSAIndexerSubmodules(
            linear_wq_b=Whole, linear_wk=Whole, k_norm=WrappedTorchNorm, linear_weights_proj=Whole
        ),
    )
    core = ModuleSpec(
        module=dsa.DSAttention if IS_NEW else Attention,
        submodules=dsa.DSAttentionSubmodules(indexer=indexer),
    )
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        attention.submodules.core_attention = core
        if IS_NEW:
            from megatron.core.transformer.experimental_attention_variant import absorbed_mla

            parts = vars(attention.submodules)
            attention.module = absorbed_mla.AbsorbedMLASelfAttention
            attention.submodules = absorbed_mla.AbsorbedMLASelfAttentionSubmodules()
            for name in vars(attention.submodules):
                setattr(attention.submodules, name, parts[name])
