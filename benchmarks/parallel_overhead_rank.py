"""One rank of `parallel_overhead.py`: it holds a model in each layout, and trains the one that it
is asked for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_overhead_case import PROMPT, Case, Layout, layouts, read_case, token_ids
from train_step_profile import ranges, seconds_by_category
from train_step_turns import Stopwatch, Turns

from mrlhf.config.roots import TrainedModelSection
from mrlhf.config.sections import OptimSection
from mrlhf.data.sft import SftExample
from mrlhf.device import Device, pick_device
from mrlhf.models.families import load_spec
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.job import init_distributed
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.trainers.sft import FineTuning
from mrlhf.training.engine import ModelEngine

TIMEOUT_S = 600.0


def main() -> None:
    """Answer the words `update:N` and `profile:N`, with N the number of a layout."""
    turns = Turns()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = pick_device("cpu", int(os.environ["RANK"]))
    init_distributed(device, TIMEOUT_S)

    directory = Path(sys.argv[1])
    case = read_case(directory)
    factory = GroupFactory(TIMEOUT_S)
    models = [
        _Model(layout, case, directory, factory, device)
        for layout in layouts(dist.get_world_size(), case)
    ]
    turns.answer({})

    for word in turns:
        kind, _, number = word.partition(":")
        model = models[int(number)]
        turns.answer(model.profile() if kind == "profile" else model.measure())
    dist.barrier()
    dist.destroy_process_group()


class _Model:
    """A model in one layout, with its optimizer, and the batch that it learns."""

    def __init__(
        self, layout: Layout, case: Case, directory: Path, factory: GroupFactory, device: Device
    ) -> None:
        keys = {"micro_batch_tokens": case.micro_batch_tokens, **layout.keys}
        section = TrainedModelSection(path=str(directory / layout.model), **keys)
        placed = ParallelLayout.for_world("model", dist.get_world_size(), AxisSizes.of(section))
        spec = load_spec(section.path, "lm")
        self._engine = ModelEngine(section, spec, factory.role_groups(placed), device)
        self._engine.initialise(seed=1)
        self._engine.attach_optimizer(OptimSection(), total_updates=1_000_000)

        mask = [0] * PROMPT + [1] * (case.length - PROMPT)
        examples = [SftExample(ids, mask) for ids in token_ids(case, spec.vocab_size)]
        self._task = FineTuning(examples, [])
        self._rows = range(case.sequences)
        self._vocab = spec.padded_vocab(section.tp) // section.tp

    def measure(self) -> dict[str, Any]:
        """Take one optimizer step together with all ranks; its seconds and its loss."""
        dist.barrier()
        watch = Stopwatch()
        metrics = self._step()
        return {"seconds": watch.read(), "loss": metrics["sft/loss"]}

    def profile(self) -> dict[str, float]:
        """Where the seconds of an optimizer step go, by category."""
        with ranges([self._engine]):
            dist.barrier()
            return seconds_by_category(self._step, self._vocab)

    def _step(self) -> dict[str, float]:
        return self._task.step(self._engine, self._rows)


if __name__ == "__main__":
    main()
