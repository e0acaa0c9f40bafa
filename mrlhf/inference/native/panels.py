"""Weights in panels: the order in which compiled products read them (`mrlhf/compiled/panels.h`).

This file knows matrices, and no layer.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def panels(weight: Tensor, columns: int) -> Tensor:
    """A weight [out, in] as [panels, in, columns]; the last panel is filled up with zeros."""
    filled = F.pad(weight, (0, 0, 0, -len(weight) % columns))
    return filled.unflatten(0, (-1, columns)).transpose(1, 2)
