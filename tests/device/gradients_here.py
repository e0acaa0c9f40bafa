"""Adds gradients of weights to float32 sums, on the simulated device."""

from __future__ import annotations

from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers

from mrlhf.config.sections import ActorOptimSection
from mrlhf.device import pick_device
from mrlhf.host.products import gpu_gives_float32
from mrlhf.models.build import build_model
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.training.data_parallel import data_parallel
from tests.device.measures import model_spec
from tests.simulated_device.operators import EMULATED


def with_and_without() -> list[dict[str, Any]]:
    """With a torch whose `addmm` does not add products to float32, and with one that does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def refuse(*arguments: object) -> NoReturn:
        raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")

    operator = torch.ops.aten.addmm.dtype_out
    with mock.patch.dict(EMULATED, {operator: refuse}):
        without = _layers()
    gpu_gives_float32.cache_clear()  # what was tried once is kept
    return [without, _layers()]


def _layers() -> dict[str, Any]:
    """Whether each layer adds the gradient of its weight itself, and how exact the sum is."""
    groups = GroupFactory(timeout_s=60.0).role_groups(
        ParallelLayout.for_world("actor", 1, AxisSizes())
    )
    device = pick_device("auto", local_rank=0)
    built = build_model(
        model_spec(1),
        groups,
        dtype=torch.bfloat16,
        device=device,
        sequence_parallel=False,
        recompute="none",
    )
    optim = ActorOptimSection(use_distributed_optimizer=False)
    [chunk] = data_parallel(built.chunks, built.config, groups, device.torch_device, optim)
    kinds = (layers.ColumnParallelLinear, layers.RowParallelLinear)
    found = [module for module in chunk.modules() if isinstance(module, kinds)]

    layer = found[0]
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 1, layer.weight.shape[1], generator=generator).to("cuda").bfloat16()
    for _ in range(2):
        output, _ = layer(hidden)
        output.sum().backward()
    exact = hidden.double().sum(dim=(0, 1)).expand(layer.weight.shape) * 2
    gap = float((layer.weight.main_grad - exact).abs().max())
    fused = [module.gradient_accumulation_fusion for module in found]
    return {"fused": fused, "gap": gap}
