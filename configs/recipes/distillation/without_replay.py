"""Trains with PPO as `launch/train_ppo.py` does, without the record of what could be drawn.

Usage: torchrun --nproc-per-node=N configs/recipes/distillation/without_replay.py
    [--engine-renormalises] --config FILE ...

With `rollout.top_p` or `rollout.top_k` the trainer then computes probabilities among all tokens, as
if none had been cut off. The engine does so too, or gives those among the tokens that it kept, as
engines with "processed" log-probabilities do. It is for comparing; no key of a run does this.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from mrlhf.commands.train import ppo
from mrlhf.inference.base import SamplingParams
from mrlhf.rollout import generator
from mrlhf.trainers.ppo import setup

RENORMALISES = "--engine-renormalises"


def main() -> int:
    """Run the program; its exit code."""
    whole = setup.training_sampling

    def unrecorded(*arguments: Any) -> SamplingParams:
        return replace(whole(*arguments), record_masks=False)

    if RENORMALISES in sys.argv:
        sys.argv.remove(RENORMALISES)
        changed = patch.object(generator, "_masks", lambda *_: None)
    else:
        changed = patch.object(setup, "training_sampling", unrecorded)
    with changed:
        return ppo()


if __name__ == "__main__":
    sys.exit(main())
