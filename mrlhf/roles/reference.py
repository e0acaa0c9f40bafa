"""The reference: the frozen policy that the KL is measured from."""

from __future__ import annotations

from torch import Tensor

from mrlhf.batch import Rollout
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.roles.token_logprobs import TokenLogprobs
from mrlhf.training.engine import ModelEngine


class Reference:
    """Asks a frozen language model for log-probabilities or logits of responses."""

    def __init__(self, engine: ModelEngine, temperature: float) -> None:
        self.engine = engine
        self._token_logprobs = TokenLogprobs(engine, temperature)

    def logprobs(self, rollout: Rollout, cut: BatchCut) -> Tensor:
        """Log-probabilities of the response tokens, float32 [batch, response_len] on every host.

        Args:
            rollout: the global batch.
            cut: its cut for this model.
        """
        return self._token_logprobs.of_batch(cut.packs, rollout.shape)

    def logits(self, cut: BatchCut) -> list[Tensor]:
        """This rank's shard of the logits, for the KL over the whole vocabulary.

        They take host memory: response tokens x vocab_shard x bytes of the dtype.

        Args:
            cut: the actor's cut of the batch; the layout must be the actor's too.

        Returns:
            [selected, vocab_shard] for each of this rank's packs, on the host; nothing before the
            last stage.
        """
        return self.engine.forward(cut.packs, _to_host)


def _to_host(logits: Tensor, number: int) -> Tensor:
    return logits.cpu()
