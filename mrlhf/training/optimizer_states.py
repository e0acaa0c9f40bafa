"""The main weights and moments of a torch optimizer: made, listed, and stepped in parts.

It knows neither the model nor where the tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from mrlhf.training.muon import MOMENTUM, Muon
from mrlhf.training.residency import STREAMED_BYTES

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTS = (*ADAM_MOMENTS, MOMENTUM)


def mains(inner: torch.optim.Optimizer) -> list[Tensor]:
    """The main weights of an inner optimizer."""
    return list(chain.from_iterable(group["params"] for group in inner.param_groups))


def states_of(inner: torch.optim.Optimizer, of: Sequence[Tensor]) -> list[Tensor]:
    """Main weights and their moments, if they have any yet."""
    found = []
    for main in of:
        state = inner.state.get(main, {})  # indexing would make an entry
        found += [main, *(state[name] for name in MOMENTS if name in state)]
    return found


def make_moments(inner: torch.optim.Optimizer, of: Sequence[Tensor], steps_taken: int) -> None:
    """Make moments of zeros for some main weights, as after `steps_taken` steps."""
    for main in of:
        is_matrix = isinstance(inner, Muon) and inner.is_matrix(main)
        names = (MOMENTUM,) if is_matrix else ADAM_MOMENTS
        state = {name: torch.zeros_like(main.data) for name in names}
        if isinstance(inner, torch.optim.AdamW) and not is_matrix:
            # Each parameter has a tensor of its own, since AdamW adds to it in place.
            state["step"] = torch.tensor(
                float(steps_taken), dtype=torch.float32, device=main.device
            )
        inner.state[main] = state


def parts(inner: torch.optim.Optimizer) -> list[list[Tensor]]:
    """The main weights in parts of at most `STREAMED_BYTES` with their moments, or one weight."""
    parts: list[list[Tensor]] = []
    room = 0
    for main in mains(inner):
        nbytes = (1 + len(ADAM_MOMENTS)) * main.numel() * main.dtype.itemsize
        if not parts or nbytes > room:
            parts.append([])
            room = STREAMED_BYTES
        parts[-1].append(main)
        room -= nbytes
    return parts
