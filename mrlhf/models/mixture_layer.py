"""A transformer layer whose MLP is a mixture of experts.

It does not know how experts are chosen or shared out.
"""

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from mrlhf.models.mixture import Mixture
from mrlhf.models.spec import Experts
from mrlhf.parallel.packed_sequences import PackedSequences


class MixtureLayer(TransformerLayer):
    """megatron-core's layer with our mixture, for packed sequences alone.

    megatron-core's own mixture routes by other rules than some families, adds the losses of a
    micro-batch, which depend on the packing, and needs TransformerEngine for some layouts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *,
        experts: Experts,
        shared: MLPSubmodules,
        pg_collection: ProcessGroupCollection,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, pg_collection=pg_collection, **options)
        number = experts.number_of(self.layer_number - 1)  # megatron-core counts from 1
        self.mlp = Mixture(config, experts, number, shared, pg_collection)

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedSequences, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer, as TransformerLayer does.

        `hidden_states` is [tokens, 1, hidden], or this rank's part of them under sequence
        parallelism.
        """
        options.pop("dynamic_inference_decode_only", None)
        hidden_states, context = self._forward_attention(
            hidden_states, packed_seq_params=packed_seq_params, **options
        )

        def mixture(normed: Tensor) -> Tensor:
            output: Tensor = self.mlp(normed, packed_seq_params)
            return output

        normed = self.pre_mlp_layernorm(hidden_states)
        if self.recompute_mlp and self.training:
            output = checkpoint(mixture, False, normed)
        else:
            output = mixture(normed)
        return hidden_states + output, context
