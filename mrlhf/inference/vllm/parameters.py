"""The storage of vLLM's parameters, and how new weights get into them.

On a GPU each parameter is a tensor that stays where it is. On a CPU vLLM packs the weights of
linear layers and of experts for its matrix products and keeps no other copy. These weights are
stored here from `slots` or `bind` until `install`, which packs and forgets them. This file does not
know where weights come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from mrlhf.errors import EngineError
from mrlhf.inference.checks import check_complete, check_tensor
from mrlhf.inference.vllm import guards
from mrlhf.inference.vllm.pieces import repeated_rows, stack_of
from mrlhf.models.grouped_products import stacked
from mrlhf.models.parameters import keeps_float32
from mrlhf.weights.shard import Piece, Shape, Slot


class VllmParameters:
    """The parameters of a vLLM model on this rank, by vLLM's names.

    Here each expert of a layer has its own parameters; vLLM stacks them in one.

    Attributes:
        pieces: the named slices that each parameter holds.
    """

    def __init__(
        self,
        model: Any,
        pieces: Mapping[str, tuple[Piece, ...]],
        shapes: Mapping[str, Shape],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Compare vLLM's model with `pieces` and `shapes`; EngineError if its parameters differ."""
        self.pieces = dict(pieces)
        self._model = model
        self._shapes = shapes
        self._device = device
        self._dtype = dtype
        self._members = _members_of(pieces)
        self._new: dict[str, Tensor] = {}
        self._borrowed: set[str] = set()

        # The factor of a Gemma 4 layer is a buffer.
        buffers = {name: one for name, one in model.named_buffers() if name in self._members}
        named = dict(model.named_parameters()) | buffers
        if set(named) != set(self._members):
            odd = sorted(set(named) ^ set(self._members))
            raise EngineError(
                f"vLLM's model differs from ours in parameters {odd[:3]}; set "
                f"rollout.engine=native, or use vLLM 0.32"
            )
        packed = self._packed_names()
        for name, parameter in named.items():
            wanted = self._whole_shape(name)
            if name not in packed and tuple(parameter.shape) != wanted:
                raise EngineError(
                    f"vLLM's {name} is {list(parameter.shape)} and not {list(wanted)}; set "
                    f"rollout.engine=native"
                )

    def bind(self, name: str, tensor: Tensor) -> None:
        """Take the weights of `name` from `tensor` at the next `install`; EngineError if unfit."""
        # On a CPU `tensor` itself becomes the parameter, or is packed where vLLM packs it. On a GPU
        # it is copied: captured graphs and sleep mode rely on the parameter's place.
        check_tensor(name, tensor, self._shapes, self._dtype_of(name), self._device)
        self._new[name] = tensor.detach()
        self._borrowed.add(name)

    def slots(self) -> list[Slot]:
        """Return where each piece must be written; what vLLM packs gets storage until `install`."""
        packed = self._packed_names()
        for whole, members in self._members.items():
            missing = [name for name in members if name not in self._new]
            if not missing:
                continue
            storage = self._storage(whole, members, packed)
            parts = storage if stack_of(members[0]) else [storage]
            for name, part in zip(members, parts, strict=True):
                if name in missing:
                    # What nothing is written to is the first rank's alone.
                    self._new[name] = part if self.pieces[name] else part.zero_()
                    self._borrowed.discard(name)
        return [
            Slot(piece, self._new[name]) for name, pieces in self.pieces.items() for piece in pieces
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, packed or not."""
        return sum(math.prod(s) * self._dtype_of(name).itemsize for name, s in self._shapes.items())

    @property
    def missing(self) -> list[str]:
        """The parameters that got no new weights since the last `install`."""
        return [name for name in self.pieces if name not in self._new]

    @torch.no_grad()
    def install(self) -> None:
        """Give the new weights to the model; EngineError if a parameter has none."""
        check_complete(self.missing)
        for parameter, pieces in self.pieces.items():
            rows = repeated_rows(pieces)
            if rows:
                self._new[parameter][-rows:] = self._new[parameter][-2 * rows : -rows]

        for prefix, module in self._model.named_modules():
            tensors = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
            own = [name for name, _ in chain(*tensors)]
            own = [name for name in own if self._has_new(f"{prefix}.{name}")]
            for name in own:
                members = self._members[f"{prefix}.{name}"]
                new = [self._new.pop(member) for member in members]
                self._place(module, name, stacked(new) if stack_of(members[0]) else new[0])
            if own and self._device.type == "cpu":
                _pack(module)
        if self._device.type == "cpu":
            guards.repack_output_layer(self._model)

    def _has_new(self, whole: str) -> bool:
        return whole in self._members and self._members[whole][0] in self._new

    def _place(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Make `tensor` the parameter `name` of `module`, or copy it there."""
        parameter: Tensor = getattr(module, name)
        if parameter.data_ptr() == tensor.data_ptr() and tensor.numel():
            return
        if self._device.type == "cuda":
            parameter.copy_(tensor)
        elif _is_packed(module, parameter):
            dtype = _dtype_to_pack(module, tensor.dtype)
            setattr(module, name, nn.Parameter(tensor.to(dtype), requires_grad=False))
        else:
            parameter.data = tensor

    def _storage(self, whole: str, members: Sequence[str], packed: set[str]) -> Tensor:
        """Return vLLM's parameter `whole` itself if it can be written to; otherwise zeros."""
        stored: Tensor = attrgetter(whole)(self._model)
        dtype = self._dtype_of(members[0])
        fits = whole not in packed and stored.dtype == dtype
        if fits and (self._device.type == "cuda" or self._borrowed.isdisjoint(members)):
            return stored.detach()
        return torch.zeros(self._whole_shape(whole), dtype=dtype, device=self._device)

    def _packed_names(self) -> set[str]:
        """Return the parameters that vLLM keeps in its own arrangement."""
        if self._device.type != "cpu":
            return set()
        return {
            f"{prefix}.{name}"
            for prefix, module in self._model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
            if _is_packed(module, parameter)
        }

    def _whole_shape(self, whole: str) -> Shape:
        """Return the shape of vLLM's parameter."""
        members = self._members[whole]
        shape = self._shapes[members[0]]
        return (len(members), *shape) if stack_of(members[0]) else shape

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.float32 if keeps_float32(name) else self._dtype


def _members_of(names: Mapping[str, Any]) -> dict[str, list[str]]:
    """Map each of vLLM's parameters to ours in it: itself, or the experts that it stacks."""
    members: dict[str, list[str]] = {}
    for name in names:
        stack = stack_of(name)
        if stack is None:
            members[name] = [name]
        else:
            whole, number = stack
            before = members.setdefault(whole, [])
            assert number == len(before), f"{name} is out of order"
            before.append(name)
    return members


def _is_packed(module: nn.Module, parameter: Tensor) -> bool:
    """Whether vLLM, on a CPU, keeps the weights of `parameter` only in a packed copy."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    is_stack = isinstance(module, RoutedExperts) and parameter.dim() > 2  # not one of biases
    return is_stack or not parameter.numel()


def _pack(module: nn.Module) -> None:
    """Let vLLM, on a CPU, pack the module's new weights if it multiplies by them."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if isinstance(module, RoutedExperts):
        guards.pack_experts(module)
    elif isinstance(module, LinearBase | ParallelLMHead):
        module.quant_method.process_weights_after_loading(module)


def _dtype_to_pack(module: nn.Module, given: torch.dtype) -> torch.dtype:
    """Return the dtype in which vLLM multiplies by the weights; some routers have their own."""
    from vllm.model_executor.layers.linear import LinearBase

    dtype: torch.dtype = module.params_dtype if isinstance(module, LinearBase) else given
    return dtype
