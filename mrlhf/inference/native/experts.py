"""The products of a mixture of experts: each token goes through the experts that it was given.

`HostExperts` use compiled kernels, on a host that can compile them. `TorchExperts` run on every
device. Their results agree to rounding. In float32 a `WholeMixture` has norm and router in the same
compiled call. This file knows tensors, and no models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.compiled.library import SUFFIXES, functions_of, load_library, threads_for
from mrlhf.inference.native.host_memory import read_often
from mrlhf.inference.native.panels import panels
from mrlhf.inference.native.router import HostRouter
from mrlhf.inference.stacks import stacked
from mrlhf.models.grouped_products import has_kernel

SOURCE = Path(__file__).with_name("experts.cpp")
_SIGNATURE = "pppppp iiiiii n"
_WHOLE = "ppppp i n"
_MULTIPLICATIONS = 4  # so many cost as much as one number of an elementwise function


@dataclass(frozen=True)
class LocalExperts:
    """The experts of one layer that this rank holds, and of each all columns or some.

    Attributes:
        first: the number of the first of them in the layer; the others follow it.
        fc1: for each the weight [2 * width, hidden]: all gate rows before all up rows.
        fc2: for each the weight [hidden, width].
    """

    first: int
    fc1: Sequence[Tensor]
    fc2: Sequence[Tensor]


@dataclass(frozen=True)
class ExpertStack:
    """The same in two tensors.

    Attributes:
        first: the number of the first of them in the layer.
        fc1: [experts, 2 * width, hidden].
        fc2: [experts, hidden, width].
    """

    first: int
    fc1: Tensor
    fc2: Tensor


class Experts(Protocol):
    """What the experts of one layer do."""

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The sum over the chosen experts of share * expert(x); those of other ranks add nothing.

        Args:
            x: [tokens, hidden].
            chosen: the numbers of the experts of each token, int64 [tokens, per_token].
            shares: what the output of each is multiplied by, float32 [tokens, per_token].

        Returns:
            [tokens, hidden], in the dtype of `x`.
        """


class HostExperts:
    """Experts on compiled kernels, with copies of the weights in the order of reading."""

    def __init__(self, library: ctypes.CDLL, experts: LocalExperts, dtype: torch.dtype) -> None:
        """Lay the weights out.

        Args:
            library: `experts.cpp`.
            experts: weights on the host.
            dtype: that of what goes in and comes out. If it is float32, weights may be bfloat16.
        """
        weight = experts.fc1[0]
        name = f"mixture_of_{SUFFIXES[weight.dtype]}"
        self._mixture: Any = functions_of(library, {name: _SIGNATURE}, dtype)[name]
        self._library = library
        self._dtype = dtype
        self._weight_dtype = weight.dtype
        self._first = experts.first
        self._count = len(experts.fc1)
        self._width = len(weight) // 2

        lanes = library.lanes_of_a_panel()
        self._fc1 = _laid_out(experts.fc1, partial(_gate_up_panels, lanes=lanes))
        self._fc2 = _laid_out(experts.fc2, partial(panels, columns=2 * lanes))

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The sum over the chosen experts of share * expert(x), as `Experts` says."""
        assert x.dtype == self._dtype and chosen.dtype == torch.int64, (x.dtype, chosen.dtype)
        assert shares.dtype == torch.float32, shares.dtype
        x, chosen, shares = (tensor.contiguous() for tensor in (x, chosen, shares))
        out = torch.empty_like(x)
        tokens, hidden = x.shape
        threads = threads_for(chosen.numel() * hidden * self._width // _MULTIPLICATIONS)

        self._mixture(
            x.data_ptr(), chosen.data_ptr(), shares.data_ptr(),
            self._fc1.data_ptr(), self._fc2.data_ptr(), out.data_ptr(),
            tokens, hidden, self._width, chosen.shape[1], self._first, self._count, threads,
        )  # fmt: skip
        return out

    def whole_layer(self, router: HostRouter, norm: Tensor | None, eps: float) -> WholeMixture:
        """These experts with the router and the norm before them, in float32.

        Args:
            router: of the layer.
            norm: its weight, [hidden]; None for no norm.
            eps: added to the mean square in it.
        """
        assert self._dtype == torch.float32, self._dtype
        name = f"whole_mixture_of_{SUFFIXES[self._weight_dtype]}"
        function = functions_of(self._library, {name: _WHOLE}, self._dtype)[name]
        part = MixturePart(
            norm=None if norm is None else norm.data_ptr(),
            route=ctypes.cast(router.route, ctypes.c_void_p),
            router=ctypes.addressof(router.part),
            fc1=self._fc1.data_ptr(),
            fc2=self._fc2.data_ptr(),
            hidden=router.part.logits.size,
            width=self._width,
            per_token=router.part.per_token,
            first=self._first,
            count=self._count,
            eps=eps,
        )
        return WholeMixture(function, part, (self, router, norm))


class MixturePart(ctypes.Structure):
    """The mixture of one layer for compiled code, as in `experts.cpp`."""

    _fields_ = (
        ("norm", ctypes.c_void_p),
        ("route", ctypes.c_void_p),
        ("router", ctypes.c_void_p),
        ("fc1", ctypes.c_void_p),
        ("fc2", ctypes.c_void_p),
        ("hidden", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("per_token", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("eps", ctypes.c_float),
    )


class WholeMixture:
    """Norm, router and experts of one layer in one compiled call, in float32 on a host."""

    def __init__(self, function: Any, part: MixturePart, memory: object) -> None:
        """Keep the call; `memory` owns what `part` points at."""
        self._function = function
        self._part = part
        self._memory = memory

    def __call__(self, hidden: Tensor, delta: Tensor | None, choices: list[Tensor]) -> Tensor:
        """Add `delta` to `hidden` in place, and return what the mixture makes of the sum.

        The chosen experts, int64 [tokens, per_token], are appended to `choices`.
        """
        tokens = hidden.shape[0]
        out = torch.empty_like(hidden)
        chosen = torch.empty((tokens, self._part.per_token), dtype=torch.int64)
        addend = None if delta is None else delta.data_ptr()
        self._function(
            ctypes.addressof(self._part), hidden.data_ptr(), addend, chosen.data_ptr(),
            out.data_ptr(), tokens, torch.get_num_threads(),
        )  # fmt: skip
        choices.append(chosen)
        return out


class TorchExperts:
    """The same as `HostExperts` on torch's operators.

    On a GPU no pass of one token for each sequence waits for the host, so that it can be captured.
    """

    def __init__(self, experts: LocalExperts, dtype: torch.dtype) -> None:
        """Stack the weights; those that lie one after another in `dtype` stay where they are."""
        self._stack = ExpertStack(
            experts.first, stacked(experts.fc1).to(dtype), stacked(experts.fc2).to(dtype)
        )

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The sum over the chosen experts of share * expert(x), as `Experts` says."""
        if len(x) and has_kernel(x, *self._stack.fc1.shape[1:], self._stack.fc2.shape[-1]):
            return grouped(self._stack, x, chosen, shares)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return all_at_once(self._stack, x, chosen, shares)
        return one_by_one(self._stack, x, chosen, shares)


def make_experts(experts: LocalExperts, dtype: torch.dtype) -> Experts:
    """The fastest way that this machine has to compute experts in `dtype`."""
    on_host = experts.fc1[0].device.type == "cpu"
    library = _library() if on_host and dtype in SUFFIXES else None
    return TorchExperts(experts, dtype) if library is None else HostExperts(library, experts, dtype)


@cache
def _library() -> ctypes.CDLL | None:
    return load_library(SOURCE, "the engine's mixture of experts")


def one_by_one(experts: ExpertStack, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Each expert in turn, with the tokens that go to it; the host waits for their number."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for number, (fc1, fc2) in enumerate(zip(experts.fc1, experts.fc2, strict=True)):
        tokens, places = torch.where(chosen == experts.first + number)
        if len(tokens):
            output = F.linear(_gated(F.linear(x[tokens], fc1)), fc2)
            out.index_add_(0, tokens, output.float() * shares[tokens, places][:, None])
    return out.to(x.dtype)


def all_at_once(experts: ExpertStack, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """All experts with all tokens, for few tokens: all weights are read, and nothing waits."""
    inner = _gated(torch.matmul(x, experts.fc1.transpose(1, 2)))
    outputs = torch.matmul(inner, experts.fc2.transpose(1, 2))

    numbers = torch.arange(len(experts.fc1), device=x.device) + experts.first
    is_chosen = chosen[..., None] == numbers
    weights = (shares[..., None] * is_chosen).sum(dim=1)
    return (outputs.float() * weights.t()[..., None]).sum(dim=0).to(x.dtype)


def grouped(experts: ExpertStack, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Tokens sorted by expert, and torch's grouped products; nothing waits for the host."""
    count = len(experts.fc1)
    local = chosen.flatten() - experts.first
    is_here = (local >= 0) & (local < count)
    local = torch.where(is_here, local, count)

    # Those of other ranks come last, after the end of the last group.
    order = local.argsort(stable=True)
    numbers = torch.arange(count, device=x.device)
    ends = torch.searchsorted(local[order], numbers, right=True).to(torch.int32)
    rows = x[order // chosen.shape[1]]
    inner = _gated(F.grouped_mm(rows, experts.fc1.transpose(1, 2), offs=ends))
    outputs = F.grouped_mm(inner, experts.fc2.transpose(1, 2), offs=ends)

    by_token = torch.empty_like(outputs)
    by_token[order] = outputs
    by_token = by_token.masked_fill(~is_here[:, None], 0).view(*chosen.shape, -1)
    return (by_token.float() * shares[..., None]).sum(dim=1).to(x.dtype)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gate_up_panels(weight: Tensor, lanes: int) -> Tensor:
    """A weight [2 * width, hidden] as [panels, hidden, gate and up, lanes]."""
    return torch.stack([panels(half, lanes) for half in weight.chunk(2)], dim=2)


def _laid_out(weights: Sequence[Tensor], arrange: Callable[[Tensor], Tensor]) -> Tensor:
    """What `arrange` makes of each weight, in one tensor [weights, ...]."""
    out: Tensor | None = None
    for number, weight in enumerate(weights):
        arranged = arrange(weight)
        if out is None:
            out = read_often((len(weights), *arranged.shape), arranged.dtype)
        out[number].copy_(arranged)
    assert out is not None, "a layer without experts"
    return out
