"""Training of a policy on preference pairs against a frozen reference: DPO, and the other losses of
`rl.preference`.

It knows how pairs are fed to the loss. The formulas are in `rl`, the loop is in `supervised`, and
the reference's log-probabilities come from `reference_logprobs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.pair_losses import DPOSection
from mrlhf.config.roots import DPOConfig
from mrlhf.data.preferences import PreferenceRows
from mrlhf.inputs import read_row_inputs
from mrlhf.metrics.tally import Tally, standard_errors
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.parallel.packs import Pack
from mrlhf.rl.preference import PairLogprobs, PairLossOptions, measure_pairs
from mrlhf.roles.response_logprobs import ResponseLogprobs
from mrlhf.run.startup import start
from mrlhf.trainers.reference_logprobs import reference_logprobs
from mrlhf.trainers.supervised import SupervisedTask, SupervisedTrainer
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import Loss, PackResult


def train_dpo(config: DPOConfig) -> None:
    """Train a policy on preference pairs as configured; every rank calls it."""
    # Bad input is refused before the output directory is touched.
    inputs = read_row_inputs(config)
    with start(config) as run:
        data = [inputs.examples, inputs.held_out] if inputs.held_out else [inputs.examples]
        starts_adapted = config.reference.adapter == "start"
        reference = config.model if starts_adapted else config.reference
        tables = reference_logprobs(reference, run, data, config.seed)
        scored = [ScoredPairs(*both) for both in zip(data, tables, strict=True)]

        held_out = scored[1] if inputs.held_out else None
        task = PreferenceOptimization(config.dpo, scored[0], held_out)
        spec = spec_of_role(config.model, "lm")
        trainer = SupervisedTrainer(config, inputs, run, spec, task)
        run.begin()
        trainer.fit()


@dataclass(frozen=True)
class ScoredPairs:
    """Preference pairs with the reference's log-probabilities.

    `reference` is float64 [pairs, 2], one number for each whole response, the chosen ones first.
    """

    pairs: PreferenceRows
    reference: Tensor

    def __post_init__(self) -> None:
        assert self.reference.shape == (len(self.pairs), 2), self.reference.shape

    def __len__(self) -> int:
        return len(self.pairs)

    def seen(self, rows: Sequence[int], policy: Tensor) -> PairLogprobs:
        """The log-probabilities of these pairs for a loss; `policy` is float64 [rows, 2]."""
        sides = self.pairs.responses
        prompts = self.pairs.prompt_lengths
        tokens = [[len(ids) - prompts[row] for ids in sides[row]] for row in rows]
        return PairLogprobs(
            policy,
            self.reference[list(rows)].to(policy.device),
            torch.tensor(tokens, dtype=torch.int64, device=policy.device).view(-1, 2),
        )


class PreferenceOptimization(SupervisedTask[ScoredPairs]):
    """Learns to prefer the chosen response of each pair by more than the reference does."""

    name = "dpo"

    def __init__(
        self, section: DPOSection, train: ScoredPairs, held_out: ScoredPairs | None
    ) -> None:
        """Take the loss, the training pairs, and the validation pairs, if there are any."""
        super().__init__(train, held_out)
        self._loss_type = section.loss_type
        self._options = PairLossOptions(section.beta, section.label_smoothing)

    def _loss_on(
        self, engine: ModelEngine, rows: Sequence[int]
    ) -> tuple[Sequences, BatchCut, Loss]:
        """The metrics of `measure_pairs`, averaged over the pairs, are named `dpo/<name>`."""
        responses = ResponseLogprobs(engine)
        sequences = self._train.pairs.sequences(rows)
        cut = engine.cut(sequences, "response", together=2)

        def loss(hidden: Tensor, number: int) -> tuple[Tensor, PackResult]:
            pack = cut.packs[number]
            tally = Tally()

            def objective(of_pack: slice, logprobs: Tensor) -> Tensor:
                pairs = [rows[row // 2] for row in pack.rows[of_pack][::2]]
                return self._objective(pairs, logprobs.view(-1, 2), pack, tally)

            total = responses.loss(hidden, pack, objective, together=2)
            return total / len(rows), PackResult(tally)

        return sequences, cut, loss

    def validate(self, engine: ModelEngine) -> dict[str, float]:
        """Under `val/`, the means over the held-out pairs of what `measure_pairs` gives."""
        if self._held_out is None:
            return {}
        logprobs = ResponseLogprobs(engine).of_pairs(self._held_out.pairs)
        seen = self._held_out.seen(range(len(logprobs)), logprobs)
        measured = measure_pairs(self._loss_type, seen, self._options)
        means = {f"val/{name}": float(each.double().mean()) for name, each in measured.items()}
        return means | standard_errors({"val/rewards/accuracies": measured["rewards/accuracies"]})

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Pair accuracy and margin on the held-out pairs; without them, those of the last step."""
        kind = "dpo" if self._held_out is None else "val"
        return {
            "dpo_pair_accuracy": metrics[f"{kind}/rewards/accuracies"],
            "dpo_margin": metrics[f"{kind}/rewards/margins"],
        }

    def _objective(self, rows: Sequence[int], logprobs: Tensor, pack: Pack, tally: Tally) -> Tensor:
        """The summed losses of a pack's pairs, by float64 [rows, 2]; `tally` counts them."""
        seen = self._train.seen(rows, logprobs)
        measured = measure_pairs(self._loss_type, seen, self._options)
        if pack.segments.rank == 0:  # the other ranks that share the pairs have the same numbers
            for name, each in measured.items():
                tally.add(f"dpo/{name}", each.sum(), len(each))
        return measured["loss"].sum()
