"""Log-probabilities, entropy and KL of a pack's tokens, from logits that are split over ranks.

It does not know losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mrlhf.parallel.packs import Pack
from mrlhf.parallel.vocab import (
    vocab_parallel_kl,
    vocab_parallel_logprobs,
    vocab_parallel_sum_of_squares,
)
from mrlhf.training.engine import ModelEngine


@dataclass(frozen=True)
class TokenLogprobs:
    """Turns the logits of one language model into numbers for each selected token.

    Attributes:
        engine: holds the model.
        temperature: divides the logits.
    """

    engine: ModelEngine
    temperature: float

    def of_batch(self, packs: Sequence[Pack], shape: tuple[int, int]) -> Tensor:
        """Run the model, and take the log-probability of each target token of the whole batch.

        Args:
            packs: this rank's share of the batch.
            shape: batch and width of the table.

        Returns:
            float32 [batch, width] on the host of every rank, 0 where no token is selected.
        """

        def evaluate(logits: Tensor, number: int) -> Tensor:
            return self(logits, packs[number])[None]

        return self.engine.per_token(packs, shape, evaluate)[0]

    def __call__(self, logits: Tensor, pack: Pack) -> Tensor:
        """The log-probability of each target token of the pack.

        Args:
            logits: [selected, vocab_shard], at the pack's selected positions.
            pack: names the target tokens.

        Returns:
            float32 [selected].
        """
        return self._evaluate(logits, pack, with_entropy=False)[0]

    def with_entropy(self, logits: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
        """The log-probability and the entropy (nats) at each selected position; two [selected]."""
        logprobs, entropy = self._evaluate(logits, pack, with_entropy=True)
        assert entropy is not None
        return logprobs, entropy

    def full_kl(self, logits: Tensor, ref_logits: Tensor) -> Tensor:
        """KL(policy || reference) over the whole vocabulary, [selected].

        Args:
            logits: [selected, vocab_shard], of the policy.
            ref_logits: the same positions and columns, of the reference; on any device.
        """
        return vocab_parallel_kl(
            logits,
            ref_logits.to(logits.device),
            self.engine.groups.tp,
            self.temperature,
            self.engine.spec.vocab_size,
        )

    def sum_of_squares(self, logits: Tensor) -> Tensor:
        """The sum of the squared probabilities of the vocabulary at each position, [selected].

        Args:
            logits: [selected, vocab_shard], at a pack's selected positions.
        """
        return vocab_parallel_sum_of_squares(
            logits, self.engine.groups.tp, self.temperature, self.engine.spec.vocab_size
        )

    def _evaluate(
        self, logits: Tensor, pack: Pack, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return vocab_parallel_logprobs(
            logits,
            pack.targets,
            self.engine.groups.tp,
            self.temperature,
            self.engine.spec.vocab_size,
            with_entropy=with_entropy,
        )
