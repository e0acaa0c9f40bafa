"""The experts of a mixture on one rank, and how tokens get to the experts of other ranks.

The experts of a layer are shared out over the expert-parallel ranks. Rows travel to the ranks of
their experts and back with two all-to-all exchanges; none is dropped. This file does not know how
experts are chosen, nor how tokens are shared out over tensor-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    linear_with_grad_accumulation_and_async_allreduce,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrlhf.host.products import linear
from mrlhf.models.adapters import Adapters
from mrlhf.models.expert_choice import occurrences
from mrlhf.models.grouped_products import grouped_products, has_kernel, stacked
from mrlhf.models.linear import adapted
from mrlhf.models.ops import gated
from mrlhf.models.router import Routing
from mrlhf.models.spec import Experts

# The end of the name of a module within experts: an expert's number, and which matrix it is of.
_MATRIX = re.compile(r"(?:^|\.)(\d+)(?:\.linear_fc([12])(?:\..*)?)?$")


class ExpertMatrix(torch.nn.Module):
    """One matrix of one expert, or this rank's slice of it, with an optional bias.

    Attributes:
        weight: [rows, columns].
        bias: [rows]; None: there is none.
        gradient_accumulation_fusion: whether the gradient is added to `weight.main_grad` as it is
            computed, as in megatron-core's linear layers.
    """

    def __init__(
        self, rows: int, columns: int, split: int, config: TransformerConfig, sharers: int | None
    ) -> None:
        """Make a slice of zeros of a matrix that is split along dimension `split`.

        `sharers` is the number of ranks that split it, or None if it has no bias.
        """
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns, dtype=config.params_dtype))
        # No other tensor-parallel rank counts it in the norm of the gradient.
        set_tensor_model_parallel_attributes(self.weight, True, split, 1)
        # Its replicas are those of the expert, also where there is no expert parallelism.
        self.weight.allreduce = False  # type: ignore[attr-defined]
        self.bias: torch.nn.Parameter | None = None
        # The outputs of a matrix with split columns add up over the ranks, each with its part.
        self._bias_part = 1.0
        if sharers is not None:
            self.bias = torch.nn.Parameter(torch.zeros(rows, dtype=config.params_dtype))
            self.bias.allreduce = False  # type: ignore[attr-defined]
            if split == 0:
                set_tensor_model_parallel_attributes(self.bias, True, 0, 1)
            else:
                self._bias_part = 1.0 / sharers
        self.gradient_accumulation_fusion = False
        self.adapters: Adapters | None = None

    def forward(self) -> Tensor:
        """Return the matrix; a hook that waits for the weight runs before this."""
        return self.weight

    def product(self, x: Tensor) -> Tensor:
        """Multiply x [tokens, columns] to [tokens, rows], with what adapters add."""
        weight = self()
        if weight.requires_grad:
            output = linear_with_grad_accumulation_and_async_allreduce(
                x,
                weight,
                bias=None,
                gradient_accumulation_fusion=self.gradient_accumulation_fusion,
                allreduce_dgrad=False,
                sequence_parallel=False,
            )
        else:
            output = linear(x, weight)
        output = adapted(output, self.adapters, x)
        return output if self.bias is None else output + self.added_bias()

    def added_bias(self) -> Tensor:
        """This rank's part of the bias, whose gradient is that of the whole bias.

        The ranks that split the columns get the same gradient of their output, which is a part of a
        sum, so each computes the whole gradient of the bias.
        """
        assert self.bias is not None
        if self._bias_part == 1.0:
            return self.bias
        return self.bias - (1 - self._bias_part) * self.bias.detach()


class Expert(torch.nn.Module):
    """A gated MLP, or this rank's slice of it, whose outputs add up over the ranks."""

    def __init__(self, config: TransformerConfig, experts: Experts, ranks: int) -> None:
        """Make the slice of one of `ranks` that split each of the `experts`."""
        super().__init__()
        ffn_size = experts.ffn_size // ranks
        sharers = ranks if experts.has_biases else None
        self.activation = experts.activation
        self.linear_fc1 = ExpertMatrix(2 * ffn_size, config.hidden_size, 0, config, sharers)
        self.linear_fc2 = ExpertMatrix(config.hidden_size, ffn_size, 1, config, sharers)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [tokens, hidden] to [tokens, hidden]."""
        return self.linear_fc2.product(gated(self.linear_fc1.product(x), self.activation))


class RoutedExperts(torch.nn.ModuleDict):
    """The experts of this rank, by their numbers in the mixture."""

    def __init__(
        self, config: TransformerConfig, experts: Experts, groups: ProcessGroupCollection
    ) -> None:
        held = experts.count // groups.ep.size()
        first = held * groups.ep.rank()
        ranks = groups.expt_tp.size()
        super().__init__(
            {str(number): Expert(config, experts, ranks) for number in range(first, first + held)}
        )
        self._count = experts.count
        self._group = groups.ep

    def named_modules(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        """Name the first matrices of all experts before the second ones, and the last expert first.

        megatron-core's buffers hold parameters in the reverse order, so that there too the matrices
        lie in a row. The adapters of a matrix follow it.
        """

        def place(named: tuple[str, Any]) -> tuple[bool, int]:
            found = _MATRIX.search(named[0])
            return (False, 0) if found is None else (found[2] == "2", -int(found[1]))

        yield from sorted(super().named_modules(*arguments, **options), key=place)

    def _apply(self, function: Any, recurse: bool = True) -> RoutedExperts:
        """Apply `function` as any module does, then lay matrices in a row: see `stacked`."""
        super()._apply(function, recurse)
        for name in ("linear_fc1.weight", "linear_fc2.weight"):
            weights = [expert.get_parameter(name) for expert in self.values()]
            rows = stacked([weight.detach() for weight in weights])
            for weight, row in zip(weights, rows, strict=True):
                weight.data = row
        return self

    def forward(self, tokens: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for `tokens` [tokens, hidden]."""
        flat = routing.experts.flatten()
        order = flat.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        counts = occurrences(flat, self._count)

        rows = _Copies.apply(tokens, order, places)
        if self._group.size() == 1:
            rows = self._compute(rows, counts, counts)
        else:
            rows = self._compute_where_experts_are(rows, counts)

        outputs = _Permuted.apply(rows, places, order)
        outputs = outputs.view(*routing.experts.shape, tokens.shape[1])
        weights = routing.weights.to(outputs.dtype).unsqueeze(1)
        return torch.bmm(weights, outputs).squeeze(1)

    def _compute_where_experts_are(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows to the ranks of their experts, and get the outputs back in their order.

        `rows` [rows, hidden] are in the order of all experts; `counts`, int64 [experts], says how
        many rows each expert gets from this rank.
        """
        ranks = self._group.size()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        # In one copy: the rows for each rank and its experts; those from each rank and for ours.
        leaving, sizes = torch.stack([counts, arriving]).cpu().view(2, ranks, -1)
        sent = leaving.sum(dim=1).tolist()
        received = sizes.sum(dim=1).tolist()

        rows = all_to_all(self._group, rows, received, sent)
        rows = _regrouped(rows, sizes)
        rows = self._compute(rows, arriving.view(ranks, -1).sum(dim=0), sizes.sum(dim=0))
        rows = _regrouped(rows, sizes.t())
        back: Tensor = all_to_all(self._group, rows, sent, received)
        return back

    def _compute(self, rows: Tensor, counts: Tensor, on_host: Tensor) -> Tensor:
        """Give each expert its consecutive rows; `counts` says how many.

        An expert without rows takes part, so that its gradients exist too. `on_host` are the counts
        on the host, if they are there, and otherwise `counts`.
        """
        experts: list[Expert] = list(self.values())  # type: ignore[arg-type]
        width, hidden = experts[0].linear_fc1.weight.shape
        ranks = _adapter_ranks(experts[0])
        if has_kernel(rows, hidden, width // 2, *ranks):
            ends = counts.cumsum(dim=0).int()
            inner = _grouped([expert.linear_fc1 for expert in experts], rows, ends)
            inner = gated(inner, experts[0].activation)
            return _grouped([expert.linear_fc2 for expert in experts], inner, ends)

        parts = zip(experts, rows.split(on_host.tolist()), strict=True)
        return torch.cat([expert(part) for expert, part in parts])


def _grouped(matrices: Sequence[ExpertMatrix], rows: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by the matrix of its expert, with what that expert's adapters add."""
    output = grouped_products(rows, ends, [matrix() for matrix in matrices])
    if matrices[0].bias is not None:
        biases = torch.stack([matrix.added_bias() for matrix in matrices])
        output = output + _owners(ends, len(rows)).to(output.dtype) @ biases
    first = matrices[0].adapters
    if first is None or not first.is_on:
        return output

    outputs = {}
    for name in first:
        adapters = [
            matrix.adapters.each[name] for matrix in matrices if matrix.adapters is not None
        ]
        firsts, seconds = zip(*(adapter() for adapter in adapters), strict=True)
        inner = grouped_products(rows, ends, firsts)
        outputs[name] = grouped_products(inner * adapters[0].scale, ends, seconds)
    return output + first.in_place(outputs)


def _owners(ends: Tensor, rows: int) -> Tensor:
    """Whether each of `rows` sorted rows is of each group, bool [rows, groups].

    A product with it has gradients whose sums do not depend on the order in which threads run.
    """
    numbers = torch.arange(rows, device=ends.device)[:, None]
    return (numbers < ends) & (numbers >= F.pad(ends[:-1], (1, 0)))


def _adapter_ranks(expert: Expert) -> list[int]:
    """Return the rank of each adapter of an expert; those of all experts of a layer are alike."""
    matrices = (expert.linear_fc1, expert.linear_fc2)
    return [
        len(adapter.lora_A)
        for matrix in matrices
        if matrix.adapters is not None
        for adapter in matrix.adapters.each.values()
    ]


def _regrouped(rows: Tensor, sizes: Tensor) -> Tensor:
    """Reorder parts of `rows`, whose numbers are the host's table `sizes`, column by column."""
    parts = rows.split(sizes.flatten().tolist())
    numbers = torch.arange(len(parts)).view(sizes.shape).t().flatten().tolist()
    return torch.cat([parts[number] for number in numbers])


class _Copies(torch.autograd.Function):
    """Copies of each row, one for each of its experts, in a new order; the gradients are added up.

    They are added in the order of the copies, which indexing on a GPU would not promise.
    """

    @staticmethod
    def forward(context: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        copies = len(order) // max(len(rows), 1)
        context.save_for_backward(places)
        context.shape = (len(rows), copies, rows.shape[1])
        return rows.index_select(0, order // max(copies, 1))

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = context.saved_tensors
        return grad.index_select(0, places).view(context.shape).sum(dim=1), None, None


class _Permuted(torch.autograd.Function):
    """Rows in another order; `back` is the order that undoes it."""

    @staticmethod
    def forward(context: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        context.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = context.saved_tensors
        return grad.index_select(0, back), None, None
