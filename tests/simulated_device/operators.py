"""Operators that a build of torch for CPUs lacks, or that a GPU runs as one kernel.

Attention refuses what FlashAttention 2 refuses. Numbers are computed by plain formulas in float32.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.attention.varlen
from torch import Tensor

from tests.simulated_device.counts import place
from tests.simulated_device.state import DEVICE
from tests.simulated_device.tensors import (
    EMULATED,
    DeviceMismatchError,
    SimulatedTensor,
    inner_of,
    is_host,
    on_device,
)

PAGE = 256
_ATTENTION = "varlen_attn"
PACKED = f"{_ATTENTION}, decode with query heads packed by group"
UNPACKED = f"{_ATTENTION}, decode with query heads apart"


def _values(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name."""
    arguments = func._schema.arguments
    names = [item.name for item in arguments]
    defaults = {item.name: item.default_value for item in arguments}
    return defaults | dict(zip(names, args, strict=False)) | kwargs


def _attention(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    values = _values(func, args, kwargs)
    _refuse_attention(values)
    query = values["query"]
    kv_heads = values["key"].shape[-2]
    DEVICE.launch(_ATTENTION)
    if values["max_q"] == 1 and query.shape[1] > kv_heads and values["block_table"] is not None:
        # FlashAttention 2 packs the query heads of a group where it knows of no window.
        is_packed = tuple(values["window_size"] or (-1, -1)) == (-1, -1)
        DEVICE.decoded[PACKED if is_packed else UNPACKED] += 1

    inner = {name: inner_of(value) for name, value in values.items()}
    out = torch.empty_like(inner["query"])

    def compute() -> Tensor:
        return out.copy_(_attend(inner, *(inner[name] for name in ("query", "key", "value"))))

    compute()
    if DEVICE.capturing is not None:
        DEVICE.capturing.add(compute, [], [out])
    sums = torch.zeros(query.shape[1], query.shape[0])
    state = torch.zeros(2, dtype=torch.uint64)
    return on_device(out), on_device(sums), on_device(state)


def _refuse_attention(values: dict[str, Any]) -> None:
    """Raise for what FlashAttention 2 does not take."""
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    if not all(isinstance(value, SimulatedTensor) for value in tensors):
        raise DeviceMismatchError(f"varlen_attn: a tensor is on the host at {place()}")
    query, key, value = (values[name] for name in ("query", "key", "value"))
    edges = [values[name] for name in ("cu_seq_q", "cu_seq_k")]
    table = values.get("block_table")
    problems = {
        "dtype": query.dtype not in (torch.bfloat16, torch.float16),
        "dtypes differ": key.dtype != query.dtype or value.dtype != query.dtype,
        "cumulative lengths are not int32": any(x.dtype != torch.int32 for x in edges),
        "cumulative lengths are not contiguous": not all(x.is_contiguous() for x in edges),
        "head_dim": query.shape[-1] % 8 != 0 or query.shape[-1] > 256,
        "strides": any(x.stride(-1) != 1 for x in (query, key, value)),
    }

    if table is not None:
        problems |= {
            "block_table is not int32": table.dtype != torch.int32,
            "block_table is not contiguous": table.stride(-1) != 1,
            "rows of block_table": table.shape[0] != len(edges[0]) - 1,
            "pages are not of 256 tokens": key.shape[1] % PAGE != 0,
            "seqused_k is missing": values.get("seqused_k") is None,
        }

    found = [problem for problem, is_there in problems.items() if is_there]
    if found:
        raise RuntimeError(f"FlashAttention does not take this: {found} at {place()}")


def _attend(inner: dict[str, Any], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of sequences laid end to end, in float32, [tokens, heads, head_dim]."""
    scale = inner.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    left, right = inner.get("window_size") or (-1, -1)
    outputs = []

    for rows, keys, values in _sequences(inner, query, key, value):
        groups = rows.shape[0] // keys.shape[0]
        keys = keys.repeat_interleave(groups, 0)
        values = values.repeat_interleave(groups, 0)
        row = torch.arange(rows.shape[1])[:, None] + keys.shape[1] - rows.shape[1]
        column = torch.arange(keys.shape[1])[None]
        seen = torch.ones(rows.shape[1], keys.shape[1], dtype=torch.bool)
        if right >= 0:
            seen &= column <= row + right
        if left >= 0:
            seen &= column >= row - left
        scores = (rows @ keys.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1))

    return torch.cat(outputs) if outputs else query.float()


def _sequences(
    inner: dict[str, Any], query: Tensor, key: Tensor, value: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of each sequence, [heads, tokens, head_dim] in float32."""
    table = inner.get("block_table")
    used = inner.get("seqused_k")
    starts = inner["cu_seq_q"].tolist()
    key_starts = inner["cu_seq_k"].tolist()

    for number, start in enumerate(starts[:-1]):
        if table is not None:
            length = int(used[number])
            pages = table[number, : -(-length // key.shape[1])].long()
            both = [x[pages].flatten(0, 1)[:length] for x in (key, value)]
        else:
            begin = key_starts[number]
            end = key_starts[number + 1] if used is None else begin + int(used[number])
            both = [x[begin:end] for x in (key, value)]
        rows = query[start : starts[number + 1]]
        keys, values = (x.float().transpose(0, 1) for x in both)
        yield rows.float().transpose(0, 1), keys, values


def _attention_backward(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    inner = {name: inner_of(value) for name, value in _values(func, args, kwargs).items()}
    DEVICE.launch("varlen_attn_backward")

    def gradients() -> tuple[Tensor, ...]:
        leaves = [inner[n].detach().float().requires_grad_() for n in ("query", "key", "value")]
        out = _attend({**inner, "seqused_k": None, "block_table": None}, *leaves)
        return torch.autograd.grad(out, leaves, inner["grad_out"].float())

    return tuple(on_device(g.to(inner["query"].dtype)) for g in _elsewhere(gradients))


class _Norm(torch.autograd.Function):
    """RMS norm, which a GPU computes in one kernel forward and one backward."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor | None, dims: int, eps: float) -> Tensor:
        DEVICE.launch("rms_norm")
        context.save_for_backward(x, weight)
        context.dims = dims
        context.eps = eps
        inner = x.inner
        gain = inner_of(weight)
        out = torch.empty_like(inner)

        def compute() -> Tensor:
            normed = inner.float() * _scale(inner, dims, eps)
            return out.copy_(normed if gain is None else normed * gain.float())

        compute()
        if DEVICE.capturing is not None:
            DEVICE.capturing.add(compute, [], [out])
        return on_device(out)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Any:
        DEVICE.launch("rms_norm_backward")
        x, weight = (inner_of(value) for value in context.saved_tensors)
        scale = _scale(x, context.dims, context.eps)
        axes = tuple(range(-context.dims, 0))
        slope = grad.inner.float()
        normed = x.float() * scale
        of_weight = None
        if weight is not None:
            of_weight = (slope * normed).flatten(0, -1 - context.dims).sum(0).to(weight.dtype)
            slope = slope * weight.float()
        of_x = scale * (slope - normed * (slope * normed).mean(axes, keepdim=True))
        found = None if of_weight is None else on_device(of_weight)
        return on_device(of_x.to(x.dtype)), found, None, None


def _scale(x: Tensor, dims: int, eps: float) -> Tensor:
    axes = tuple(range(-dims, 0))
    return torch.rsqrt(x.float().square().mean(axes, keepdim=True) + eps)


_real_norm = torch.nn.functional.rms_norm


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Stands for torch's function, which is made of several kernels in a build for CPUs."""
    if not isinstance(input, SimulatedTensor):
        return _real_norm(input, normalized_shape, weight, eps)
    if is_host(weight):
        raise DeviceMismatchError(f"the weight of a norm is on the host at {place()}")
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return _Norm.apply(input, weight, len(normalized_shape), eps)


@functools.cache
def _thread() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1)


def _elsewhere(call: Callable[[], Any]) -> Any:
    """Run where autograd works: below the dispatcher of this thread it does not."""
    return _thread().submit(call).result()


def _product(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A product in bfloat16 or float16 that is written, or added, to a float32 matrix."""
    name = func.overloadpacket.__name__
    values = _values(func, args, kwargs)
    ours = [value for value in values.values() if isinstance(value, Tensor)]
    if not all(isinstance(value, SimulatedTensor) for value in ours):
        raise DeviceMismatchError(f"{name}: a tensor is on the host at {place()}")
    *inputs, out = (value.inner for value in ours)
    first, second = inputs[-2:]
    narrow = (torch.bfloat16, torch.float16)
    if first.dtype != second.dtype or first.dtype not in narrow or out.dtype != torch.float32:
        raise RuntimeError(f"{name}: {first.dtype} and {second.dtype} to {out.dtype} at {place()}")
    DEVICE.launch(name)

    def compute(*inputs: Tensor) -> Tensor:
        *added, first, second = inputs
        return sum(added, first.float() @ second.float())

    out.copy_(compute(*inputs))
    if DEVICE.capturing is not None:
        DEVICE.capturing.add(DEVICE.capturing.later(compute, (inputs, {})), [out], [])
    return values["out"]


_real_attention = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stands for torch's function, which chooses a kernel in C++ by what the device has."""
    if not isinstance(query, SimulatedTensor):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return _real_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and not isinstance(attn_mask, SimulatedTensor):
        raise DeviceMismatchError(f"the mask of attention is on the host at {place()}")

    if enable_gqa and key.shape[-3] != query.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(groups, -3)
        value = value.repeat_interleave(groups, -3)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if is_causal:
        shape = scores.shape[-2:]
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return (scores.softmax(-1) @ value.float()).to(query.dtype)


def install() -> None:
    """Put the operators in place of torch's."""
    EMULATED[torch.ops.torch_attn._varlen_attn.default] = _attention
    EMULATED[torch.ops.torch_attn._varlen_attn_backward.default] = _attention_backward
    EMULATED[torch.ops.aten.mm.dtype_out] = _product
    EMULATED[torch.ops.aten.addmm.dtype_out] = _product
    torch.nn.functional.rms_norm = rms_norm
    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
