"""The steps of a layer that training and engine share: RMSNorm, the gated activation, rotation.

Each has a torch form. On a CPU with a compiler the first two are compiled, and on a GPU with Triton
all are kernels of ours. They are differentiable and agree to rounding. This file knows rows of
numbers, and no model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrlhf.gpu.library import operator, serves
from mrlhf.host import kernels
from mrlhf.host.kernels import Kernels, threads_for
from mrlhf.models.spec import Activation, ClampedSwish


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `weight` [hidden] times x [..., hidden] over its root mean square, plus `eps`.

    As in Hugging Face's Llama, the float32 quotient is rounded to `x`'s dtype, then multiplied.
    """
    host = kernels.find_for(x, weight)
    if host is not None:
        return _HostNorm.apply(host, x, weight, eps)
    return _GpuNorm.apply(x, weight, eps) if serves(x, weight) else torch_rms_norm(x, weight, eps)


def wide_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """`rms_norm` by a float32 `gain`, rounded once to `x`'s dtype, as in Hugging Face's Gemma."""
    if x.dtype == torch.float32:
        return rms_norm(x, gain, eps)
    return (_GpuNorm if serves(x) else _WideNorm).apply(x, gain, eps)


def gated(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    """Return activation(gate) * up, [..., ffn]; gate_up [..., 2 * ffn] has the gate columns first.

    `gelu_tanh` is GELU by its approximation with tanh. Of a `ClampedSwish` gate and up alternate.
    """
    if isinstance(activation, ClampedSwish):
        return _clamped_swish(gate_up, activation)
    if activation == "gelu_tanh":
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up
    host = kernels.find_for(gate_up)
    if host is not None:
        return _HostGated.apply(host, gate_up)
    return _GpuGated.apply(gate_up) if serves(gate_up) else torch_gated(gate_up)


def _clamped_swish(gate_up: Tensor, activation: ClampedSwish) -> Tensor:
    gate = gate_up[..., ::2].clamp(max=activation.limit)
    up = gate_up[..., 1::2].clamp(-activation.limit, activation.limit)
    # torch.sigmoid rounds the last numbers of a tensor in another way. Over 1 + e^80, which float32
    # and bfloat16 hold, all is 0 to rounding.
    inverse = 1 + (-activation.alpha * gate).clamp(max=80.0).exp()
    return (up + 1) * (gate / inverse)


def torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` on torch's operators."""
    return weight * F.rms_norm(x, x.shape[-1:], eps=eps)


def torch_gated(gate_up: Tensor) -> Tensor:
    """`gated` with silu on torch's operators."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first dimensions of x [tokens, heads..., head_dim], in float32; the others stay.

    `cosines` and `sines` are float32 [tokens, rotary_dim / 2].
    """
    if serves(x):
        return _GpuRotation.apply(x, cosines, sines)
    return torch_rotate(x, cosines, sines)


def torch_rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`rotate` on torch's operators."""
    cosines, sines = (table.view(len(x), *[1] * (x.dim() - 2), -1) for table in (cosines, sines))
    half = cosines.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned_first = first * cosines - second * sines
    turned_second = second * cosines + first * sines
    return torch.cat([turned_first.to(x.dtype), turned_second.to(x.dtype), rest], dim=-1)


def halves(x: Tensor) -> Tensor:
    """Put the numbers of x [..., dim] that stand at even places before those at odd ones.

    Where a model rotates neighbours by one angle, `rotate` then does it.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


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


def _norm_with_scales(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    out = torch_rms_norm(x.to(weight.dtype), weight, eps).to(x.dtype)
    return out, torch.rsqrt(x.float().square().mean(dim=-1) + eps)


def _norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    normal = x.float() * scales[:, None]
    scaled = grad.float() * weight.float()
    along = (scaled * normal).mean(dim=-1, keepdim=True)
    grad_x = scales[:, None] * (scaled - normal * along)
    return grad_x.to(x.dtype), (grad.float() * normal).sum(dim=0)


def _gated_backward_form(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    grad = grad.float()
    sigmoid = gate.sigmoid()
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([grad_gate, grad * gate * sigmoid], dim=-1).to(gate_up.dtype)


def _rotate_or_back(x: Tensor, cosines: Tensor, sines: Tensor, back: bool) -> Tensor:
    return torch_rotate(x, cosines, -sines if back else sines)


_rms_norm = operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _norm_with_scales
)
_rms_norm_backward = operator(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor scales) -> (Tensor, Tensor)",
    _norm_backward,
)
_gated = operator("gated(Tensor gate_up) -> Tensor", torch_gated)
_gated_backward = operator(
    "gated_backward(Tensor grad, Tensor gate_up) -> Tensor", _gated_backward_form
)
_rotate = operator(
    "rotate(Tensor x, Tensor cosines, Tensor sines, bool back) -> Tensor", _rotate_or_back
)


class _GpuNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        out, scales = _rms_norm(rows, weight, eps)
        context.save_for_backward(rows, weight, scales)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, scales = context.saved_tensors
        grad_rows, grad_weight = _rms_norm_backward(
            grad.contiguous().view(rows.shape), rows, weight, scales
        )
        return grad_rows.view(grad.shape), grad_weight.to(weight.dtype), None


class _WideNorm(torch.autograd.Function):
    """A norm in float32 of narrower numbers, which are kept as they are, and widened again."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        context.save_for_backward(x, weight)
        context.eps = eps
        return rms_norm(x.float(), weight, eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = (saved.detach() for saved in context.saved_tensors)
        with torch.enable_grad():
            wide, weight = x.float().requires_grad_(), weight.requires_grad_()
            normed = rms_norm(wide, weight, context.eps)
        grad_x, grad_weight = torch.autograd.grad(normed, (wide, weight), grad.float())
        return grad_x.to(x.dtype), grad_weight, None


class _GpuGated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, gate_up: Tensor) -> Tensor:
        rows = gate_up.contiguous().view(-1, gate_up.shape[-1])
        context.save_for_backward(rows)
        return _gated(rows).view(*gate_up.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> Tensor:
        (rows,) = context.saved_tensors
        below = _gated_backward(grad.contiguous().view(len(rows), -1), rows)
        return below.view(*grad.shape[:-1], -1)


class _GpuRotation(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        context.save_for_backward(cosines, sines)
        return _rotate(x, cosines, sines, False)

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(grad, *context.saved_tensors, True), None, None
