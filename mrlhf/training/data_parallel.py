"""Wraps the parts of a model so that its replicas train it together, and gathers its weights.

Replicas sum their gradients. With the distributed optimizer each of them updates a range of the
weights, which are then gathered. Both can overlap with computation. This file does not know what
gradients are used for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from mrlhf.config.sections import OptimSection
from mrlhf.host.products import gpu_gives_float32
from mrlhf.host.stand_ins import replace_apex_kernel
from mrlhf.models.experts import ExpertMatrix
from mrlhf.models.transformer_engine import linears_of
from mrlhf.parallel.groups import RoleGroups
from mrlhf.parallel.layout import REPLICA_AXES

# The size of what is exchanged at once while the ranks compute. Larger buckets use the network
# better; with fewer of them there is less to overlap.
_BUCKET_PARAMETERS = 40_000_000
_LEAST_BUCKETS = 4


def data_parallel(
    modules: Sequence[torch.nn.Module],
    config: TransformerConfig,
    groups: RoleGroups,
    device: torch.device,
    optim: OptimSection,
) -> list[DistributedDataParallel]:
    """Wrap the chunks of the model on this rank, whose gradients are then kept in float32.

    If gradients are exchanged while the backward pass goes on, every parameter must get a gradient
    from every micro-batch: the replicas exchange a bucket once all of it is there, and they must do
    so in the same order.
    """
    sizes = []
    for module in modules:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        sizes.append(sum(parameter.numel() for parameter in trained))
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=splits_optimizer(optim, groups),
        overlap_grad_reduce=overlaps(optim.overlap_grad_reduce, groups, device),
        # Otherwise the optimizer of the experts and that of all else each gather all weights.
        # `WeightGather` does it once.
        overlap_param_gather=splits_optimizer(optim, groups),
        bucket_size=min(_BUCKET_PARAMETERS, -(-max(sizes) // _LEAST_BUCKETS)),
    )

    chunks = [
        DistributedDataParallel(config, settings, module, pg_collection=groups.collection)
        for module in modules
    ]
    if settings.use_distributed_optimizer and not settings.overlap_grad_reduce:
        for chunk in chunks:
            _sum_where_gradients_are(chunk)
    # A CPU has the kernel, and so has a GPU with Apex.
    if not layers._grad_accum_fusion_available and gpu_gives_float32():
        replace_apex_kernel(layers)
    for chunk in chunks:
        _add_weight_gradients_in_place(chunk, layers._grad_accum_fusion_available)
    return chunks


def splits_optimizer(optim: OptimSection, groups: RoleGroups) -> bool:
    """Whether replicas, if there are any, share the optimizer's work."""
    # Without replicas it would only copy weights.
    return optim.splits_states and _has_replicas(groups)


def overlaps(setting: bool | None, groups: RoleGroups, device: torch.device) -> bool:
    """Whether an exchange between replicas, if there are any, goes on while they compute."""
    if not _has_replicas(groups):
        return False
    # Without a setting on GPUs alone: on a CPU an exchange takes the cores that compute.
    return device.type == "cuda" if setting is None else setting


def _has_replicas(groups: RoleGroups) -> bool:
    return groups.layout.group_size(*REPLICA_AXES) > 1


class WeightGather:
    """Gives every replica all weights, after each replica has updated a range of them.

    If it is overlapped, it goes on while the ranks compute, and each layer waits for its weights.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel], overlapped: bool) -> None:
        """Watch the layers of the chunks, which have the distributed optimizer's buffers.

        The weights are whole now. If `overlapped`, `start` returns before they are whole again.
        """
        self._overlapped = overlapped
        self._buckets: list[_ParamAndGradBucketGroup] = []
        # By bucket, what is under way.
        self._works: dict[_ParamAndGradBucketGroup, list[dist.Work]] = {}
        for chunk in chunks:
            # megatron-core's own hooks also start what has not been started, which a rank that has
            # no rows to evaluate would not join.
            chunk.disable_forward_pre_hook(param_sync=False)
            # A forward pass needs the weights of the last bucket first.
            self._buckets += reversed(chunk.bucket_groups)
            self._buckets += reversed(chunk.expert_parallel_bucket_groups)
            if overlapped:
                for module in chunk.module.modules():
                    self._wait_in(module, chunk)

    def start(self) -> None:
        """Gather the weights that the optimizer has changed; every replica calls it."""
        for bucket in self._buckets:
            self._works[bucket] = _gather(bucket)
        if not self._overlapped:
            self.finish()

    def finish(self) -> None:
        """Wait until all weights are whole."""
        for bucket in self._buckets:
            self._finish(bucket)

    def _wait_in(self, module: torch.nn.Module, chunk: DistributedDataParallel) -> None:
        """Let `module` wait for its own parameters before it computes."""
        buckets = {
            chunk.param_to_bucket_group[parameter]
            for parameter in module.parameters(recurse=False)
            if parameter.requires_grad
        }
        if not buckets:
            return

        def wait(*_: object) -> None:
            for bucket in buckets:
                self._finish(bucket)

        module.register_forward_pre_hook(wait)

    def _finish(self, bucket: _ParamAndGradBucketGroup) -> None:
        for work in self._works.pop(bucket, []):
            work.wait()


def _gather(group: _ParamAndGradBucketGroup) -> list[dist.Work]:
    """Start to gather the weights of each of the group's buckets, of which a rank has its range.

    Megatron-core's `start_param_sync` coalesces them. The two threads of a gloo group write down
    the name of what they did last, in one string and without a lock (torch 2.13). A name that has
    memory of its own is then freed twice now and then; ALLGATHER_COALESCED is the only such name.
    """
    ranks = group.intra_distributed_optimizer_instance_group
    in_place = dist.get_backend(ranks) == "gloo"  # its all-gather copies what it sends and receives
    works = []

    for bucket in group.buckets:
        parts = bucket.param_data.chunk(ranks.size())
        if in_place:
            works += [
                dist.broadcast(part, group=ranks, group_src=rank, async_op=True)
                for rank, part in enumerate(parts)
            ]
            continue
        own = parts[ranks.rank()]
        works.append(
            dist.all_gather_into_tensor(bucket.param_data, own, group=ranks, async_op=True)
        )
    return works


def _sum_where_gradients_are(wrapped: DistributedDataParallel) -> None:
    """Let gloo add gradients up in the memory where they are."""
    # It has no reduce-scatter: it would copy all gradients, add the copies up, and return a part.
    # The sums are the same to the last bit; other ranks' parts, which nobody reads, hold sums too.
    for group in (*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups):
        replicas = group.intra_distributed_optimizer_instance_group
        if dist.get_backend(replicas) == "gloo":
            group.start_grad_sync = partial(_add_up, group.buckets, replicas)


def _add_up(
    buckets: Sequence[Any], replicas: dist.ProcessGroup, force_all_reduce: bool = False
) -> None:
    """Do what `start_grad_sync` does without overlap."""
    for bucket in buckets:
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data *= bucket.gradient_scaling_factor
        dist.all_reduce(bucket.grad_data, group=replicas)


def _add_weight_gradients_in_place(wrapped: DistributedDataParallel, ours: bool) -> None:
    """Let linear layers add to `main_grad` as they compute, not after; `ours` if they can."""
    for layer in wrapped.modules():
        if ours and isinstance(layer, (ColumnParallelLinear, RowParallelLinear, ExpertMatrix)):
            layer.gradient_accumulation_fusion = True
    for layer in linears_of(wrapped):
        layer.fuse_wgrad_accumulation = True
