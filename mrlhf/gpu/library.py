"""Operators of this package on a GPU: Triton kernels as torch's own operators.

An operator has a kernel for tensors of a GPU and a torch form for all others, so whatever follows
torch's operators (profiles, CUDA graphs, a simulated device) sees one call. This file knows neither
shapes nor models.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("mrlhf", "DEF")


def operator(schema: str, form: Callable[..., Any]) -> Callable[..., Any]:
    """Define an operator, and return what calls it.

    Args:
        schema: as torch's: "name(Tensor x, ...) -> Tensor"; `mrlhf.gpu.launch` has a function of
            this name, which takes the same arguments.
        form: computes the same on tensors of a host.
    """
    name = schema[: schema.index("(")]

    def launch(*arguments: Any) -> Any:
        from mrlhf.gpu import launch  # Triton takes a second to import, which a host does not need

        return getattr(launch, name)(*arguments)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, launch, "CUDA")
    _LIBRARY.impl(name, form, "CPU")
    call: Callable[..., Any] = getattr(torch.ops.mrlhf, name).default
    return call


def serves(*tensors: Tensor) -> bool:
    """Whether kernels for these tensors exist: they are on a GPU, and Triton is installed."""
    return all(tensor.is_cuda for tensor in tensors) and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
