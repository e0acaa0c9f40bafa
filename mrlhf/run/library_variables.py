"""Sets what torch, NCCL and CUDA read of the environment, unless the user has set it."""

from __future__ import annotations

import os
from typing import Literal

import torch

_OF_RANKS = {
    # gloo connects two ranks when they first meet, and not all ranks of a group with each other.
    "TORCH_GLOO_LAZY_INIT": "1",
    # megatron-core overlaps messages with products only if a GPU starts kernels in their order.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # The last exchanges of each rank, which NCCL's watchdog writes to a file before it ends a rank.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}


def set_for_ranks() -> None:
    """Set what the ranks that this process starts must have from their beginning."""
    for name, value in _OF_RANKS.items():
        os.environ.setdefault(name, value)


def set_allocator(engine: Literal["native", "vllm"]) -> None:
    """Before the first tensor on a GPU: let its memory grow in place, for packs of any lengths.

    vLLM's sleep mode forbids it, and before torch 2.13 the native engine's pool may do so.
    """
    if engine == "vllm" or torch.__version__ < "2.13" or not torch.cuda.is_available():
        return
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
