"""Wraps a part of a model so that its gradients are summed over the data-parallel ranks.

It knows how gradients are kept and summed. It does not know what they are used for.
"""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from mrlhf.models.experts import ExpertMatrix
from mrlhf.parallel.groups import RoleGroups


def data_parallel(
    module: torch.nn.Module,
    config: TransformerConfig,
    groups: RoleGroups,
    device: torch.device,
    use_distributed_optimizer: bool,
) -> DistributedDataParallel:
    """Wrap `module`, whose gradients are then kept in float32.

    Args:
        module: one chunk of the model.
        config: of the model.
        groups: the role's process groups.
        device: where the module is.
        use_distributed_optimizer: whether the data-parallel ranks share the optimizer's work.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=use_distributed_optimizer
    )
    wrapped = DistributedDataParallel(config, settings, module, pg_collection=groups.collection)
    if device.type == "cpu":
        _add_weight_gradients_in_place(wrapped)
    return wrapped


def _add_weight_gradients_in_place(wrapped: DistributedDataParallel) -> None:
    """Let linear layers add the gradient of their weight to its `main_grad` as they compute it.

    Otherwise DistributedDataParallel adds it, after it has been stored. On a CPU `mrlhf.device`
    stands in for Apex's kernel.
    """
    for layer in wrapped.modules():
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear, ExpertMatrix)):
            layer.gradient_accumulation_fusion = True
