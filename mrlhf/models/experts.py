"""A mixture of experts: MLPs of which each token goes to those that the router chooses.

The experts of a layer are shared out over the expert-parallel ranks, and each may be split over
expert tensor-parallel ranks, which are neighbours among the tensor-parallel ranks. Tokens travel to
the ranks of their experts and back; none is dropped. This file does not know how experts are chosen
nor what stands around a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    linear_with_grad_accumulation_and_async_allreduce,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrlhf.models.kernels import gated
from mrlhf.models.router import Router, Routing
from mrlhf.models.spec import Experts
from mrlhf.parallel.packed_sequences import PackedSequences


class ExpertLinear(torch.nn.Module):
    """One matrix of one expert, or this rank's slice of it.

    Attributes:
        weight: [rows, columns].
        gradient_accumulation_fusion: whether the gradient is added to `weight.main_grad` as it is
            computed, as in megatron-core's linear layers.
    """

    def __init__(self, rows: int, columns: int, split: int, config: TransformerConfig) -> None:
        """Make a matrix of zeros.

        Args:
            rows: of the slice.
            columns: of the slice.
            split: the dimension along which the matrix is split.
            config: of the model.
        """
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns, dtype=config.params_dtype))
        # It is no other tensor-parallel rank's, so it counts in the norm of the gradient.
        set_tensor_model_parallel_attributes(self.weight, True, split, 1)
        # Its replicas are those of the expert, also where there is no expert parallelism.
        self.weight.allreduce = False  # type: ignore[attr-defined]
        self.gradient_accumulation_fusion = False

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, columns] to [tokens, rows]."""
        output: Tensor = linear_with_grad_accumulation_and_async_allreduce(
            x,
            self.weight,
            bias=None,
            gradient_accumulation_fusion=self.gradient_accumulation_fusion,
            allreduce_dgrad=False,
            sequence_parallel=False,
        )
        return output


class Expert(torch.nn.Module):
    """A gated MLP, or this rank's slice of it, whose outputs add up over the ranks."""

    def __init__(self, config: TransformerConfig, ffn_size: int) -> None:
        """Make an expert of this width on this rank."""
        super().__init__()
        self.linear_fc1 = ExpertLinear(2 * ffn_size, config.hidden_size, 0, config)
        self.linear_fc2 = ExpertLinear(config.hidden_size, ffn_size, 1, config)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] to [tokens, hidden]."""
        output: Tensor = self.linear_fc2(gated(self.linear_fc1(x)))
        return output


class SharedGate(torch.nn.Module):
    """The sigmoid of a linear layer with one row."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] to [..., 1]."""
        return F.linear(x, self.weight).sigmoid()


class Mixture(torch.nn.Module):
    """The MLP of a layer with experts.

    Attributes:
        router: chooses.
        experts: those of this rank, by their numbers.
        shared: the expert that all tokens go to; None: there is none.
        shared_gate: what its output is multiplied by; None: nothing.
    """

    def __init__(
        self,
        config: TransformerConfig,
        experts: Experts,
        shared: MLPSubmodules,
        groups: ProcessGroupCollection,
    ) -> None:
        """Make a mixture of zeros.

        Args:
            config: of the model.
            experts: the mixture.
            shared: what the shared expert is made of.
            groups: the process groups of the model.
        """
        super().__init__()
        self._groups = groups
        self._experts = experts
        self._sequence_parallel = config.sequence_parallel
        self.router = Router(config, experts, groups)

        held = experts.count // groups.ep.size()
        first = held * groups.ep.rank()
        ffn_size = experts.ffn_size // groups.expt_tp.size()
        self.experts = torch.nn.ModuleDict(
            {str(number): Expert(config, ffn_size) for number in range(first, first + held)}
        )

        self.shared: torch.nn.Module | None = None
        if experts.shared_ffn_size:
            # The second linear layer takes its width from the configuration.
            wide = copy(config)
            wide.ffn_hidden_size = experts.shared_ffn_size
            self.shared = MLP(
                wide, shared, ffn_hidden_size=wide.ffn_hidden_size, tp_group=groups.tp
            )
        self.shared_gate = SharedGate(config) if experts.shared_gate else None

    def forward(self, hidden: Tensor, packed: PackedSequences) -> tuple[Tensor, None]:
        """What the experts give, as megatron-core's MLP returns it: with no bias.

        Args:
            hidden: [tokens, 1, hidden], or this rank's part of the tokens under sequence
                parallelism.
            packed: the sequences of the pack.
        """
        tokens = hidden.squeeze(1)
        routing = self.router(tokens, packed)
        if self._sequence_parallel:
            output = self._of_parts(tokens, routing)
        elif self._groups.tp.size() > 1:
            output = self._of_copies(tokens, routing)
        else:
            output = self._routed(tokens, routing)

        output = output.unsqueeze(1)
        if self.shared is not None:
            shared, _ = self.shared(hidden)
            if self.shared_gate is not None:
                shared = self.shared_gate(hidden) * shared
            output = output + shared
        return output, None

    def _of_parts(self, tokens: Tensor, routing: Routing) -> Tensor:
        """The output for this rank's part of the tokens, as every tensor-parallel rank has one.

        The ranks that split an expert work on all of their parts.
        """
        group = self._groups.expt_tp
        if group.size() == 1:
            return self._routed(tokens, routing)
        tokens, experts, weights = (
            gather_from_sequence_parallel_region(part, group=group) for part in (tokens, *routing)
        )
        output = self._routed(tokens, Routing(experts, weights))
        return reduce_scatter_to_sequence_parallel_region(output, group=group)

    def _of_copies(self, tokens: Tensor, routing: Routing) -> Tensor:
        """The output for the tokens that all tensor-parallel ranks have.

        The ranks share them out, except that those that split an expert work on the same ones.
        """
        group = self._groups.tp
        split = self._groups.expt_tp.size()
        shares = group.size() // split
        share = group.rank() // split
        count = len(tokens)
        begin = count * share // shares
        end = count * (share + 1) // shares

        tokens = copy_to_tensor_model_parallel_region(tokens, group=group)
        weights = copy_to_tensor_model_parallel_region(routing.weights, group=group)
        own = Routing(routing.experts[begin:end], weights[begin:end])
        output = self._routed(tokens[begin:end], own)
        output = F.pad(output, (0, 0, begin, count - end))
        return reduce_from_tensor_model_parallel_region(output, group=group)

    def _routed(self, tokens: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of what the chosen experts give, [tokens, hidden]."""
        flat = routing.experts.flatten()
        order = flat.argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        counts = flat.bincount(minlength=self._experts.count)

        rows = _Copies.apply(tokens, order, places)
        if self._groups.ep.size() == 1:
            rows = self._compute(rows, counts.tolist())
        else:
            rows = self._travel(rows, counts)

        outputs = _Permuted.apply(rows, places, order)
        outputs = outputs.view(*routing.experts.shape, tokens.shape[1])
        weights = routing.weights.to(outputs.dtype).unsqueeze(1)
        return torch.bmm(weights, outputs).squeeze(1)

    def _travel(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows to the ranks of their experts, and get the outputs back.

        Args:
            rows: [rows, hidden], in the order of the experts.
            counts: int64 [experts], how many rows each expert gets from here.
        """
        group = self._groups.ep
        ranks = group.size()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        # [rank that they come from][expert of this rank]
        sizes = arriving.view(ranks, -1)
        sent = counts.view(ranks, -1).sum(dim=1).tolist()
        received = sizes.sum(dim=1).tolist()

        rows = all_to_all(group, rows, received, sent)
        rows = _regrouped(rows, sizes)
        rows = self._compute(rows, sizes.sum(dim=0).tolist())
        rows = _regrouped(rows, sizes.t())
        return all_to_all(group, rows, sent, received)

    def _compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Give each of this rank's experts its rows, which follow each other.

        An expert without rows takes part, so that its gradients are there too.
        """
        parts = zip(self.experts.values(), rows.split(list(counts)), strict=True)
        return torch.cat([expert(part) for expert, part in parts])


def _regrouped(rows: Tensor, sizes: Tensor) -> Tensor:
    """Rows that stand in the order of the rows of `sizes`, in the order of its columns.

    Args:
        rows: [sum of sizes, hidden].
        sizes: how many rows each part has.
    """
    parts = rows.split(sizes.flatten().tolist())
    numbers = torch.arange(len(parts)).view(sizes.shape).t().flatten().tolist()
    return torch.cat([parts[number] for number in numbers])


class _Copies(torch.autograd.Function):
    """Copies of each row, as many as it has experts, in a new order; the gradients are added up.

    They are added in the order of the copies, which indexing on a GPU would not promise.
    """

    @staticmethod
    def forward(context: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        context.save_for_backward(places)
        context.rows = len(rows)
        copies = len(order) // len(rows) if len(rows) else 1
        return rows.index_select(0, order // copies)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = context.saved_tensors
        in_order = grad.index_select(0, places)
        copies = len(places) // context.rows if context.rows else 1
        return in_order.view(context.rows, copies, grad.shape[1]).sum(dim=1), None, None


class _Permuted(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(context: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        context.save_for_backward(places)
        return rows.index_select(0, order)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = context.saved_tensors
        return grad.index_select(0, places), None, None
