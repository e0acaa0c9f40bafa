"""One optimizer step of a plain loop: AdamW as torch has it, or Muon, and the gradient's norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.oracle.plain_muon import Muon

LR = 1e-2
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
# As large as many gradients here. With a small one, Adam would divide out how large a gradient is,
# and the rounding (1e-9) of a gradient near 0 would become a step of full length.
EPS = 1e-3


@dataclass(frozen=True)
class Outcome:
    """Metrics over all mini-batches of a loop, and the trained weights by Hugging Face name."""

    metrics: dict[str, float]
    weights: dict[str, Tensor]


def make_optimizer(model: Any, name: str = "adamw") -> Any:
    """AdamW, with weight decay for matrices alone, or Muon with AdamW for all else."""
    # A stack of the experts' biases has two dimensions, and no matrix in it.
    stacks = {id(p) for key, p in model.named_parameters() if key.endswith("_bias")}

    def adamw(parameters: list[Any]) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.dim() > 1 and id(p) not in stacks]
        vectors = [p for p in parameters if p.dim() == 1 or id(p) in stacks]
        groups = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)

    if name == "muon":
        return Muon(model, LR, WEIGHT_DECAY, adamw)
    return adamw(list(model.parameters()))


def differentiate(optimizer: Any, model: Any, loss: Tensor, clip_grad: float) -> float:
    """Compute the gradient of `loss` and clip it to a norm; 0 clips nothing.

    Returns:
        The norm of the whole gradient.
    """
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad or float("inf"))
    return norm.item()
