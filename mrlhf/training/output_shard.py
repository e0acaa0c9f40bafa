"""A rank's shard of one model's output layer, as the layout of another model splits the vocabulary.

A loss that compares two distributions needs the same columns of both on each rank, whatever the
layout of the model that only gives hidden states.
"""

from __future__ import annotations

import torch

from mrlhf.errors import WeightError
from mrlhf.models.families import family_of
from mrlhf.models.weight_files import read_model
from mrlhf.parallel.collectives import together
from mrlhf.parallel.vocab import OutputLayer
from mrlhf.training.engine import ModelEngine
from mrlhf.training.residency import Residency
from mrlhf.weights.shard import Rule, Slot, pieces_of


class OutputShard:
    """The output layer of `engine`'s model on the ranks of the last stage of `student`.

    Columns that the student's vocabulary does not have are left out.
    """

    def __init__(self, engine: ModelEngine, student: ModelEngine, temperature: float) -> None:
        """Read the shard from the files of the model; every rank calls it.

        `temperature` divides the logits. A WeightError says that the files cannot be read.
        """
        groups = student.groups
        family = family_of(engine.spec)
        shapes = family.tensor_shapes(engine.spec)
        name = family.embedding if engine.spec.output_is_embedding else family.language_head
        vocabulary = student.spec.vocab_size
        rule = Rule((name,), 0, intervals=((0, vocabulary),))
        tp = groups.layout.tp
        rows = -(-vocabulary // tp) if groups.is_last_stage else 0
        self._weight = torch.zeros(
            (rows, engine.spec.hidden_size), dtype=engine.dtype, device=engine.device
        )
        with together(WeightError, groups.world):
            if groups.is_last_stage:
                pieces = pieces_of("output_layer.weight", rule, shapes, groups.tp.rank(), tp)
                slots = [Slot(piece, self._weight) for piece in pieces]
                read_model(engine.path, engine.spec, slots, needs_head=False)

        scale = 1.0 / (temperature * engine.spec.logits_divisor)
        more = (groups.tp, vocabulary, scale, engine.spec.logits_cap)
        self.layer = OutputLayer(self._weight, *more)
        self.residency = Residency(
            f"{engine.name}_output",
            {"params": lambda: [self._weight]},
            ["params"],
            engine.phases.memory,
            lambda: None,
        )
        self.residency.leave()
