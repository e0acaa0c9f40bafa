"""Operators of this package on a GPU: Triton kernels as torch's own operators.

An operator has a kernel for tensors of a GPU and a torch form for all others, so whatever follows
torch's operators (profiles, CUDA graphs, a simulated device) sees one call. Before its first use a
kernel is compared with its torch form, which takes its place where the two differ. This file knows
neither shapes nor models.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mrlhf.gpu.examples import largest_gap

_LIBRARY = torch.library.Library("mrlhf", "DEF")
_MOST = 0.02  # of the largest number; bfloat16 rounds by 0.004
_log = logging.getLogger(__name__)


def operator(schema: str, form: Callable[..., Any]) -> Callable[..., Any]:
    """Define an operator, and return what calls it.

    Args:
        schema: as torch's: "name(Tensor x, ...) -> Tensor"; `mrlhf.gpu.launch` has a function of
            this name, which takes the same arguments.
        form: computes the same on tensors of a host.
    """
    name = schema[: schema.index("(")]

    def on_gpu(*arguments: Any) -> Any:
        return _kernel_or_form(name, form)(*arguments)

    _LIBRARY.define(schema)
    _LIBRARY.impl(name, on_gpu, "CUDA")
    _LIBRARY.impl(name, form, "CPU")
    call: Callable[..., Any] = getattr(torch.ops.mrlhf, name).default
    return call


def serves(*tensors: Tensor) -> bool:
    """Whether operators take these tensors: on a GPU, of one dtype, and Triton is installed."""
    dtype = tensors[0].dtype
    fits = all(tensor.is_cuda and tensor.dtype == dtype for tensor in tensors)
    return fits and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _kernel_or_form(name: str, form: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel if it computes what the form does on this GPU, else the form, with a warning."""
    try:
        # Imported here because Triton takes a second to import, and a host does not need it.
        from mrlhf.gpu import launch

        kernel: Callable[..., Any] = getattr(launch, name)
        generator = torch.Generator("cuda").manual_seed(0)
        draw = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
        gap = largest_gap(kernel, form, name, draw)
        problem = "" if gap <= _MOST else f"it differs by {gap:.2g} of the largest number"
    except Exception as error:  # of the compiler, the driver or Triton's version
        problem = f"{type(error).__name__}: {error}"
    if not problem:
        return kernel
    _log.warning(
        "the kernel %r does not work here (%s); torch's operators take its place, more slowly",
        name,
        problem.splitlines()[0],
    )
    return form
