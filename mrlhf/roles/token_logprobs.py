"""Log-probabilities, entropy and KL of a pack's tokens, from logits that are split over ranks.

It knows the vocabulary and the temperature. It does not know models or losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from mrlhf.parallel.microbatch import Pack
from mrlhf.parallel.vocab import vocab_parallel_kl, vocab_parallel_logprobs
from mrlhf.training.engine import ModelEngine


@dataclass(frozen=True)
class TokenLogprobs:
    """Turns the logits of one language model into numbers for each selected token.

    Attributes:
        group: the tensor-parallel ranks that hold the shards of the logits.
        vocab_size: columns of the whole logits, without padding.
        temperature: divides the logits.
    """

    group: dist.ProcessGroup
    vocab_size: int
    temperature: float

    @staticmethod
    def of(engine: ModelEngine, temperature: float) -> TokenLogprobs:
        """For the logits of the model that `engine` holds."""
        return TokenLogprobs(engine.groups.tp, engine.spec.vocab_size, temperature)

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
        reference = ref_logits.to(logits.device)
        return vocab_parallel_kl(logits, reference, self.group, self.temperature, self.vocab_size)

    def _evaluate(
        self, logits: Tensor, pack: Pack, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return vocab_parallel_logprobs(
            logits,
            pack.targets.to(logits.device),
            self.group,
            self.temperature,
            self.vocab_size,
            with_entropy=with_entropy,
        )
