"""Operators of this package on a GPU: Triton kernels as torch's own operators.

An operator has a kernel for tensors of a GPU and a torch form for all others, so whatever follows
torch's operators (profiles, CUDA graphs, a simulated device) sees one call. When a model is built,
kernels are compared with their torch forms at its sizes; where the two differ the form is taken.
This file knows no model.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mrlhf.gpu.examples import OF_ENGINE, Sizes, largest_gap

_LIBRARY = torch.library.Library("mrlhf", "DEF")
_MOST = 0.02  # of the largest number; bfloat16 rounds by 0.004
_log = logging.getLogger(__name__)
_forms: dict[str, Callable[..., Any]] = {}  # of each operator
# Why a kernel does not work here; empty if it does. Kernels that were not tried are not there.
_faults: dict[str, str] = {}


def operator(schema: str, form: Callable[..., Any]) -> Callable[..., Any]:
    """Define an operator, and return what calls it.

    Args:
        schema: as torch's: "name(Tensor x, ...) -> Tensor"; `mrlhf.gpu.launch` has a function of
            this name, which takes the same arguments.
        form: computes the same on tensors of a host.
    """
    name = schema[: schema.index("(")]

    def on_gpu(*arguments: Any) -> Any:
        return _kernel_or_form(name)(*arguments)

    _forms[name] = form
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


def try_kernels(sizes: Sizes) -> None:
    """Try every kernel at a model's sizes, before a run depends on it, and name those that fail.

    From then on torch's operators take their place. A machine's first process names them.
    """
    known = fallen_back()
    for name in _forms:
        if not _faults.get(name) and sizes.use(name):
            own = sizes if name in OF_ENGINE else replace(sizes, page=0, latent=None)
            _faults[name] = _fault(name, own)
    text = fallen_back()
    if text != known and not (torch.cuda.is_available() and torch.cuda.current_device()):
        _log.warning("%s", text)


def fallen_back() -> str:
    """Which kernels do not work here, and why one does not; empty if all that were tried do."""
    failed = {name: fault for name, fault in _faults.items() if fault}
    if not failed:
        return ""
    named = f"{', '.join(sorted(failed))} ({next(iter(failed.values())).splitlines()[0][:200]})"
    count = f"{len(failed)} of {len(_forms)} kernels"
    return f"{count} do not work here, torch's operators compute more slowly: {named}"


def _kernel_or_form(name: str) -> Callable[..., Any]:
    """The kernel, or the form if the kernel does not work here."""
    if name not in _faults:  # no model was built before
        try_kernels(Sizes())
    if _faults[name]:
        return _forms[name]
    # Imported here because Triton takes a second to import, and a host does not need it.
    from mrlhf.gpu import launch

    return getattr(launch, name)


def _numbers(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)  # the run's own numbers stay as they are
    return lambda *shape: torch.randn(shape, generator=generator).to("cuda", dtype)


@cache
def _fault(name: str, sizes: Sizes) -> str:
    """Why a kernel does not compute what its torch form does on this GPU; empty if it does."""
    if not _has_triton():
        return "Triton is not installed"
    _faults[name] = ""  # so that the operator takes its kernel
    try:
        operator = getattr(torch.ops.mrlhf, name).default
        gap = largest_gap(operator, _forms[name], name, _numbers(sizes.dtype), sizes)
    except Exception as error:  # of the compiler, the driver or Triton's version
        return f"{type(error).__name__}: {error}"
    return "" if gap <= _MOST else f"it differs by {gap:.2g} of the largest number"
