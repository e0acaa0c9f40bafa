"""Where vLLM's parameters are stored, and how new weights get into them.

On a GPU each parameter is a tensor that stays where it is. On a CPU vLLM packs the weights of
linear layers for its matrix products and keeps no other copy. These weights are stored here from
`slots` or `bind` until `install`, which packs and forgets them. This file does not know where
weights come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mrlhf.errors import EngineError
from mrlhf.inference.checks import check_complete, check_tensor
from mrlhf.inference.vllm import guards
from mrlhf.weights.shard import Piece, Shape, Slot


class VllmParameters:
    """The parameters of a vLLM model on this rank, by vLLM's names.

    Attributes:
        pieces: which named slices each parameter holds.
    """

    def __init__(
        self,
        model: Any,
        pieces: Mapping[str, tuple[Piece, ...]],
        shapes: Mapping[str, Shape],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Compare the model with what we expect; nothing is allocated.

        Args:
            model: the model that vLLM has built.
            pieces: the named slices that each parameter should hold.
            shapes: the shape that each parameter should have.
            device: where the parameters are.
            dtype: the dtype of the parameters.

        Raises:
            EngineError: the model has other parameters than `pieces`, or other shapes.
        """
        self.pieces = dict(pieces)
        self._model = model
        self._shapes = shapes
        self._device = device
        self._dtype = dtype
        self._new: dict[str, Tensor] = {}
        self._borrowed: set[str] = set()

        named = dict(model.named_parameters())
        if set(named) != set(pieces):
            odd = sorted(set(named) ^ set(pieces))
            raise EngineError(
                f"vLLM's model differs from ours in parameters {odd[:3]}; set "
                f"rollout.engine=native, or use vLLM 0.32"
            )
        for name, parameter in named.items():
            if parameter.numel() and tuple(parameter.shape) != shapes[name]:
                raise EngineError(
                    f"vLLM's {name} is {list(parameter.shape)} and not {list(shapes[name])}; set "
                    f"rollout.engine=native"
                )

    def bind(self, name: str, tensor: Tensor) -> None:
        """Take the weights of `name` from `tensor` at the next `install`.

        On a CPU `tensor` itself becomes the parameter, or is packed where vLLM packs it. On a GPU
        it is copied: captured graphs and sleep mode rely on the parameter's place.

        Raises:
            EngineError: there is no such parameter, or the tensor does not fit it.
        """
        check_tensor(name, tensor, self._shapes, self._dtype, self._device)
        self._new[name] = tensor.detach()
        self._borrowed.add(name)

    def slots(self) -> list[Slot]:
        """Where each piece is to be written.

        A parameter that vLLM packs gets storage until `install`, in which padding rows are zero.
        """
        for name in self.missing:
            stored: Tensor = self._model.get_parameter(name)
            fits = tuple(stored.shape) == self._shapes[name] and stored.dtype == self._dtype
            if fits and (self._device.type == "cuda" or name not in self._borrowed):
                self._new[name] = stored.detach()
            else:
                self._new[name] = torch.zeros(
                    self._shapes[name], dtype=self._dtype, device=self._device
                )
                self._borrowed.discard(name)
        return [
            Slot(piece, self._new[name]) for name, pieces in self.pieces.items() for piece in pieces
        ]

    @property
    def missing(self) -> list[str]:
        """The parameters that got no new weights since the last `install`."""
        return [name for name in self.pieces if name not in self._new]

    @torch.no_grad()
    def install(self) -> None:
        """Make the new weights the model's, and forget what was stored for that.

        Raises:
            EngineError: a parameter has no new weights.
        """
        check_complete(self.missing)

        for prefix, module in self._model.named_modules():
            own = [f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)]
            own = [name for name in own if name in self._new]
            for name in own:
                self._place(module, name.rpartition(".")[2], self._new.pop(name))
            if own and self._device.type == "cpu" and _is_packed(module):
                module.quant_method.process_weights_after_loading(module)
        if self._device.type == "cpu":
            guards.repack_output_layer(self._model)

    def _place(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Make `tensor` the parameter `name` of `module`, or copy it there."""
        parameter = module.get_parameter(name)
        if parameter.data_ptr() == tensor.data_ptr() and tensor.numel():
            return
        if self._device.type == "cuda":
            parameter.copy_(tensor)
        elif parameter.numel():
            parameter.data = tensor
        else:
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))


def _is_packed(module: nn.Module) -> bool:
    """Whether vLLM multiplies by a packed copy of the module's weight; embeddings have none."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(module, LinearBase | ParallelLMHead)
