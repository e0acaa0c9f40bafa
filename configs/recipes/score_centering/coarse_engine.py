"""Trains with PPO as `launch/train_ppo.py` does, with an engine whose weights are rounded.

Usage: torchrun --nproc-per-node=N configs/recipes/score_centering/coarse_engine.py BITS
    --config FILE ...

The engine's matrices are rounded to so many bits, with a scale for each row, every time it gets new
weights. The trainer's are not. It is for comparing; no key of a run does this.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any
from unittest.mock import patch

from torch import Tensor

from mrlhf.commands.train import ppo
from mrlhf.inference.native import engine


def rounded(weight: Tensor, bits: int) -> Tensor:
    """The weight [rows, columns], each row in steps of its largest number over 2^(bits - 1) - 1."""
    step = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return (weight / step).round() * step


def main() -> int:
    """Run the program; its exit code."""
    bits = int(sys.argv.pop(1))
    decoder = engine.Decoder

    def coarse(spec: Any, parameters: Any, *others: Any) -> Any:
        parameters = deepcopy(parameters)
        for slot in parameters.slots():
            if slot.parameter.dim() == 2:
                slot.parameter.copy_(rounded(slot.parameter, bits))
        return decoder(spec, parameters, *others)

    with patch.object(engine, "Decoder", coarse):
        return ppo()


if __name__ == "__main__":
    sys.exit(main())
