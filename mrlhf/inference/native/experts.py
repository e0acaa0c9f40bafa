"""The products of a mixture of experts: each token goes through the experts that it was given.

`HostExperts` use compiled kernels where the host can compile them; `TorchExperts` run on every
device. Their results agree to rounding. This file knows tensors, and no models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mrlhf.gpu.library import operator
from mrlhf.host import kernels
from mrlhf.host.kernels import Kernels, threads_for_products
from mrlhf.host.pages import read_often
from mrlhf.inference.native.linear import Factors, Linear, linear, panels, with_added
from mrlhf.models.grouped_products import ALIGNMENT, has_kernel, stacked
from mrlhf.models.ops import gated
from mrlhf.models.spec import Activation


class Matrices(NamedTuple):
    """A matrix of each expert, of which only `weights` are always there."""

    weights: Sequence[Tensor]
    # What adapters add to each of these, in the dtype of the products; None: nothing.
    factors: Sequence[Factors | None] = ()
    biases: Sequence[Tensor] = ()


class Stack(NamedTuple):
    """`Matrices` in few tensors, with a dimension of experts before the others."""

    weights: Tensor
    factors: Factors | None = None
    biases: Tensor | None = None


MatricesT = TypeVar("MatricesT", Matrices, Stack)


@dataclass(frozen=True)
class LocalExperts(Generic[MatricesT]):
    """The experts of one layer that this rank holds, whole or some columns of each."""

    first: int  # number in the layer; the others follow it
    # [2 * width, hidden] each: gate rows before up rows, or as the activation wants them
    fc1: MatricesT
    fc2: MatricesT  # [hidden, width] each
    activation: Activation = "silu"


Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The function (x, chosen, shares) -> the sum over a token's experts on this rank of share *
expert(x), shaped as x [tokens, hidden], in its dtype.

`chosen` are the numbers of the experts, int64 [tokens, per_token]; `shares` are the factors of
their outputs, float32 [tokens, per_token].
"""


Keep = Callable[[str, Tensor], Tensor]
"""The function (name, copy) -> the copy, where the last one of this name lay if graphs read it."""


class HostExperts:
    """Experts on compiled products, with copies of the weights in reading order."""

    def __init__(self, host: Kernels, experts: LocalExperts[Matrices], dtype: torch.dtype) -> None:
        """Lay the weights out; if `dtype`, that of `x`, is float32, they may be bfloat16."""
        weight = experts.fc1.weights[0]
        is_wide = weight.dtype == torch.float32
        self._mixture = host.mixture_of_float32 if is_wide else host.mixture_of_bfloat16
        self._dtype = dtype
        self._first = experts.first
        self._count = len(experts.fc1.weights)
        self._width = len(weight) // 2

        columns = host.panel_columns
        self._fc1 = _laid_out(experts.fc1.weights, partial(_gate_up_panels, columns=columns // 2))
        self._fc2 = _laid_out(experts.fc2.weights, partial(panels, columns=columns))

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """See `Experts`."""
        assert x.dtype == self._dtype and chosen.dtype == torch.int64, (x.dtype, chosen.dtype)
        assert shares.dtype == torch.float32, shares.dtype
        x, chosen, shares = (tensor.contiguous() for tensor in (x, chosen, shares))
        out = torch.empty_like(x)
        tokens, hidden = x.shape
        threads = threads_for_products(chosen.numel() * hidden * self._width)

        self._mixture(
            x, chosen, shares, self._fc1, self._fc2, out,
            tokens, hidden, self._width, chosen.shape[1], self._first, self._count, threads,
        )  # fmt: skip
        return out


class TorchExperts:
    """Experts on torch's operators.

    On a GPU, no pass of one token for each sequence waits for the host, so it can be captured.
    """

    def __init__(
        self, experts: LocalExperts[Matrices], dtype: torch.dtype, keep: Keep = lambda _, copy: copy
    ) -> None:
        """Stack the weights, without a copy if they lie one after another in `dtype`.

        What adapters add is given to `keep`, with a name.
        """
        fc1 = _in_stack(experts.fc1, dtype, keep, "fc1")
        fc2 = _in_stack(experts.fc2, dtype, keep, "fc2")
        self.stack = LocalExperts(experts.first, fc1, fc2, experts.activation)

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """See `Experts`."""
        fc1, fc2 = self.stack.fc1.weights, self.stack.fc2.weights
        if len(x) and has_kernel(x, *fc1.shape[1:], fc2.shape[-1]):
            return grouped(self.stack, x, chosen, shares)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return all_at_once(self.stack, x, chosen, shares)
        return one_by_one(self.stack, x, chosen, shares)


def make_experts(
    experts: LocalExperts[Matrices], dtype: torch.dtype, keep: Keep = lambda _, copy: copy
) -> Experts:
    """Return the fastest experts that this machine has for `dtype`; see `TorchExperts`."""
    on_host = experts.fc1.weights[0].device.type == "cpu"
    is_plain = experts.activation == "silu" and not experts.fc1.biases
    if on_host and (not is_plain or any((*experts.fc1.factors, *experts.fc2.factors))):
        return _experts_as_layers(experts, dtype)
    host = kernels.find(dtype) if on_host else None
    return TorchExperts(experts, dtype, keep) if host is None else HostExperts(host, experts, dtype)


def _experts_as_layers(experts: LocalExperts[Matrices], dtype: torch.dtype) -> Experts:
    """Return experts with adapters or biases on a host: one after another, as linear layers.

    The compiled mixture cannot add to its inner products, and has one activation. As in that, what
    a token gets does not depend on the others.
    """

    def layer(weight: Tensor, added: Factors | None, bias: Tensor | None) -> Linear:
        return with_added(linear(weight.to(dtype), None if bias is None else bias.to(dtype)), added)

    matrices = (experts.fc1, experts.fc2)
    fc1, fc2 = ([layer(*parts) for parts in zip_longest(*tensors)] for tensors in matrices)
    held = range(experts.first, experts.first + len(fc1))

    def compute(number: int, rows: Tensor) -> Tensor:
        return fc2[number](gated(fc1[number](rows), experts.activation))

    return partial(_in_turn, held, compute)


def one_by_one(experts: LocalExperts[Stack], x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Compute each expert in turn on its tokens; the host waits for their number."""

    def compute(number: int, rows: Tensor) -> Tensor:
        return _mlp(
            experts, lambda x, matrices: F.linear(x, matrices[number]), lambda b: b[number], rows
        )

    held = range(experts.first, experts.first + len(experts.fc1.weights))
    return _in_turn(held, compute, x, chosen, shares)


def _in_turn(
    held: range,
    compute: Callable[[int, Tensor], Tensor],
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
) -> Tensor:
    """Return what `Experts` says; `compute` takes the place of an expert in `held`, and rows."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place, number in enumerate(held):
        tokens, places = torch.where(chosen == number)
        if len(tokens):
            output = compute(place, x[tokens])
            out.index_add_(0, tokens, output.float() * shares[tokens, places][:, None])
    return out.to(x.dtype)


def _mlp(
    experts: LocalExperts[Stack],
    product: Callable[[Tensor, Tensor], Tensor],
    of_rows: Callable[[Tensor], Tensor],
    x: Tensor,
) -> Tensor:
    """Compute the gated MLPs; `product` multiplies with one or all matrices [experts, out, in].

    `of_rows` takes the biases [experts, out] to those of the rows of a product.
    """

    def layer(x: Tensor, matrices: Stack) -> Tensor:
        out = product(x, matrices.weights)
        if matrices.biases is not None:
            out.add_(of_rows(matrices.biases))
        added = matrices.factors
        return out if added is None else out.add_(product(product(x, added.first), added.second))

    return layer(gated(layer(x, experts.fc1), experts.activation), experts.fc2)


def all_at_once(experts: LocalExperts[Stack], x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Compute all experts on all tokens, if these are few: it reads all weights and never waits."""
    outputs = _mlp(
        experts,
        lambda x, matrices: torch.matmul(x, matrices.transpose(1, 2)),
        lambda biases: biases[:, None],
        x,
    )

    numbers = torch.arange(len(experts.fc1.weights), device=x.device) + experts.first
    is_chosen = chosen[..., None] == numbers
    weights = (shares[..., None] * is_chosen).sum(dim=1)
    return (outputs.float() * weights.t()[..., None]).sum(dim=0).to(x.dtype)


def grouped(experts: LocalExperts[Stack], x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Sort tokens by expert and use torch's grouped products; nothing waits for the host."""
    tokens, places, ends = _sort_by_expert(chosen, experts.first, len(experts.fc1.weights))
    rows = x.index_select(0, tokens)

    def of_rows(biases: Tensor) -> Tensor:
        numbers = torch.arange(len(rows), dtype=ends.dtype, device=rows.device)
        owners = torch.searchsorted(ends, numbers, right=True)
        return biases[owners.clamp(max=len(biases) - 1)]  # rows past the end are not used

    outputs = _mlp(
        experts, lambda x, m: F.grouped_mm(x, m.transpose(1, 2), offs=ends), of_rows, rows
    )
    return _join_experts(outputs, places, ends, shares)


def _sort_by_torch(chosen: Tensor, first: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`mrlhf.gpu.launch.sort_by_expert` on torch's operators."""
    local = chosen.flatten() - first
    local = torch.where((local >= 0) & (local < count), local, count)
    order = local.argsort(stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    numbers = torch.arange(count, device=order.device)
    ends = torch.searchsorted(local[order], numbers, right=True).to(torch.int32)
    return (order // chosen.shape[1]).to(torch.int32), places, ends


def _join_by_torch(outputs: Tensor, places: Tensor, ends: Tensor, shares: Tensor) -> Tensor:
    """`mrlhf.gpu.launch.join_experts` on torch's operators."""
    of_choices = outputs[places].masked_fill((places >= ends[-1])[:, None], 0)
    of_choices = of_choices.view(*shares.shape, -1).float()
    return (of_choices * shares[..., None]).sum(dim=1).to(outputs.dtype)


_sort_by_expert = operator(
    "sort_by_expert(Tensor chosen, int first, int count) -> (Tensor, Tensor, Tensor)",
    _sort_by_torch,
)
_join_experts = operator(
    "join_experts(Tensor outputs, Tensor places, Tensor ends, Tensor shares) -> Tensor",
    _join_by_torch,
)


def _in_stack(matrices: Matrices, dtype: torch.dtype, keep: Keep, name: str) -> Stack:
    biases = None
    if matrices.biases:
        whole = torch.stack([bias.to(dtype) for bias in matrices.biases])
        biases = keep(f"{name} biases", whole)
    weights = stacked(matrices.weights).to(dtype)
    return Stack(weights, _stacked_factors(matrices.factors, keep, name), biases)


def _stacked_factors(factors: Sequence[Factors | None], keep: Keep, name: str) -> Factors | None:
    """Stack the factors of all experts, with zeros up to a rank that grouped products take."""
    some = [each for each in factors if each is not None]
    if not some:
        return None
    most = max(len(each.first) for each in some)
    ranks = most + -most % ALIGNMENT
    nothing = Factors(some[0].first[:0], some[0].second[:, :0])
    every = [each or nothing for each in factors]
    first = [F.pad(each.first, (0, 0, 0, ranks - len(each.first))) for each in every]
    second = [F.pad(each.second, (0, ranks - len(each.first))) for each in every]
    return Factors(
        keep(f"{name} first", torch.stack(first)), keep(f"{name} second", torch.stack(second))
    )


def _gate_up_panels(weight: Tensor, columns: int) -> Tensor:
    """Rearrange a weight [2 * width, hidden] to [panels, hidden, gate and up, columns]."""
    return torch.stack([panels(half, columns) for half in weight.chunk(2)], dim=2)


def _laid_out(weights: Sequence[Tensor], arrange: Callable[[Tensor], Tensor]) -> Tensor:
    """Arrange each weight, and store the results in one tensor [weights, ...]."""
    out: Tensor | None = None
    for number, weight in enumerate(weights):
        arranged = arrange(weight)
        if out is None:
            out = read_often((len(weights), *arranged.shape), arranged.dtype)
        out[number].copy_(arranged)
    assert out is not None, "a layer without experts"
    return out
