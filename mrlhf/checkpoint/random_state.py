"""The state of this process's random number generators, as tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """The state of the generators of Python, numpy, torch and, if there is one, the GPU."""
    _, numbers, next_gauss = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_gauss": torch.tensor(
            [] if next_gauss is None else [next_gauss], dtype=torch.float64
        ),
        "numpy_keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Restore a state from `random_state`; a GPU's is left out where there is none."""
    next_gauss = state["python_gauss"].tolist()
    numbers = tuple(state["python"].tolist())
    random.setstate((3, numbers, next_gauss[0] if next_gauss else None))
    position, has_gauss, gauss = state["numpy_rest"].tolist()
    keys = state["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
