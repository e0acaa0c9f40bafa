"""The reward model: a frozen classifier that scores whole responses, or their steps.

Of a whole response it scores the token that transformers' sequence classifiers score: the last one
that is not `pad_token_id` of the model's `config.json`, and the last one of all where that is null.
If a model pads with its end token, the token before the end is scored. This file does not know what
a score is used for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mrlhf.batch import Rollout, Sequences
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.packs import Pack
from mrlhf.rl.ensembles import combine_scores, spread_of
from mrlhf.rl.names import Combine
from mrlhf.training.engine import ModelEngine

logger = logging.getLogger(__name__)

_ANSWERS_AT_ONCE = 8192  # whose packs are in host memory together


class RewardModel:
    """Takes the output at the last token of a sequence, padding left out, as its score.

    Or that at each of the tokens `ends`, which end steps, https://arxiv.org/abs/2305.20050.
    """

    def __init__(
        self,
        members: Sequence[tuple[ModelEngine, Tensor]],
        combine: Combine = "mean",
        coefficient: float = 1.0,
        ends: Sequence[int] = (),
        answered: Sequence[tuple[list[int], list[int]]] = (),
        heads: Mapping[str, float] | None = None,
    ) -> None:
        """Take the model, or an ensemble and how its scores become one.

        Each member comes with the bias of its head, [outputs]. The mean score of `answered`, the
        tokens of prompts and of their reference answers, becomes 0. A member's score is its only
        number, or the sum of those that `heads` names, by their weights there.
        """
        self.engines = [engine for engine, _ in members]
        self.ends = torch.tensor(ends, dtype=torch.int32)
        self._members = members
        self._combine = combine
        self._coefficient = coefficient
        self._answered = answered
        self._heads = heads or {}
        # Each member's mean score of the reference answers, once it is measured. A checkpoint keeps
        # them, since another layout rounds otherwise.
        self.reference_means: list[float] | None = None

    def score(self, rollout: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """The score of each response, by its last context; float32 [batch] on every rank.

        Further numbers by name: those of each head that is named, the mean over the members of an
        ensemble, and the standard deviation of the members' scores, `std`.
        """
        sequences = self.engines[0].groups.machine.compute_on_leader(
            lambda: rollout.sequences().last_of_rows()
        )
        numbers = [
            self._chosen(engine, score_sequences(engine, sequences) + bias[:, None])
            for engine, bias in self._members
        ]
        further = dict(zip(self._heads, torch.stack(numbers).mean(0), strict=False))
        each = torch.stack([self._sum(chosen) for chosen in numbers])
        if self._answered:
            each -= torch.tensor(self._means_of_references())[:, None]
        if len(each) > 1:
            further["std"] = spread_of(each)
        return self._combined(each), further

    def _chosen(self, engine: ModelEngine, outputs: Tensor) -> Tensor:
        """The numbers of the heads that count, [outputs, ...] -> [heads, ...]."""
        return outputs[list(map(engine.spec.labels.index, self._heads))] if self._heads else outputs

    def _sum(self, chosen: Tensor) -> Tensor:
        """The weighted sum of a member's numbers, [heads, ...] -> [...]."""
        weights = torch.tensor([*self._heads.values()] or [1.0], dtype=torch.float64)
        return torch.tensordot(weights, chosen.double(), dims=1).float()

    def _means_of_references(self) -> list[float]:
        """Each member's mean score of the reference answers, which is measured once.

        It is the bias of InstructGPT, https://arxiv.org/abs/2203.02155, and of Stiennon et al.,
        https://arxiv.org/abs/2009.01325: one number for all prompts, not one for each.
        """
        if self.reference_means is None:
            means = []
            for engine, bias in self._members:
                parts = [score_sequences(engine, part) for part in self._reference_parts()]
                outputs = torch.cat(parts, dim=1) + bias[:, None]
                means.append(float(self._sum(self._chosen(engine, outputs)).double().mean()))
            self.reference_means = means
            shown = ", ".join(f"{mean:.4g}" for mean in means)
            logger.info("the mean score of the reference answers was %s, and is 0 now", shown)
        return self.reference_means

    def _reference_parts(self) -> Iterator[Sequences]:
        """The prompts with their reference answers, as many as are cut at once."""
        for begin in range(0, len(self._answered), _ANSWERS_AT_ONCE):
            some = self._answered[begin : begin + _ANSWERS_AT_ONCE]
            rows = [[*prompt, *answer] for prompt, answer in some]
            yield Sequences.of(rows, [len(prompt) for prompt, _ in some])

    def step_scores(self, rollout: Rollout) -> Tensor:
        """Each step's score at its last token, if drawn; else 0; float32 [batch, response_len]."""

        def longer() -> Sequences:
            # A longer prompt and one more token: the output before a column is that at its token.
            sequences = rollout.sequences()
            rows = [[*sequences[row].tolist(), 0] for row in range(len(sequences))]
            return replace(
                Sequences.of(rows, (sequences.prompt_lengths + 1).tolist()),
                width=sequences.width,
                rows=sequences.rows,
                columns=sequences.columns,
            )

        sequences = self.engines[0].groups.machine.compute_on_leader(longer)
        tables = []
        for engine, bias in self._members:
            packs = engine.cut(sequences, "response").packs
            outputs = _per_token(engine, packs, rollout.shape) + bias[:, None, None]
            tables.append(self._sum(self._chosen(engine, outputs)))
        ends = torch.isin(rollout.response_ids, self.ends) & rollout.loss_mask
        return self._combined(torch.stack(tables)) * ends

    def _combined(self, each: Tensor) -> Tensor:
        """One table of those of all members."""
        if len(each) == 1:
            return each[0]
        return combine_scores(self._combine, each, self._coefficient)


def score_sequences(
    engine: ModelEngine, sequences: Sequences, together: int | Sequence[int] = 1
) -> Tensor:
    """The numbers of each sequence, float32 [outputs, batch] on every rank's host.

    The engine's model has a scalar head. `together` is as in `cut_mini_batches`.
    """
    scored = engine.groups.machine.compute_on_leader(
        lambda: up_to_scored(sequences, engine.spec), shared=(sequences, sequences.token_ids)
    )
    cut = engine.cut(scored, "last", together=together)
    return _per_token(engine, cut.packs, (len(sequences), 1))[:, :, 0]


def _per_token(engine: ModelEngine, packs: Sequence[Pack], shape: tuple[int, int]) -> Tensor:
    """The model's numbers at every selected position, as `ModelEngine.per_token`."""
    return engine.per_token(packs, shape, lambda output, number: output.T, engine.spec.outputs)


def up_to_scored(sequences: Sequences, spec: ModelSpec) -> Sequences:
    """Each sequence up to the token that is scored, which is its first one if all are padding."""
    pad = spec.hf_config.get("pad_token_id")
    if pad is None:
        return sequences

    lengths = sequences.lengths.clone()
    padded = torch.arange(len(lengths))  # the sequences that may end with padding
    while len(padded):
        ends = sequences.begins[padded] + lengths[padded]
        padded = padded[(sequences.token_ids[ends - 1] == pad) & (lengths[padded] > 1)]
        lengths[padded] -= 1
    return replace(sequences, lengths=lengths)


def with_pad_token(spec: ModelSpec, pad_id: int, ids: Collection[int]) -> ModelSpec:
    """The spec of a reward model that is to be trained, with a padding token.

    Its own stays if the tokenizer, which has the tokens `ids`, knows it.
    """
    own = spec.hf_config.get("pad_token_id")
    if own in ids:
        return spec
    return replace(spec, hf_config={**spec.hf_config, "pad_token_id": pad_id})
