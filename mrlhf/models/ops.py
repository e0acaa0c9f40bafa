"""The steps of a layer that training and engine share: RMSNorm, the gated activation, rotation.

The first two are compiled on a CPU with a compiler, and torch's elsewhere. They are differentiable
and agree to rounding. This file knows rows of numbers, and no model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrlhf.host import kernels
from mrlhf.host.kernels import Kernels, threads_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `weight` [hidden] times x [..., hidden] over its root mean square, plus `eps`.

    The statistics are computed in float32. As in Hugging Face's Llama, the quotient is rounded to
    the dtype of `x` before it is multiplied.
    """
    host = kernels.find_for(x, weight)
    if host is None:
        return torch_rms_norm(x, weight, eps)
    return _HostNorm.apply(host, x, weight, eps)


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., ffn]; gate_up [..., 2 * ffn] has the gate columns first."""
    host = kernels.find_for(gate_up)
    return torch_gated(gate_up) if host is None else _HostGated.apply(host, gate_up)


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
    def forward(context: Any, host: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        size = x.shape[-1]
        rows = x.numel() // size
        out = torch.empty_like(x)
        scales = torch.empty(rows, dtype=torch.float32)

        host.rms_norm(x, None, weight, out, scales, rows, size, eps, threads_for(x.numel()))
        context.save_for_backward(x, weight, scales)
        context.host = host
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        x, weight, scales = context.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        grad_weight = torch.empty(weight.shape, dtype=torch.float32)

        sizes = (len(scales), len(weight), threads_for(x.numel()))
        context.host.rms_norm_backward(grad, x, weight, scales, grad_x, grad_weight, *sizes)
        return None, grad_x, grad_weight.to(weight.dtype), None


class _HostGated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, host: Kernels, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], size))

        host.gated(gate_up, out, out.numel() // size, size, threads_for(gate_up.numel()))
        context.save_for_backward(gate_up)
        context.host = host
        return out

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[None, Tensor]:
        (gate_up,) = context.saved_tensors
        grad = grad.contiguous()
        size = grad.shape[-1]
        grad_gate_up = torch.empty_like(gate_up)

        sizes = (grad.numel() // size, size, threads_for(gate_up.numel()))
        context.host.gated_backward(grad, gate_up, grad_gate_up, *sizes)
        return None, grad_gate_up
