"""Reward-model training on responses that were compared, or to which people gave numbers.

The formula of pairs is that of `score_loss`. This file knows the metrics; the loop is in
`supervised`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.pair_losses import RewardLossSection
from mrlhf.config.roots import RewardModelConfig
from mrlhf.data.preferences import PreferenceRows
from mrlhf.device import send
from mrlhf.inputs import read_row_inputs
from mrlhf.metrics.tally import Tally
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.models.families import with_labels
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.parallel.packs import gather_rows
from mrlhf.rl.preference import ScoreLossOptions, score_loss
from mrlhf.roles.reward_model import score_sequences, up_to_scored, with_pad_token
from mrlhf.run.startup import start
from mrlhf.trainers.reward_quality import fit_of, quality_of, score_moments, words_on_length
from mrlhf.trainers.supervised import SupervisedTask, SupervisedTrainer
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import Loss, PackResult

Measured = dict[str, tuple[Tensor, Tensor | float]]
"""Sums over some rows by name, each with the number of what it sums over."""


def train_reward_model(config: RewardModelConfig) -> None:
    """Train a reward model as configured; every rank calls it."""
    # Bad input is refused before the output directory is touched.
    inputs = read_row_inputs(config)
    with start(config) as run:
        task = PreferenceLearning(config.rm, inputs.examples, inputs.held_out)
        tokenizer = inputs.tokenizer
        stored = with_labels(spec_of_role(config.model, "scalar"), config.rm.target_column)
        spec = with_pad_token(stored, tokenizer.pad_id, tokenizer.ids)
        trainer = SupervisedTrainer(config, inputs, run, spec, task)
        run.begin()
        trainer.fit()


class PreferenceLearning(SupervisedTask[PreferenceRows]):
    """Learns to score the better of each two responses of a row higher, or to score as people do.

    The first is for pairs and rankings, the second for single responses with numbers.
    """

    name = "rm"

    def __init__(
        self, section: RewardLossSection, train: PreferenceRows, held_out: PreferenceRows | None
    ) -> None:
        """Take the loss, the training rows, and the validation rows, if there are any."""
        super().__init__(train, held_out)
        threshold = 0.0 if section.tie_column is None else section.tie_threshold
        self._options = ScoreLossOptions(section.centring, section.label_smoothing, threshold)
        self._columns = section.target_column

    def _loss_on(
        self, engine: ModelEngine, rows: Sequence[int]
    ) -> tuple[Sequences, BatchCut, Loss]:
        """The loss is the mean over the rows, or over all numbers that they give."""
        sequences = up_to_scored(self._train.sequences(rows), engine.spec)
        sizes = self._train.sizes(rows)
        cut = engine.cut(sequences, "last", together=sizes)
        owners = [place for place, size in enumerate(sizes) for _ in range(size)]
        numbers = self._train.losses(rows)

        def loss(output: Tensor, number: int) -> tuple[Tensor, PackResult]:
            pack = cut.packs[number]
            # The last tokens of a row's responses may lie on two ranks.
            scores = gather_rows(output.float().T, pack, engine.groups.cp)
            of_pack = [rows[place] for place in dict.fromkeys(owners[row] for row in pack.rows)]
            measured = self._measure(self._train, of_pack, scores)

            tally = Tally()
            if pack.segments.rank == 0:  # the other ranks that share the rows have the same loss
                for name, (total, count) in measured.items():
                    tally.add(f"rm/{name}", total, count)
            return measured["loss"][0] / numbers, PackResult(tally)

        return sequences, cut, loss

    def validate(self, engine: ModelEngine) -> dict[str, float]:
        """Loss on the held-out rows, and what `quality_of` says of the scores."""
        data = self._held_out
        if data is None:
            return {}
        every = range(len(data))
        scores = score_sequences(engine, data.sequences(every), together=data.sizes(every))
        total, count = self._measure(data, every, scores)["loss"]
        metrics = {"val/loss": float(total / count)}
        if data.targets is not None:
            return metrics | fit_of(self._columns, scores, data.targets.T)
        lengths = [len(ids) for responses in data.responses for ids in responses]
        quality = quality_of(data.compared(every), scores[0], lengths)
        return metrics | score_moments(scores[0]) | quality

    def summary(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """`rm_pair_accuracy`, or the error, on the held-out rows; else those of the last step.

        Rows of ties alone have no accuracy.
        """
        kind = "val" if self.has_held_out else "rm"
        if self._train.targets is not None:
            return {"rm_squared_error": metrics[f"{kind}/loss"]}
        length = words_on_length(metrics)
        accuracy = metrics[f"{kind}/accuracy"]
        told = {} if math.isnan(accuracy) else {"rm_pair_accuracy": accuracy}
        return told if length is None else {**told, "rm_length": length}

    def _measure(self, data: PreferenceRows, rows: Sequence[int], scores: Tensor) -> Measured:
        """The loss of these rows and what is told of it; `scores` [heads, responses] are theirs."""
        if data.targets is not None:
            wanted = send(data.targets[list(rows)].T.contiguous(), scores.device)
            errors = torch.where(wanted.isnan(), 0.0, scores - wanted)
            return {"loss": (errors.square().sum(), data.losses(rows))}

        pairs = data.compared(rows)
        table = torch.tensor([astuple(pair) for pair in pairs], dtype=torch.float32)
        columns = send(table.view(-1, 5).T.contiguous(), scores.device)
        better, worse, margins, ties, shares = columns
        both = scores[0][torch.stack([better, worse], dim=1).long()]
        losses = score_loss(both, margins, self._options, None if data.ties is None else ties > 0)

        differences = both[:, 0] - both[:, 1]
        decided = 1 - ties
        measured: Measured = {
            "loss": ((losses * shares).sum(), len(rows)),
            "accuracy": (((differences > 0) * decided).sum(), decided.sum()),
            "margin": ((differences * decided).sum(), decided.sum()),
        }
        if self._options.centring:
            measured["centring"] = (both.sum(dim=1).square().sum(), len(pairs))
        return measured
