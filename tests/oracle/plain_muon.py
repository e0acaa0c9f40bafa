"""Muon in one process, by singular values and in float64; transformers names the matrices.

Newton-Schulz steps leave the singular vectors of a matrix as they are, and change each singular
value by a polynomial: this file computes just that. It shares no code with mrlhf.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
RMS = 0.2
STEPS = 5


def orthogonalise(matrix: Tensor) -> Tensor:
    """The matrix after five steps s <- 3.4445 s - 4.7750 s^3 + 2.0315 s^5, from norm 1."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(STEPS):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


def matrices_of(model: Any, name: str) -> Callable[[Tensor], list[Tensor]] | None:
    """How to see the matrices of hidden layers in a parameter; None if it holds none."""
    config = model.config
    last = name.removesuffix(".weight").rpartition(".")[2]
    # Those to the latent of attention, which all heads share, do not count.
    if not last.endswith("_proj") or last == "q_a_proj" or name.endswith(".bias"):
        return None
    if last == "qkv_proj":
        size = config.hidden_size // config.num_attention_heads
        kv = config.num_key_value_heads * size
        return lambda tensor: list(tensor.split([tensor.shape[0] - 2 * kv, kv, kv]))
    # Rows of gate and up alternate in gpt-oss, where they are one matrix to Muon.
    halves = 2 if last == "gate_up_proj" and config.model_type != "gpt_oss" else 1

    def see(tensor: Tensor) -> list[Tensor]:
        experts = [tensor] if tensor.dim() == 2 else list(tensor)
        return [half for matrix in experts for half in matrix.chunk(halves)]

    return see


class Muon:
    """Muon for the matrices of hidden layers, and another optimizer for the other parameters."""

    def __init__(
        self, model: Any, lr: float, weight_decay: float, make: Callable[[list[Any]], Any]
    ) -> None:
        """`make` takes the other parameters, and returns their optimizer."""
        self._lr = lr
        self._weight_decay = weight_decay
        self._matrices: list[tuple[Tensor, Callable[[Tensor], list[Tensor]], Tensor]] = []
        others = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            see = matrices_of(model, name)
            if see is None:
                others.append(parameter)
            else:
                self._matrices.append((parameter, see, torch.zeros_like(parameter)))
        self._others = make(others)

    def zero_grad(self) -> None:
        for parameter, _, _ in self._matrices:
            parameter.grad = None
        self._others.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self._others.step()
        for parameter, see, means in self._matrices:
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            means.copy_(MOMENTUM * means + (1 - MOMENTUM) * grad)
            nesterov = MOMENTUM * means + (1 - MOMENTUM) * grad
            for weight, update in zip(see(parameter), see(nesterov), strict=True):
                rate = self._lr * RMS * math.sqrt(max(weight.shape))
                moved = weight.double() * (1 - self._lr * self._weight_decay)
                weight.copy_(moved - rate * orthogonalise(update))
