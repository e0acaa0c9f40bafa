"""Low-rank adapters of a rank's linear layers as modules: scale * B A x, to be added to W x.

The factor on the side that tensor parallelism splits is split too, so only [tokens, rank] numbers
travel between the ranks of a dense layer: A x of a layer with split rows is gathered (sequence
parallelism), or its gradient is summed; A x of a layer with split columns is summed. The other
factor is whole on every rank, and so is its gradient. But under sequence parallelism each rank sees
its own tokens: megatron-core then sums that gradient over the ranks, as it does for norms.

Nothing travels for an expert: each of its ranks has a part of a sum, of the output and of the
gradient of the input. So the gradient of a whole factor is a part of a sum as well, which
`training` adds up once a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from mrlhf.host.products import linear
from mrlhf.models.lora import adapted_layers, adapter_rules
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Rule, Shape, local_shape


@dataclass(frozen=True)
class SplitRanks:
    """The ranks that split a linear layer."""

    group: dist.ProcessGroup
    sequence_parallel: bool  # whether each has its own tokens outside of the layer
    of_expert: bool  # whether they split an expert's layer


class Adapter(torch.nn.Module):
    """The factors of one linear layer, or this rank's slices: [rank, in] and [out, rank]."""

    def __init__(self, scale: float, a_shape: Shape, b_shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A = torch.nn.Parameter(torch.zeros(a_shape, dtype=dtype))
        self.lora_B = torch.nn.Parameter(torch.zeros(b_shape, dtype=dtype))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the factors A and B."""
        # Only a call tells megatron-core that they are about to be read: with the optimizer split,
        # it may still be gathering them.
        return self.lora_A, self.lora_B


class Adapters(torch.nn.ModuleDict):
    """The adapters of the linear layers that one parameter holds, by the ends of their names.

    Attributes:
        is_on: whether they are added; the base model is that with all of them off.
        of_expert: whether the layer is an expert's.
    """

    def __init__(
        self, adapters: Mapping[str, Adapter], split_dim: int | None, ranks: SplitRanks
    ) -> None:
        """`split_dim` is the dimension along which ranks split the layer, if they do."""
        super().__init__(adapters)
        self.is_on = True
        self.of_expert = ranks.of_expert
        self._group = ranks.group
        self._sequence_parallel = ranks.sequence_parallel
        self._communicates = ranks.group.size() > 1 and not ranks.of_expert

        for adapter in adapters.values():
            self._mark(adapter.lora_A, split_dim == 1, ranks)
            self._mark(adapter.lora_B, split_dim == 0, ranks)

    @staticmethod
    def _mark(factor: torch.nn.Parameter, is_split: bool, ranks: SplitRanks) -> None:
        """Tell megatron-core, and `training`, which ranks' gradients are added up."""
        if is_split:
            # Other ranks have other numbers, all of which count in the norm of the gradient.
            set_tensor_model_parallel_attributes(factor, True, 0, 1)
        elif not ranks.of_expert:
            factor.sequence_parallel = ranks.sequence_parallel  # type: ignore[attr-defined]
        if ranks.of_expert:
            factor.allreduce = False  # type: ignore[attr-defined]
            factor.is_partial = not is_split  # type: ignore[attr-defined]

    @property
    def each(self) -> dict[str, Adapter]:
        """The adapters by name."""
        return dict(self.items())  # type: ignore[arg-type]

    @property
    def only(self) -> Adapter:
        """The adapter, if the parameter holds one layer."""
        (adapter,) = self.each.values()
        return adapter

    def in_place(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Put what is added to each layer, [..., out], where the parameter has the layer's rows."""
        (output,) = outputs.values()
        return output

    def added_to_weight(self) -> Tensor:
        """Return scale * B A of this rank's part of the parameter, float32 [rows, columns]."""
        columns = {}
        for name, adapter in self.each.items():
            product = adapter.lora_B.float() @ adapter.lora_A.float()
            columns[name] = (product * adapter.scale).t()
        return self.in_place(columns).t()


class WholeAdapters(Adapters):
    """That of a layer which every rank holds whole; a router's is computed in float32."""

    def __init__(self, adapters: Mapping[str, Adapter], ranks: SplitRanks) -> None:
        super().__init__(adapters, None, ranks)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to what is added to the output, [..., out] in the dtype of x."""
        first, second = self.only()
        inner = _product(x, first.to(x.dtype))
        return _product(inner * self.only.scale, second.to(x.dtype))


class RowAdapters(Adapters):
    """Those of a parameter whose rows are split.

    The rows are in `periods`, each of which holds a block of rows of every layer.
    """

    def __init__(
        self,
        adapters: Mapping[str, Adapter],
        ranks: SplitRanks,
        periods: int,
        blocks: Mapping[str, int],
    ) -> None:
        """`blocks` are the rows of a period that each layer of the parameter has, by its name."""
        super().__init__(adapters, 0, ranks)
        self._periods = periods
        self._blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] to what is added to this rank's rows of the output, [..., out]."""
        first, second = zip(*(adapter() for adapter in self.each.values()), strict=True)
        inner = _product(x, first[0] if len(first) == 1 else torch.cat(first))
        if self._communicates and self._sequence_parallel:
            inner = gather_from_sequence_parallel_region(
                inner, tensor_parallel_output_grad=True, group=self._group
            )
        elif self._communicates:
            inner = copy_to_tensor_model_parallel_region(inner, group=self._group)

        outputs = {}
        parts = inner.split([len(factor) for factor in first], dim=-1)
        for (name, adapter), part, factor in zip(self.each.items(), parts, second, strict=True):
            outputs[name] = _product(part * adapter.scale, factor)
        return self.in_place(outputs)

    def in_place(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """Put the rows of each layer in their blocks; layers without adapters get zeros."""
        if len(self._blocks) == 1:
            return super().in_place(outputs)
        like = next(iter(outputs.values()))
        parts = []
        for name, rows in self._blocks.items():
            if name in outputs:
                parts.append(outputs[name].unflatten(-1, (self._periods, rows)))
            else:
                parts.append(like.new_zeros(*like.shape[:-1], self._periods, rows))
        return torch.cat(parts, dim=-1).flatten(-2)


class ColumnAdapters(Adapters):
    """That of a parameter whose columns are split; such a parameter holds one layer."""

    def __init__(self, adapters: Mapping[str, Adapter], ranks: SplitRanks) -> None:
        super().__init__(adapters, 1, ranks)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in of the rank] to what is added to the ranks' sum, [..., out].

        For an expert it is this rank's part of that.
        """
        first, second = self.only()
        inner = _product(x, first)
        if self._communicates and self._sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self._group)
        elif self._communicates:
            inner = reduce_from_tensor_model_parallel_region(inner, group=self._group)
        return _product(inner * self.only.scale, second)


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply x [..., in] by a matrix [out, in]."""
    # Torch's own product of more than two dimensions takes other ways with a gradient than without,
    # which round differently: the first ratio of an update would not be 1.
    flat = linear(x.reshape(-1, x.shape[-1]).contiguous(), matrix)
    return flat.view(*x.shape[:-1], len(matrix))


def make_adapters(
    spec: ModelSpec,
    shapes: Mapping[str, Shape],
    parameter: str,
    rule: Rule,
    ranks: SplitRanks,
    dtype: torch.dtype,
) -> Adapters | None:
    """Return the adapters of a weight of a chunk, with zeros; None if it has none.

    `shapes` are those of all tensors of the model.
    """
    layers = adapted_layers(spec, rule, shapes)
    if not layers:
        return None
    assert spec.lora is not None
    size = ranks.group.size()
    cuts = iter(adapter_rules(spec, shapes, parameter, rule).values())
    adapters = {}
    for layer in layers:
        a_shape = local_shape(next(cuts), shapes, size)
        b_shape = local_shape(next(cuts), shapes, size)
        adapters[_last(layer)] = Adapter(spec.lora.scale_of(layer), a_shape, b_shape, dtype)

    if rule.dim is None:
        return WholeAdapters(adapters, ranks)
    if rule.dim == 1:
        return ColumnAdapters(adapters, ranks)
    periods, rows = rule.blocks(shapes, size)
    blocks: dict[str, int] = {}  # the blocks of a tensor follow one another in a period
    for name, count in zip(rule.names, rows, strict=True):
        layer = _last(name.removesuffix(".weight"))
        blocks[layer] = blocks.get(layer, 0) + count
    return RowAdapters(adapters, ranks, periods, blocks)


def _last(layer: str) -> str:
    return layer.rpartition(".")[2]
