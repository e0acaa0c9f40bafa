"""The steps of a layer that training and engine share: RMSNorm, the gated activation, rotation.

The first two are compiled on a CPU with a compiler, and torch's elsewhere. They are differentiable
and agree to rounding. This file knows rows of numbers, and no model.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrlhf.host.library import SOURCES, SUFFIXES, functions_of, load_library, threads_for

SOURCE = SOURCES / "rows.cpp"

# The arguments of each function in the order of rows.cpp.
_SIGNATURES = {
    "rms_norm": "pppp ii fn",
    "rms_norm_backward": "pppppp ii n",
    "gated": "pp ii n",
    "gated_backward": "ppp ii n",
}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `weight` [hidden] times x [..., hidden] over its root mean square, plus `eps`.

    The statistics are computed in float32. As in Hugging Face's Llama, the quotient is rounded to
    the dtype of `x` before it is multiplied.
    """
    if _kernels_for(x, weight) is None:
        return torch_rms_norm(x, weight, eps)
    return _HostNorm.apply(x, weight, eps)


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., ffn]; gate_up [..., 2 * ffn] has the gate columns first."""
    return torch_gated(gate_up) if _kernels_for(gate_up) is None else _HostGated.apply(gate_up)


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` on torch's operators."""
    return weight * F.rms_norm(x, x.shape[-1:], eps=eps)


def torch_gated(gate_up: Tensor) -> Tensor:
    """`gated` on torch's operators."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first dimensions of heads x [..., heads, head_dim]; the others stay.

    `cosines` and `sines` are float32 [..., 1, rotary_dim / 2]. The products are float32, and the
    result has the dtype of `x`.
    """
    half = cosines.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned_first = first * cosines - second * sines
    turned_second = second * cosines + first * sines
    return torch.cat([turned_first.to(x.dtype), turned_second.to(x.dtype), rest], dim=-1)


class _HostNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        size = x.shape[-1]
        rows = x.numel() // size
        out = torch.empty_like(x)
        scales = torch.empty(rows, dtype=torch.float32)

        _functions(x.dtype)["rms_norm"](
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), scales.data_ptr(),
            rows, size, eps, threads_for(x.numel()),
        )  # fmt: skip
        context.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = context.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        grad_weight = torch.empty(weight.shape, dtype=torch.float32)

        _functions(x.dtype)["rms_norm_backward"](
            grad.data_ptr(), x.data_ptr(), weight.data_ptr(), scales.data_ptr(),
            grad_x.data_ptr(), grad_weight.data_ptr(),
            len(scales), len(weight), threads_for(x.numel()),
        )  # fmt: skip
        return grad_x, grad_weight.to(weight.dtype), None


class _HostGated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], size))
        _functions(gate_up.dtype)["gated"](
            gate_up.data_ptr(), out.data_ptr(),
            out.numel() // size, size, threads_for(gate_up.numel()),
        )  # fmt: skip
        context.save_for_backward(gate_up)
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> Tensor:
        (gate_up,) = context.saved_tensors
        grad = grad.contiguous()
        size = grad.shape[-1]
        grad_gate_up = torch.empty_like(gate_up)
        _functions(grad.dtype)["gated_backward"](
            grad.data_ptr(), gate_up.data_ptr(), grad_gate_up.data_ptr(),
            grad.numel() // size, size, threads_for(gate_up.numel()),
        )  # fmt: skip
        return grad_gate_up


def _kernels_for(*tensors: Tensor) -> dict[str, Any] | None:
    """Return the kernels for tensors; None if there are none, or the dtypes differ."""
    dtype = tensors[0].dtype
    fits = all(tensor.device.type == "cpu" and tensor.dtype == dtype for tensor in tensors)
    return _functions(dtype) if fits and dtype in SUFFIXES else None


@cache
def _functions(dtype: torch.dtype) -> Any:
    library = load_library(SOURCE, "training")
    return None if library is None else functions_of(library, _SIGNATURES, dtype)
